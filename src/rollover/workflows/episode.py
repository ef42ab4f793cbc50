"""The objects that a workflow works with: its Episode and the Episode's trajectories, for calls and rewards.

Also owns the values of `Episode.once`, which survive a new run of the workflow.
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
from rollover.workflows.conversations import Call, CallRefused, Chats, Conversations, Reply, with_stored_images
from rollover.workflows.protocol import Answer, as_reward


class Once:
    """Values computed once per Episode, shared by all runs of its workflow. A failed run may leave a computation in
    flight (as asyncio.gather does); the next run waits for it. `keep` stores new values."""

    def __init__(self, keep: Callable[[str, Any], None]) -> None:
        self._keep = keep
        self._kept: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore the values that an earlier process stored, by name."""
        self._kept.update(kept)

    async def __call__(self, name: str, function: Callable[[], Awaitable[Any] | Any]) -> Any:
        """Return the value stored under `name`; call `function` for it the first time. Nothing is stored if that
        raises."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"once: the name must be a text, not {described(name)}")
        async with self._lock(name):
            what = f"what once({name!r}, ...) keeps"
            if name not in self._kept:
                value = function()
                value = as_json(await value if inspect.isawaitable(value) else value, what)
                self._keep(name, value)
                self._kept[name] = value
            return as_json(self._kept[name], what)  # a copy

    # Private

    def _lock(self, name: str) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # tasks of an earlier loop have ended
            self._loop = loop
            self._locks.clear()
        return self._locks[name]


SampleTurn = Callable[["EpisodeTrajectory", Call], Awaitable[Reply]]
_PAUSE_S = 0.02  # before a call is refused


class EpisodeTrajectory:
    """One role's part in an Episode: `await chat(messages)` samples the policy, `reward = 1.0` scores all its turns.

    `advantage`, with algorithm.advantage = "precomputed": a number, or a list with one entry for each turn (a number,
    or a list with one for each of `Reply.token_ids`). It is checked when the step is built; an error there names role
    and turn, and ends the run. `api_key` identifies the trajectory in calls over HTTP. `index`: its number in the
    Episode, assigned at its first call.
    """

    def __init__(self, role: str, api_key: str, sample: SampleTurn, chats: Chats) -> None:
        self.role, self.api_key, self.conversations = role, api_key, Conversations(chats)
        self.index: int | None = None
        self._sample, self._reward, self._advantage = sample, None, None
        self.placing = asyncio.Lock()  # held while a call finds its Rollout

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample the policy's answer: `.text`, `.tool_calls`, and `.message` for the next call. The content of a
        message is a text, or a list of parts ({"type": "image", "image": a path, bytes, a PIL image or a data URL}).

        Messages that begin with those of an earlier call and its answer continue it, token by token. CallRefused for
        an invalid call; its subclass BudgetUsedUp if no token or turn is left.
        """
        try:
            call = _checked(messages, tools, max_tokens, stop)
            return await self._sample(self, await with_stored_images(call, stored_of_program))
        except CallRefused:
            await asyncio.sleep(_PAUSE_S)  # an agent that retries in a loop must not block the event loop
            raise

    @property
    def reward(self) -> Reward | None:
        """The reward that was set, or None."""
        return self._reward

    @reward.setter
    def reward(self, value: float | Reward) -> None:
        reward = as_reward(value)
        if reward is None:
            raise ValueError(f"the reward of a trajectory is a finite number or a Reward, not {described(value)}")
        self._reward = reward

    @property
    def advantage(self) -> Any:
        """The advantage that was set, lists as tuples, or None."""
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

    def final_reward(self, default: Reward) -> Reward:
        """Return the reward, `default` unless one was set, with the advantage."""
        reward = default if self._reward is None else self._reward
        if self._advantage is None:
            return reward
        error = f"{reward.error} (only an advantage: set the reward, too)" if reward.missing else None
        return replace(reward, error=error, advantages=self._advantage)

    def clear_reward(self) -> None:
        """Discard what was set, after the Episode failed."""
        self._reward = self._advantage = None


class Episode:
    """One run of the workflow on `task`. `base_url`: the gateway's; "" without one. `policy_version`: the newest that
    sampled a token of its turns."""

    def __init__(
        self, episode_id: str, task: Task, base_url: str, new: Callable[[str], EpisodeTrajectory], once: Once
    ) -> None:
        self.episode_id, self.task, self.base_url, self._new, self._once = episode_id, task, base_url, new, once
        self.policy_version = 0

    def note_versions(self, *rollouts: Rollout) -> None:
        """Note the policy versions of the rollouts' tokens."""
        self.policy_version = max([self.policy_version, *(v for rollout in rollouts for v in rollout.versions)])

    async def once(self, name: str, function: Callable[[], Awaitable[Any] | Any]) -> Any:
        """Return the result of `function()`, called once per Episode even if the workflow runs again after a kill or an
        error: for side effects and random choices. An `async def` is awaited.

        The result is stored under `name`: a JSON value of at most 64 KiB, else ValueError. If it raises, or a kill
        interrupts it, nothing is stored and it is called again.
        """
        return await self._once(name, function)

    def trajectory(self, role: str = "policy") -> EpisodeTrajectory:
        """Open a trajectory. Its baseline is taken over the trajectories of this role in the group's episodes."""
        if not isinstance(role, str) or not role or not role.isprintable() or "/" in role:
            raise ValueError(f"{described(role)} is no role: a role is a name without a slash")
        return self._new(role)


def assign_rewards(answer: Answer, trajectories: Sequence[EpisodeTrajectory]) -> Reward | None:
    """Set the rewards of a workflow's answer by role, except on trajectories with their own reward. Return the reward
    of all other trajectories. ValueError for a role that made no call."""
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
    """Return the call. CallRefused for an invalid argument."""
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
    """Whether it consists of numbers, which a checkpoint can store. Their count is checked where they are used."""
    return all(map(_are_numbers, plain)) if isinstance(plain, tuple) else isinstance(plain, int | float | None)


def _are_objects(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values)
