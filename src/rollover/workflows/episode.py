"""What a workflow's function gets in its hands: its Episode and the trajectories of it, with calls and rewards.

Owns what an Episode does once, however often its function is run: a side effect, a random choice.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollover.functions import as_json, described
from rollover.tasks.image_parts import stored_of_program
from rollover.types import Reward, Rollout, Task
from rollover.workflows.calls import Call, CallRefused, Reply
from rollover.workflows.conversations import Chats, Conversations, with_stored_images
from rollover.workflows.function import as_reward
from rollover.workflows.protocol import Answer


class Once:
    """Of one Episode, for all runs of its function: a run that failed may have left a call under way (as asyncio.gather
    does), and the next one waits for that. `keep` is told of what is new."""

    def __init__(self, keep: Callable[[str, Any], None]) -> None:
        self._keep = keep
        self._kept: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def know(self, kept: Mapping[str, Any]) -> None:
        """What an earlier process kept, by name."""
        self._kept.update(kept)

    async def __call__(self, name: str, function: Callable[[], Awaitable[Any] | Any]) -> Any:
        """What `function` returned when it was called under this name, now or before. What it raises is raised, and
        nothing is kept then."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"{described(name)} is no name of what is done once: write a text")
        async with self._lock(name):
            what = f"what once({name!r}, ...) keeps"
            if name not in self._kept:
                value = function()
                value = as_json(await value if inspect.isawaitable(value) else value, what)
                self._keep(name, value)
                self._kept[name] = value
            return as_json(self._kept[name], what)  # a copy: nobody changes what is kept

    # Private

    def _lock(self, name: str) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # nothing goes on of what an earlier loop ran
            self._loop = loop
            self._locks.clear()
        return self._locks[name]


Ask = Callable[["EpisodeTrajectory", Call], Awaitable[Reply]]
_PAUSE_S = 0.02  # before a call is refused


class EpisodeTrajectory:
    """One role's part in an Episode: `await chat(messages)` asks the policy, `reward = 1.0` scores all that it said.

    `advantage`, for roles whose advantages come with them (algorithm.advantage = "precomputed"): a number, or a list
    with one for each turn, which is a number or a list with one for each of `Reply.token_ids`. It is checked when the
    step is built: what does not fit ends the run, which names role and turn.
    `api_key` names it where the policy is asked over HTTP. `index` is its place in the Episode, given at its first
    call.
    """

    def __init__(self, role: str, api_key: str, ask: Ask, chats: Chats) -> None:
        self.role, self.api_key, self.conversations = role, api_key, Conversations(chats)
        self.index: int | None = None
        self._ask, self._reward, self._advantage = ask, None, None
        self.placing = asyncio.Lock()  # one call after the other finds its Rollout

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The policy's answer to these messages: `.text`, `.tool_calls`, and `.message` to go on with. The content of a
        message is a text, or a list of parts ({"type": "image", "image": a path, bytes, a PIL image or a data URL}).

        Messages that begin with those of an earlier call and its answer continue it, token by token. CallRefused where
        the call cannot be answered: BudgetUsedUp of them where no token or turn is left.
        """
        try:
            call = _checked(messages, tools, max_tokens, stop)
            return await self._ask(self, await with_stored_images(call, stored_of_program))
        except CallRefused:
            await asyncio.sleep(_PAUSE_S)  # who asks on and on leaves the event loop to the others
            raise

    @property
    def reward(self) -> Reward | None:
        """What was set; None before that."""
        return self._reward

    @reward.setter
    def reward(self, value: float | Reward) -> None:
        reward = as_reward(value)
        if reward is None:
            raise ValueError(f"the reward of a trajectory is a finite number or a Reward, not {described(value)}")
        self._reward = reward

    @property
    def advantage(self) -> Any:
        """What was set, lists as tuples; None before that."""
        return self._advantage

    @advantage.setter
    def advantage(self, value: Any) -> None:
        plain = Reward(0.0, advantages=value).advantages
        if not _are_numbers(plain):
            raise ValueError(
                "the advantage of a trajectory is a number, or a list with one for each turn (a number, or a list with"
                f" one for each of its tokens), not {described(value)}"
            )
        self._advantage = plain

    def brought(self, otherwise: Reward) -> Reward:
        """Its reward, with its advantage. `otherwise`: the reward where it has none of its own."""
        reward = otherwise if self._reward is None else self._reward
        if self._advantage is None:
            return reward
        error = f"{reward.error} (only an advantage: set the reward, too)" if reward.missing else None
        return replace(reward, error=error, advantages=self._advantage)

    def take_back(self) -> None:
        """Its Episode failed: what was set is worth nothing."""
        self._reward = self._advantage = None


class Episode:
    """One run of the workflow on `task`. `base_url` is the gateway's, "" where none is served. `policy_version`: the
    newest that sampled a token of its turns."""

    def __init__(
        self, episode_id: str, task: Task, base_url: str, new: Callable[[str], EpisodeTrajectory], once: Once
    ) -> None:
        self.episode_id, self.task, self.base_url, self._new, self._once = episode_id, task, base_url, new, once
        self.policy_version = 0

    def sampled(self, *rollouts: Rollout) -> None:
        """Note the policy versions of the rollouts' tokens."""
        self.policy_version = max([self.policy_version, *(v for rollout in rollouts for v in rollout.versions)])

    async def once(self, name: str, function: Callable[[], Awaitable[Any] | Any]) -> Any:
        """What `function()` returned, which is called once in the Episode, though that may be run again after a kill or
        an error: for side effects, and for choices at random. Awaited if it is an `async def`.

        What it returns is kept under `name`, a JSON value of at most 64 KiB (ValueError); what it raises is not.
        A kill while it is under way has it called again.
        """
        return await self._once(name, function)

    def trajectory(self, role: str = "policy") -> EpisodeTrajectory:
        """A new trajectory of the role: what it is compared with are those of the same role in the other episodes."""
        if not isinstance(role, str) or not role or not role.isprintable() or "/" in role:
            raise ValueError(f"{described(role)} is no role: a role is a name without a slash")
        return self._new(role)


def give(answer: Answer, trajectories: Sequence[EpisodeTrajectory]) -> Reward | None:
    """What a workflow answered goes to the trajectories of the roles that it names, but for those with their own
    reward. Returns the reward of all others. ValueError for a role that made no call."""
    if not isinstance(answer, Mapping):
        return answer
    roles = dict.fromkeys(trajectory.role for trajectory in trajectories if trajectory.index is not None)
    for role, reward in answer.items():
        if role not in roles:
            raise ValueError(f"a reward for the role {role!r}, which made no call: {', '.join(roles) or 'none'} did")
        for trajectory in trajectories:
            if trajectory.role == role and trajectory.reward is None:
                trajectory.reward = reward
    return None


# Private


def _checked(messages: Any, tools: Any, max_tokens: Any, stop: Any) -> Call:
    """The call. CallRefused where an argument is none that the policy can be asked with."""
    if isinstance(messages, str | bytes | Mapping) or not _are_objects(messages):
        raise CallRefused(f"messages must be a list of messages, not {described(messages)}", "messages")
    if isinstance(tools, str | bytes | Mapping) or not _are_objects(tools):
        raise CallRefused(f"tools must be a list of definitions, not {described(tools)}", "tools")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise CallRefused(f"max_tokens must be a whole number of at least 1, not {described(max_tokens)}", "max_tokens")
    stops: Any = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (None,)
    if not all(isinstance(text, str) and text for text in stops):
        raise CallRefused(f"stop must be a list of texts that are not empty, not {described(stop)}", "stop")
    return Call(tuple(messages), tools=tuple(tools), max_tokens=max_tokens, stop=stops)


def _are_numbers(plain: Any) -> bool:
    """Whether it can stand where numbers do, in a checkpoint, too: which fit is told where they are used."""
    return all(map(_are_numbers, plain)) if isinstance(plain, tuple) else isinstance(plain, int | float | None)


def _are_objects(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values)
