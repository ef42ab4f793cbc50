"""A class of the user's own as an environment: TRL's `environment_factory` classes as they are, and games.

    reset(**columns) -> None or a text     before the first turn; the text is added to the last message of the prompt
    any other public method                a tool: types and docstring describe it
    step(message) -> Observation           a game, in place of tools
    get_reward() -> number                 or an attribute `reward`; without either the task's reward function scores
    examples = [...]                       messages of a worked example, before the last message of the prompt
    snapshot() -> JSON, restore(state)     the state after a turn, and how another object gets it after a kill; one
                                           alone, or both with other parameters, are tools
    resume = "restart"                     what becomes of its episodes after a kill, where workflow.resume is "auto"

Owns what such a class must have, and which columns `reset` is given. Calls nothing but the class itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollover.envs.saved_states import KINDS
from rollover.envs.tools import tool_schemas
from rollover.functions import OwnFunction, described, own_function
from rollover.suggest import did_you_mean
from rollover.types import Task

KEY = "workflow.environment"
_RESERVED = ("reset", "get_reward", "step")
_DURABLE = ("snapshot", "restore")
_RETURNS = "an environment: an object with reset(**columns), and with methods that are tools, or step(message)"


class UserClass:
    """What `spec` names. ValueError where it can be no environment, with the fix.

    `prompt_columns`: names under which `reset` may ask for the prompt. `resume`: workflow.resume; what becomes of its
    episodes after a kill is `kind`. `notice`: what the user should know; "": nothing.
    """

    def __init__(self, spec: str, prompt_columns: Iterable[str] = (), resume: str = "auto") -> None:
        self.make: OwnFunction = own_function(KEY, spec, _RETURNS)
        self.spec, self._prompt_columns = spec, ("prompt", *prompt_columns)
        probe = self.make()
        methods = _public_methods(probe)
        if "reset" not in methods:
            raise self._refused("has no method reset: write def reset(self, **columns)")
        self.kind = self._kind(resume, probe, methods)
        is_durable = self._why_not_durable(methods) is None
        no_tools = _RESERVED + (_DURABLE if is_durable else ())
        self.tool_names = [name for name in methods if name not in no_tools]
        self.notice = ""
        if is_durable and _can_be_tools([methods[name] for name in _DURABLE]):
            self.notice = (
                f"{KEY} = {spec!r}: the policy is not told of snapshot and restore, which keep the state of an object"
                " over a kill. If they are tools give them other names"
            )
        self.is_game = "step" in methods
        if self.is_game and self.tool_names:
            raise self._refused(
                f"has step, as a game has, and the tools {', '.join(self.tool_names)}: rename step, or let the names"
                " of the others begin with an underscore"
            )
        if not self.is_game and not self.tool_names:
            raise self._refused(
                "has neither tools nor step: give it public methods that the policy can call, or step(message) ->"
                " Observation"
            )
        self.has_reward = "get_reward" in methods
        self.examples = self._examples(getattr(probe, "examples", ()))
        try:
            self.schemas = tool_schemas([methods[name] for name in self.tool_names])
        except ValueError as error:
            raise self._refused(f"cannot be told to the policy: {error}") from error
        self._parameters = inspect.signature(methods["reset"]).parameters

    def columns_for_reset(self, task: Task) -> dict[str, Any]:
        """The arguments of `reset`: the prompt and the columns of the task, those that it takes. ValueError where it
        needs one that the data does not have."""
        named = {n: p for n, p in self._parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        prompts = {name: task.reward_prompt for name in self._prompt_columns if name == "prompt" or name in named}
        columns = {**prompts, **task.columns}
        needed = {name for name, p in named.items() if p.default is p.empty}
        if missing := sorted(needed - columns.keys()):
            raise self._refused(
                f"takes {', '.join(missing)} in reset, but the data of {task.source} has no such column: it has"
                f" {', '.join(columns)}{did_you_mean(missing[0], list(columns))}. Rename the parameter, give it a"
                " default, or write **columns"
            )
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            return columns
        return {name: value for name, value in columns.items() if name in named}

    def tools_of(self, made: object) -> Mapping[str, Callable[..., Any]]:
        """The tools of an object of the class, by their names."""
        return {name: getattr(made, name) for name in self.tool_names}

    def _kind(self, configured: str, probe: object, methods: Mapping[str, Callable[..., Any]]) -> str:
        """What becomes of its episodes after a kill. The configuration says so, else the class, else what it has."""
        said = getattr(probe, "resume", "auto")
        own = said if isinstance(said, str) else "auto"  # a tool may have that name
        if own not in ("auto", *KINDS):
            raise self._refused(f'has resume = "{own}": write one of {", ".join(KINDS)}, or leave it out')
        wanted = own if configured == "auto" else configured
        if wanted in ("stateless", "restart"):
            return wanted
        if (why := self._why_not_durable(methods)) is None:
            return "snapshot"
        own_tools = [method for name, method in methods.items() if name in _DURABLE]
        if wanted == "auto" and _can_be_tools(own_tools):  # of a class that was written for other programs, say
            return "stateless"
        raise self._refused(why)

    @staticmethod
    def _why_not_durable(methods: Mapping[str, Callable[..., Any]]) -> str | None:
        """Why its states cannot be kept; None: they can, and the two methods that do it are no tools."""
        if missing := [name for name in _DURABLE if name not in methods]:
            tool = (
                f" where {'restore' if missing == ['snapshot'] else 'snapshot'} is a tool" if len(missing) == 1 else ""
            )
            return (
                f"has no {' and no '.join(missing)}: after a kill an episode goes on from what snapshot() returned,"
                f' which restore(state) gets. Write both, or set workflow.resume = "stateless" or "restart"{tool}'
            )
        for name, arguments in (("snapshot", ()), ("restore", ({},))):
            try:
                inspect.signature(methods[name]).bind(*arguments)
            except TypeError as error:
                return (
                    f"has {name} with other parameters ({error}): write def snapshot(self), which returns JSON, and def"
                    " restore(self, state). Where they are tools give them types and docstrings, or other names"
                )
        return None

    def _examples(self, found: object) -> list[dict[str, str]]:
        """The messages of a worked example. ValueError where it is none."""
        messages = list(found) if isinstance(found, list | tuple) else [found]
        for message in messages:
            texts = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None,)
            if not all(isinstance(text, str) for text in texts):
                raise self._refused(f"has {described(message)} in examples: write messages with role and content")
        return [dict(message) for message in messages]  # type: ignore[call-overload]

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"{KEY} = {self.spec!r} {why}")


def _can_be_tools(methods: list[Callable[..., Any]]) -> bool:
    try:
        tool_schemas(methods)
    except ValueError:
        return False
    return True


def _public_methods(made: object) -> dict[str, Callable[..., Any]]:
    """By their names, without running a property."""
    names = [name for name in dir(type(made)) if not name.startswith("_")]
    found = ((name, inspect.getattr_static(type(made), name)) for name in names)
    kinds = (classmethod, staticmethod)
    return {name: getattr(made, name) for name, value in found if inspect.isfunction(value) or isinstance(value, kinds)}
