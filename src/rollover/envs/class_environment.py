"""workflow.environment: a class of the user; each rollout has one object of it. TRL's `environment_factory` classes
work unchanged, and so do games.

    reset(**columns) -> None or a text     before the first turn; the text is appended to the prompt's last message
    any other public method                a tool, described by its types and docstring
    step(message) -> Observation           a game, instead of tools
    get_reward() -> number                 or an attribute `reward`; without either, the task's reward function scores
    examples = [...]                       messages of a worked example, before the prompt's last message
    snapshot() -> JSON, restore(state)     the state after a turn, and its transfer to another object after a kill; one
                                           alone, or both with other parameters, are tools
    resume = "restart"                     workflow.resume for this class, where the configuration has "auto"

If an object is lost (its process was killed, or it failed), workflow.resume decides: another object repeats the same
turns, and its answers must equal those in the rollout, token by token; or another object gets the saved state
(saved_states.py); or the rollout begins again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollover.envs.chat import Chat, sampled_turns
from rollover.envs.protocol import (
    EnvironmentSetup,
    Keep,
    Observation,
    RunEnvironment,
    StateLost,
    keeps_nothing,
    written,
)
from rollover.envs.saved_states import KINDS, EnvObject, RestoreFailed, SavedStates, TurnAnswer
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
from rollover.functions import CustomFunction, custom_function, described
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

_MAX_TEXTS = 100_000  # hashes of `reset` texts, kept to check that all rollouts of a task get the same one


_NOTHING = object()
_EnvTokens = tuple[list[int], list[str]]
"""Token ids, and the digests of the images among them."""


class UserClassFailed(ValueError):
    """The user's class failed, or its answer changed when a turn was repeated."""


class ClassEnvironment(RunEnvironment):
    """Environment of one run. `keep` stores the states of its objects. ValueError for an invalid class or tool format,
    or an unsuitable chat template."""

    def __init__(self, setup: EnvironmentSetup, keep: Keep = keeps_nothing) -> None:
        config = setup.config
        workflow, prompt_columns = config.workflow, {s.prompt_column for s in config.tasks.sources}
        self.user = UserClass(workflow.environment, {"question", "problem", *prompt_columns} - {""}, workflow.resume)
        self._turn_rewards = workflow.credit == "turn_returns"
        self.max_turns, self.max_tokens = workflow.max_turns, config.rollout.max_new_tokens
        self.retries = workflow.retries
        self.format = build_tool_format(workflow.tool_format)
        own_format = not self.user.is_game and ":" in workflow.tool_format
        self._system_text = self.format.definitions(self.user.schemas) if own_format else ""
        # A template that renders tools also says how to call them, which contradicts a custom format.
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
        self._episodes: dict[tuple[int, int], EnvObject] = {}
        self._texts: dict[tuple[str, int], int] = {}  # hashes of the texts of `reset`, by task
        self._has_own_reward: bool | None = True if self.user.has_reward or self.user.is_game else None  # not known yet
        self._counts = CallCounts()
        self._ends: dict[str, int] = {"done": 0, "max_turns": 0, "length": 0}

    # RunEnvironment

    def prompt(self, task: Task, instead: Sequence[Mapping[str, str]] | str | None = None) -> Prompt:
        """See RunEnvironment. Blocks until `reset` returns. UserClassFailed if it fails, or its text is not always the
        same."""
        opening = self._reset_now(task)
        if not self._texts and opening != self._reset_now(task):
            raise self._failed(
                f"returns different texts from reset for the same task ({task.task_id}): all rollouts of a task have"
                " one prompt. Derive it from the columns only, for instance by random.Random(answer)"
            )
        self._texts[task.task_id, task.attempt] = hash(_content_key(opening))
        if len(self._texts) > _MAX_TEXTS:
            del self._texts[next(iter(self._texts))]
        content = task.messages or task.content if instead is None else instead
        given = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages: list[dict[str, Any]] = [dict(message) for message in given]
        if opening is not None:
            messages[-1]["content"] = joined(messages[-1]["content"], opening)
        messages[-1:-1] = self.user.examples
        return self.chat.prompt(with_system_text(messages, self._system_text) if self._system_text else messages)

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Drop the objects of rollouts that left the system."""
        for rollout in rollouts:
            self._episodes.pop(_key(rollout), None)
            self.states.drop(rollout)

    def recall(self, group_id: int, sibling: int, kept: Mapping[str, Any]) -> None:
        self.states.recall((group_id, sibling), kept)

    def on_restart(self, rollout: Rollout, kept: Mapping[str, Any]) -> None:
        self._episodes.pop(_key(rollout), None)
        self.states.on_restart(rollout, kept)

    def has_lost(self, rollout: Rollout) -> bool:
        """Return whether a rollout's object is lost and no other can replace it, so that the rollout can neither
        continue nor be scored. May block for `reset`."""
        if _key(rollout) in self._episodes or self.states.kind == "stateless":
            return False
        if rollout.state is not RolloutState.SCORING:
            num_answered = len(_env_texts(rollout))
            return not self.states.can_replace(rollout, num_answered, num_answered + 1)
        if rollout.stop_reason in (StopReason.TIMEOUT, StopReason.ERROR):  # its reward is known
            return False
        num_seen = len(_seen_turns(rollout, self.max_tokens))
        return not self.states.can_replace(rollout, num_seen) and self._rewards_itself(rollout.task)

    def stats(self) -> dict[str, float]:
        """Return cumulative counters, without evaluations."""
        ends = {f"episodes/{name}": float(num) for name, num in self._ends.items()}
        behind = {"tools/left_behind": float(self.code.num_abandoned)}
        return self._counts.stats() | behind | ends | self.states.stats()

    # Environment

    async def next(self, rollout: Rollout) -> Segment | None:
        """See Environment. UserClassFailed if the class fails; StateLost if no object can replace a lost one."""
        turns = sampled_turns(rollout)
        try:
            answer = (await self._object_after(rollout, turns, len(turns) - 1)).answers[-1]
        except UserClassFailed as error:
            if self.states.can_replace(rollout, len(turns) - 1, len(turns)):
                raise
            raise StateLost(str(error)) from error
        if answer.done:
            return written(rollout, (), done=True) if self.user.is_game else None
        if len(turns) >= self.max_turns:
            return None
        return written(rollout, self.chat.continuation(turns[-1], answer.messages))

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        """See Environment. A failure is a missing reward."""
        if self._has_own_reward is None:  # no object was made since a restart
            await self._new_object(rollouts[0].task)
        if self._has_own_reward:
            rewards = list(await asyncio.gather(*map(self._reward, rollouts)))
        else:
            rewards = await self._score(rollouts)
        for rollout in rollouts:
            episode = self._episodes.pop(_key(rollout), None)
            if rollout.group_id >= 0:
                self._ends[self._end_of(rollout, episode)] += 1
        return rewards

    def scores_singly(self, task: Task, /) -> bool:
        return bool(self._has_own_reward) or self._scores_singly(task)

    # Objects of the user's class

    def _reset_now(self, task: Task) -> Content | None:
        """Return the text of `reset` for the task. Blocks."""
        outcome = self.code.call_blocking(self.user.make.function)
        self._check(outcome, "its construction")
        made = outcome.value
        return self._after_reset(made, self.code.call_blocking(made.reset, **self.user.columns_for_reset(task)))

    async def _new_object(self, task: Task) -> EnvObject:
        """Return a new object, after its `reset`."""
        outcome = await self.code.call(self.user.make.function)
        self._check(outcome, "its construction")
        made = outcome.value
        outcome = await self.code.call(made.reset, **self.user.columns_for_reset(task))
        opening = hash(_content_key(self._after_reset(made, outcome)))
        if opening != self._texts.get((task.task_id, task.attempt), opening):
            raise self._failed(
                f"returns another text from reset than for the prompt of task {task.task_id}: derive it from the"
                " columns only"
            )
        return EnvObject(made)

    def _after_reset(self, made: Any, outcome: Outcome) -> Content | None:
        self._check(outcome, "reset")
        must = "None, a text, or a list of content parts with an image"
        opening = None if outcome.value is None else self._content(outcome.value, outcome.value, "reset", must)
        if self._has_own_reward is None:
            self._has_own_reward = inspect.getattr_static(made, "reward", _NOTHING) is not _NOTHING  # runs no property
        return opening

    def _content(self, value: Any, returned: Any, what: str, must: str) -> Content:
        """Return the content of a message that the user's class `returned`."""
        if not isinstance(value, str) and not are_parts(value):
            raise self._failed(f"returned {described(returned)} from {what}: it must be {must}")
        try:
            return content_of(value)
        except BadImage as error:
            raise self._failed(f"returned an image from {what} that cannot be used: {error}") from error

    async def _object_after(self, rollout: Rollout, turns: list[list[int]], least: int) -> EnvObject:
        """Return the rollout's object after these turns. A lost one is replaced by one that has seen at `least` so many
        of them; StateLost if there is none."""
        # Removed meanwhile: an object that is interrupted in the middle of a turn is never used again.
        episode = self._episodes.pop(_key(rollout), None)
        if episode is None or episode.turns != turns[: len(episode.turns)]:
            episode = await self._replacement(rollout, turns, least)
        written_before = _env_texts(rollout)
        for number in range(len(episode.turns), len(turns)):
            is_new = number == len(turns) - 1
            counts = self._counts if is_new and rollout.group_id >= 0 else CallCounts()
            answer = await self._play(episode, self.chat.text(turns[number]), counts)
            if not is_new and (answer.done or self._continued(turns[number], answer) != written_before[number]):
                raise self._failed(
                    f"answers turn {number + 1} of rollout {rollout.rollout_id} differently after a restart: its"
                    " answers must depend on the columns and the turns only"
                )
            episode.turns.append(turns[number])
            episode.answers.append(answer)
            await self.states.save(rollout, episode)
        self._episodes[_key(rollout)] = episode
        return episode

    def _continued(self, turn: list[int], answer: TurnAnswer) -> _EnvTokens:
        found = self.chat.continuation(turn, answer.messages)
        return list(found.ids), [image.digest for image in found.media]

    async def _replacement(self, rollout: Rollout, turns: list[list[int]], least: int) -> EnvObject:
        """Return an object for a rollout whose object is lost, or was never made."""
        if not self.states.can_replace(rollout, least, len(turns)):
            raise StateLost(f"{KEY} = {self.user.spec!r} has lost the object of rollout {rollout.rollout_id}")
        episode, saved = await self._new_object(rollout.task), self.states.find(rollout, least, len(turns))
        if saved is None:
            return episode
        try:
            return await self.states.restore(rollout, episode, saved)
        except RestoreFailed as error:
            raise self._failed(str(error)) from error

    async def _play(self, episode: EnvObject, text: str, counts: CallCounts) -> TurnAnswer:
        if self.user.is_game:
            outcome = await self.code.call(episode.made.step, text)
            self._check(outcome, "step")
            seen = outcome.value
            must = (
                "an Observation (rollover.Observation) with a text, or a list of content parts with an image, and a"
                " finite reward"
            )
            is_one = isinstance(seen, Observation) and "error" not in to_result(seen.reward)
            content = self.calls.truncate(self._content(seen.text if is_one else None, seen, "step", must))
            return TurnAnswer([{"role": "user", "content": content}], seen.done, float(seen.reward))
        if not (calls := self.format.read(text)):
            return TurnAnswer(done=True)
        answers = await self.calls.answers(calls, self.user.tools_of(episode.made), counts)
        return TurnAnswer([{"role": "tool", "content": answer} for answer in answers])

    # Rewards

    async def _reward(self, rollout: Rollout) -> Reward:
        """Retry a missing reward workflow.retries times, with another object if one can replace it."""
        reward = await self._reward_of_one(rollout)
        for _ in range(self.retries):
            if not reward.missing:
                break
            if self.states.can_replace(rollout, len(_seen_turns(rollout, self.max_tokens))):
                self._episodes.pop(_key(rollout), None)
            reward = await self._reward_of_one(rollout)
        return reward

    async def _reward_of_one(self, rollout: Rollout) -> Reward:
        turns, seen = sampled_turns(rollout), _seen_turns(rollout, self.max_tokens)
        try:
            episode = await self._object_after(rollout, seen, len(seen))
        except ValueError as error:
            return Reward(None, error=str(error))
        if self.user.has_reward:
            outcome, what = await self.code.call(episode.made.get_reward), "get_reward"
        elif self.user.is_game:
            outcome, what = Outcome(sum((answer.reward for answer in episode.answers), 0.0)), "step"
        else:  # may be a property
            outcome, what = await self.code.call(getattr, episode.made, "reward", None), "its attribute reward"
        if outcome.failed:
            return Reward(None, error=str(self._failed(f"failed at {what}: {outcome.why}")))
        result = to_result(outcome.value)
        if "error" in result:
            return Reward(None, error=f"{KEY} = {self.user.spec!r}: its reward: {result['error']}")
        score = result["score"]
        if not (self._turn_rewards and self.user.is_game) or self.user.has_reward:
            return Reward(score, result["extras"], texts=result.get("texts", {}))
        # The trainer adds the score to the last turn's reward; it is already the sum of all turns.
        of_turns = [answer.reward for answer in episode.answers] + [0.0] * (len(turns) - len(episode.answers))
        return Reward(score, turns=[*of_turns[:-1], *(last - score for last in of_turns[-1:])])

    def _rewards_itself(self, task: Task) -> bool:
        """Whether the objects score the rollouts."""
        if self._has_own_reward is None:  # no object was made since a restart
            self._reset_now(task)
        return bool(self._has_own_reward)

    def _end_of(self, rollout: Rollout, episode: EnvObject | None) -> str:
        if rollout.stop_reason is StopReason.LENGTH:
            return "length"
        ended = episode is not None and bool(episode.answers) and episode.answers[-1].done
        return "done" if ended or len(sampled_turns(rollout)) < self.max_turns else "max_turns"

    def _check(self, outcome: Outcome, what: str) -> None:
        if outcome.failed:
            raise self._failed(f"failed at {what}: {outcome.why}")

    def _failed(self, why: str) -> UserClassFailed:
        return UserClassFailed(f"{KEY} = {self.user.spec!r} {why}")


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.group_id, rollout.sibling


def _seen_turns(rollout: Rollout, max_tokens: int) -> list[list[int]]:
    """Return the turns that the object of a finished rollout has seen."""
    turns = sampled_turns(rollout)
    # A last turn that used up the token budget got no answer. After a restart with a smaller budget, a rollout may have
    # more tokens than the budget without having ended by length.
    by_length = rollout.num_tokens == max_tokens or rollout.stop_reason is StopReason.LENGTH
    used_up = rollout.num_tokens >= max_tokens and by_length and rollout.segments[-1].trainable
    return turns[:-1] if used_up else turns


def _env_texts(rollout: Rollout) -> list[_EnvTokens]:
    """Return the environment's tokens after each turn, in order."""
    return [(s.token_ids.tolist(), [image.digest for image in s.media]) for s in rollout.segments if not s.trainable]


def _content_key(content: Content | None) -> str | None:
    """Return a text that is equal for equal contents."""
    return None if content is None else content_text(content, lambda part: f"[{part['sha256']}]")


KEY = "workflow.environment"
_RESERVED = ("reset", "get_reward", "step")
_DURABLE = ("snapshot", "restore")
_RETURNS = "an environment: an object with reset(**columns), and with methods that are tools, or step(message)"


class UserClass:
    """The user's class, named `spec`. ValueError, with the fix, if it is no environment.

    `prompt_columns`: parameters of `reset` that receive the prompt. `resume`: workflow.resume, from which `kind`
    follows (saved_states.py). `notice`: a warning for the user, or "".
    """

    def __init__(self, spec: str, prompt_columns: Iterable[str] = (), resume: str = "auto") -> None:
        self.make: CustomFunction = custom_function(KEY, spec, _RETURNS)
        self.spec, self._prompt_columns = spec, ("prompt", *prompt_columns)
        probe = self.make()
        methods = _public_methods(probe)
        if "reset" not in methods:
            raise self._refused("has no method reset: write def reset(self, **columns)")
        self.kind = self._kind(resume, probe, methods)
        is_durable = self._snapshot_error(methods) is None
        no_tools = _RESERVED + (_DURABLE if is_durable else ())
        self.tool_names = [name for name in methods if name not in no_tools]
        self.notice = ""
        if is_durable and _can_be_tools([methods[name] for name in _DURABLE]):
            self.notice = (
                f"{KEY} = {spec!r}: snapshot and restore, which save the state of an object, are not offered to the"
                " policy. If they are tools, rename them"
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
            raise self._refused(f"cannot be described to the policy: {error}") from error
        self._parameters = inspect.signature(methods["reset"]).parameters

    def columns_for_reset(self, task: Task) -> dict[str, Any]:
        """Return the arguments of `reset`: those of the prompt and the task's columns that it takes. ValueError for a
        parameter without a column."""
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
        """Return the tools of an object by name."""
        return {name: getattr(made, name) for name in self.tool_names}

    def _kind(self, configured: str, probe: object, methods: Mapping[str, Callable[..., Any]]) -> str:
        """Return how lost objects are replaced: as configured, else as the class says, else by its methods."""
        found = getattr(probe, "resume", "auto")
        of_class = found if isinstance(found, str) else "auto"  # a tool may have that name
        if of_class not in ("auto", *KINDS):
            raise self._refused(f'has resume = "{of_class}": write one of {", ".join(KINDS)}, or leave it out')
        wanted = of_class if configured == "auto" else configured
        if wanted in ("stateless", "restart"):
            return wanted
        if (error := self._snapshot_error(methods)) is None:
            return "snapshot"
        tools = [method for name, method in methods.items() if name in _DURABLE]
        if wanted == "auto" and _can_be_tools(tools):  # the class was written for another program
            return "stateless"
        raise self._refused(error)

    @staticmethod
    def _snapshot_error(methods: Mapping[str, Callable[..., Any]]) -> str | None:
        """Return why its states cannot be saved; None if snapshot and restore do so and are no tools."""
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
        """Return the messages of a worked example. ValueError for an invalid one."""
        messages = list(found) if isinstance(found, list | tuple) else [found]
        for message in messages:
            texts = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None,)
            if not all(isinstance(text, str) for text in texts):
                raise self._refused(f"has {described(message)} in examples: write messages with role and content")
        return [dict(message) for message in messages]  # type: ignore[call-overload]

    def _refused(self, error: str) -> ValueError:
        return ValueError(f"{KEY} = {self.spec!r} {error}")


def _can_be_tools(methods: list[Callable[..., Any]]) -> bool:
    try:
        tool_schemas(methods)
    except ValueError:
        return False
    return True


def _public_methods(made: object) -> dict[str, Callable[..., Any]]:
    """Return the public methods by name, without running a property."""
    names = [name for name in dir(type(made)) if not name.startswith("_")]
    found = ((name, inspect.getattr_static(type(made), name)) for name in names)
    kinds = (classmethod, staticmethod)
    return {name: getattr(made, name) for name, value in found if inspect.isfunction(value) or isinstance(value, kinds)}
