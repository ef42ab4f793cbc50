"""workflow.environment: objects of a class of the user's own, one a rollout, played over the turns of the policy.

    prompt(task)      definitions of the tools, the task's messages, what `reset` returned
    next(rollout)     the turn is read: calls are answered by tools, or a game makes its step
    score(rollouts)   get_reward(), the attribute `reward`, what a game gave, else the task's reward function

Where an object is lost (after a restart, or as it failed) workflow.resume says what becomes of its rollout: another one
plays the same turns, and what it says to them must be what stands in the rollout, token by token; or it gets the state
that the lost one had (saved_states.py); or the rollout begins again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollover.envs.chat import Chat, sampled_turns
from rollover.envs.protocol import (
    BeginAgain,
    EnvironmentSetup,
    Keep,
    Observation,
    RunEnvironment,
    keeps_nothing,
    written,
)
from rollover.envs.saved_states import KINDS, CannotRestore, Played, SavedStates, Told
from rollover.envs.tools import (
    CallCounts,
    Content,
    ToolCalls,
    build_tool_format,
    content_of,
    tool_schemas,
    with_system_text,
)
from rollover.envs.user_code import Outcome, UserCode
from rollover.functions import OwnFunction, described, own_function
from rollover.images import BadImage
from rollover.rewards.registry import to_result
from rollover.suggest import did_you_mean
from rollover.tasks.image_parts import are_parts
from rollover.types import (
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    Segment,
    StopReason,
    Task,
    content_text,
    joined,
)

_MOST_TEXTS = 100_000  # of `reset` that are remembered, as hashes, to see that it says the same to every rollout


_NOTHING = object()
_Written = tuple[list[int], list[str]]
"""Token ids, and the digests of the images among them."""


class CannotGoOn(ValueError):
    """The user's class failed, or says something else than it did."""


class ClassEnvironment(RunEnvironment):
    """Of one run. ValueError where the class, the format of calls or the chat template does not fit. `keep` is told of
    the states of its objects, which are kept over a kill."""

    def __init__(self, setup: EnvironmentSetup, keep: Keep = keeps_nothing) -> None:
        config = setup.config
        workflow, prompt_columns = config.workflow, {s.prompt_column for s in config.tasks.sources}
        self.user = UserClass(workflow.environment, {"question", "problem", *prompt_columns} - {""}, workflow.resume)
        self._by_turns = workflow.credit == "turn_returns"
        self.max_turns, self.max_tokens = workflow.max_turns, config.rollout.max_new_tokens
        self.retries = workflow.retries
        self.format = build_tool_format(workflow.tool_format)
        own_format = not self.user.is_game and ":" in workflow.tool_format
        self._system_text = self.format.definitions(self.user.schemas) if own_format else ""
        # A template's own way to tell of tools says how to call them, too: not for a format of one's own.
        tools = [] if own_format else self.user.schemas
        role = "user" if self.user.is_game else "tool"
        Chat(setup.tokenizer).require(role)
        self.chat = Chat(setup.tokenizer, tools, "hermes" if own_format else workflow.tool_format, setup.processor)
        fit = self.chat.fit(role)
        of_template = "" if fit.exact else f"{fit.why}: episodes keep what was sampled, as it was sampled"
        self.notice = "\n".join(filter(None, (of_template, self.user.notice)))
        self.code = UserCode(workflow.tool_timeout_s)
        self.states = SavedStates(self.user.kind, self.code, f"{KEY} = {self.user.spec!r}", keep)
        self.calls = ToolCalls(self.code, self.user.schemas, setup.tokenizer, workflow.max_tool_tokens)
        self._score, self._scores_singly = setup.score, setup.scores_singly
        self._episodes: dict[tuple[int, int], Played] = {}
        self._texts: dict[tuple[str, int], int] = {}  # hashes of what `reset` said, by task
        self._owns_reward: bool | None = True if self.user.has_reward or self.user.is_game else None  # not known yet
        self._counts = CallCounts()
        self._ends: dict[str, int] = {"done": 0, "max_turns": 0, "length": 0}

    # What a run asks

    def prompt(self, task: Task, instead: Sequence[Mapping[str, str]] | str | None = None) -> Prompt:
        """See RunEnvironment. Waits for `reset`. CannotGoOn where that fails, or says something else when it is asked
        again."""
        told = self._opened_now(task)
        if not self._texts and told != self._opened_now(task):
            raise self._failed(
                f"says one thing in reset, and another when it is asked again for the same task ({task.task_id}): all"
                " rollouts of a task have one prompt. Make it of the columns alone, as by random.Random(answer)"
            )
        self._texts[task.task_id, task.attempt] = hash(_shown(told))
        if len(self._texts) > _MOST_TEXTS:
            del self._texts[next(iter(self._texts))]
        said = task.messages or task.content if instead is None else instead
        given = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages: list[dict[str, Any]] = [dict(message) for message in given]
        if told is not None:
            messages[-1]["content"] = joined(messages[-1]["content"], told)
        messages[-1:-1] = self.user.examples
        return self.chat.prompt(with_system_text(messages, self._system_text) if self._system_text else messages)

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """They left the system: their objects are dropped."""
        for rollout in rollouts:
            self._episodes.pop(_key(rollout), None)
            self.states.forget(rollout)

    def recall(self, group_id: int, sibling: int, kept: Mapping[str, Any]) -> None:
        self.states.recall((group_id, sibling), kept)

    def on_restart(self, rollout: Rollout, kept: Mapping[str, Any]) -> None:
        self._episodes.pop(_key(rollout), None)
        self.states.on_restart(rollout, kept)

    def has_lost(self, rollout: Rollout) -> bool:
        """Whether a held rollout at which nobody is at work can neither go on nor be scored, as its object is lost and
        no other one can stand in its place. May wait for `reset`."""
        if _key(rollout) in self._episodes or self.states.kind == "stateless":
            return False
        if rollout.state is not RolloutState.SCORING:
            num_answered = len(_said(rollout))
            return not self.states.can_be_had(rollout, num_answered, num_answered + 1)
        if rollout.stop_reason in (StopReason.TIMEOUT, StopReason.ERROR):  # its reward is known
            return False
        return not self.states.can_be_had(rollout, len(_seen(rollout, self.max_tokens))) and self._rewards_itself(
            rollout.task
        )

    def stats(self) -> dict[str, float]:
        """Cumulative counters, evaluations left out."""
        ends = {f"episodes/{name}": float(num) for name, num in self._ends.items()}
        behind = {"tools/left_behind": float(self.code.num_left_behind)}
        return self._counts.stats() | behind | ends | self.states.stats()

    # Environment

    async def next(self, rollout: Rollout) -> Segment | None:
        """See Environment. CannotGoOn where the class fails; BeginAgain where no object can be asked any more."""
        turns = sampled_turns(rollout)
        try:
            told = (await self._caught_up(rollout, turns, len(turns) - 1)).told[-1]
        except CannotGoOn as error:
            if self.states.can_be_had(rollout, len(turns) - 1, len(turns)):
                raise
            raise BeginAgain(str(error)) from error
        if told.done:
            return written(rollout, (), done=True) if self.user.is_game else None
        if len(turns) >= self.max_turns:
            return None
        return written(rollout, self.chat.continuation(turns[-1], told.messages))

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        """See Environment. What fails is a missing reward."""
        if self._owns_reward is None:  # nothing was begun since a restart
            await self._begun(rollouts[0].task)
        if self._owns_reward:
            rewards = list(await asyncio.gather(*map(self._reward, rollouts)))
        else:
            rewards = await self._score(rollouts)
        for rollout in rollouts:
            episode = self._episodes.pop(_key(rollout), None)
            if rollout.group_id >= 0:
                self._ends[self._end_of(rollout, episode)] += 1
        return rewards

    def scores_singly(self, task: Task, /) -> bool:
        return bool(self._owns_reward) or self._scores_singly(task)

    # Objects of the user's class

    def _opened_now(self, task: Task) -> Content | None:
        """What `reset` says for the task."""
        outcome = self.code.call_now(self.user.make.function)
        self._check(outcome, "its construction")
        made = outcome.value
        return self._after_reset(made, self.code.call_now(made.reset, **self.user.columns_for_reset(task)))

    async def _begun(self, task: Task) -> Played:
        """A new object, after its `reset`."""
        outcome = await self.code.call(self.user.make.function)
        self._check(outcome, "its construction")
        made = outcome.value
        outcome = await self.code.call(made.reset, **self.user.columns_for_reset(task))
        told = hash(_shown(self._after_reset(made, outcome)))
        if told != self._texts.get((task.task_id, task.attempt), told):
            raise self._failed(
                f"says something else in reset than for the prompt of task {task.task_id}: make it of the columns alone"
            )
        return Played(made)

    def _after_reset(self, made: Any, outcome: Outcome) -> Content | None:
        self._check(outcome, "reset")
        must = "None, a text, or a list of content parts with an image"
        told = None if outcome.value is None else self._content(outcome.value, outcome.value, "reset", must)
        if self._owns_reward is None:
            self._owns_reward = inspect.getattr_static(made, "reward", _NOTHING) is not _NOTHING  # runs no property
        return told

    def _content(self, value: Any, returned: Any, what: str, must: str) -> Content:
        """The content of a message, as it stands in what the user's class `returned`."""
        if not isinstance(value, str) and not are_parts(value):
            raise self._failed(f"returned {described(returned)} from {what}: it must be {must}")
        try:
            return content_of(value)
        except BadImage as error:
            raise self._failed(f"returned an image from {what} that cannot be used: {error}") from error

    async def _caught_up(self, rollout: Rollout, turns: list[list[int]], least: int) -> Played:
        """The object of the rollout, after these turns of it. Where that is lost another one, which has seen so many
        of them at `least`; BeginAgain where there is none."""
        # One that is cut off in the middle of a turn is never used again.
        episode = self._episodes.pop(_key(rollout), None)
        if episode is None or episode.turns != turns[: len(episode.turns)]:
            episode = await self._another(rollout, turns, least)
        said = _said(rollout)
        for number in range(len(episode.turns), len(turns)):
            is_new = number == len(turns) - 1
            counts = self._counts if is_new and rollout.group_id >= 0 else CallCounts()
            told = await self._play(episode, self.chat.text(turns[number]), counts)
            if not is_new and (told.done or self._continued(turns[number], told) != said[number]):
                raise self._failed(
                    f"does not say again what it said to turn {number + 1} of rollout {rollout.rollout_id}, as it must"
                    " after a restart: make its answers depend on the columns and the turns alone"
                )
            episode.turns.append(turns[number])
            episode.told.append(told)
            await self.states.save(rollout, episode)
        self._episodes[_key(rollout)] = episode
        return episode

    def _continued(self, turn: list[int], told: Told) -> _Written:
        found = self.chat.continuation(turn, told.messages)
        return list(found.ids), [image.digest for image in found.media]

    async def _another(self, rollout: Rollout, turns: list[list[int]], least: int) -> Played:
        """An object in the place of one that is lost, or was never made."""
        if not self.states.can_be_had(rollout, least, len(turns)):
            raise BeginAgain(f"{KEY} = {self.user.spec!r} has lost the object of rollout {rollout.rollout_id}")
        episode, saved = await self._begun(rollout.task), self.states.find(rollout, least, len(turns))
        if saved is None:
            return episode
        try:
            return await self.states.restore(rollout, episode, saved)
        except CannotRestore as error:
            raise self._failed(str(error)) from error

    async def _play(self, episode: Played, text: str, counts: CallCounts) -> Told:
        if self.user.is_game:
            outcome = await self.code.call(episode.made.step, text)
            self._check(outcome, "step")
            seen = outcome.value
            must = (
                "an Observation (rollover.Observation) with a text, or a list of content parts with an image, and a"
                " finite reward"
            )
            is_one = isinstance(seen, Observation) and "error" not in to_result(seen.reward)
            content = self.calls.cut(self._content(seen.text if is_one else None, seen, "step", must))
            return Told([{"role": "user", "content": content}], seen.done, float(seen.reward))
        if not (calls := self.format.read(text)):
            return Told(done=True)
        answers = await self.calls.answers(calls, self.user.tools_of(episode.made), counts)
        return Told([{"role": "tool", "content": answer} for answer in answers])

    # Rewards

    async def _reward(self, rollout: Rollout) -> Reward:
        """Where it is missing another object is asked, if one can be had, else the same: workflow.retries times."""
        reward = await self._reward_of_one(rollout)
        for _ in range(self.retries):
            if not reward.missing:
                break
            if self.states.can_be_had(rollout, len(_seen(rollout, self.max_tokens))):
                self._episodes.pop(_key(rollout), None)
            reward = await self._reward_of_one(rollout)
        return reward

    async def _reward_of_one(self, rollout: Rollout) -> Reward:
        turns, seen = sampled_turns(rollout), _seen(rollout, self.max_tokens)
        try:
            episode = await self._caught_up(rollout, seen, len(seen))
        except ValueError as error:
            return Reward(None, error=str(error))
        if self.user.has_reward:
            outcome, what = await self.code.call(episode.made.get_reward), "get_reward"
        elif self.user.is_game:
            outcome, what = Outcome(sum((told.reward for told in episode.told), 0.0)), "step"
        else:  # it may be a property
            outcome, what = await self.code.call(getattr, episode.made, "reward", None), "its attribute reward"
        if outcome.failed:
            return Reward(None, error=str(self._failed(f"failed at {what}: {outcome.why}")))
        result = to_result(outcome.value)
        if "error" in result:
            return Reward(None, error=f"{KEY} = {self.user.spec!r}: its reward: {result['error']}")
        score = result["score"]
        if not (self._by_turns and self.user.is_game) or self.user.has_reward:
            return Reward(score, result["extras"], texts=result.get("texts", {}))
        # The score is added to the reward of the last turn, and is their sum already.
        of_turns = [told.reward for told in episode.told] + [0.0] * (len(turns) - len(episode.told))
        return Reward(score, turns=[*of_turns[:-1], *(last - score for last in of_turns[-1:])])

    def _rewards_itself(self, task: Task) -> bool:
        """Whether its objects are asked for the reward."""
        if self._owns_reward is None:  # nothing was begun since a restart
            self._opened_now(task)
        return bool(self._owns_reward)

    def _end_of(self, rollout: Rollout, episode: Played | None) -> str:
        if rollout.stop_reason is StopReason.LENGTH:
            return "length"
        ended = episode is not None and bool(episode.told) and episode.told[-1].done
        return "done" if ended or len(sampled_turns(rollout)) < self.max_turns else "max_turns"

    def _check(self, outcome: Outcome, what: str) -> None:
        if outcome.failed:
            raise self._failed(f"failed at {what}: {outcome.why}")

    def _failed(self, why: str) -> CannotGoOn:
        return CannotGoOn(f"{KEY} = {self.user.spec!r} {why}")


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.group_id, rollout.sibling


def _seen(rollout: Rollout, max_tokens: int) -> list[list[int]]:
    """The turns that the object of one that is finished has seen."""
    turns = sampled_turns(rollout)
    # The budget was used up in its last turn: nothing answered that. It has more tokens than that, and did not end by
    # them, where it was finished before a restart with a smaller budget.
    by_length = rollout.num_tokens == max_tokens or rollout.stop_reason is StopReason.LENGTH
    used_up = rollout.num_tokens >= max_tokens and by_length and rollout.segments[-1].trainable
    return turns[:-1] if used_up else turns


def _said(rollout: Rollout) -> list[_Written]:
    """The environment's answers after each turn, in order."""
    return [(s.token_ids.tolist(), [image.digest for image in s.media]) for s in rollout.segments if not s.trainable]


def _shown(content: Content | None) -> str | None:
    """A text that is equal for equal contents."""
    return None if content is None else content_text(content, lambda part: f"[{part['sha256']}]")


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
