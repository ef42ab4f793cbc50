"""One run of a workflow's function: its calls become turns of Rollouts, its end becomes their rewards.

    playing ──returned, timed out, no budget left, failed too often──▶ over: every Rollout ends, with a reward or none
       └─────failed, and may try again──▶ over: its Rollouts leave once none of them plays, and another run begins

A run may begin with what an earlier one left, as a kill ended it: calls that it makes again are answered from that
record (turns.py). Owns the run, its clock, and which of its Rollouts play a turn or wait for the next one. Never
changes a Rollout.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollover.envs.protocol import written
from rollover.functions import explained, outcome_of
from rollover.trajectories import divided
from rollover.types import Prompt, Reward, Rollout, Segment, StopReason, Task, episode_name
from rollover.workflows.agent_clock import AgentClock
from rollover.workflows.calls import MODEL, BudgetUsedUp, Call, Reply, UnknownKey
from rollover.workflows.conversations import Chats
from rollover.workflows.episode import Episode, EpisodeTrajectory, give
from rollover.workflows.lanes import Lane
from rollover.workflows.large_calls import LargeCalls
from rollover.workflows.once import Once
from rollover.workflows.protocol import Workflow
from rollover.workflows.token_budget import TokenBudget
from rollover.workflows.turns import Continued, EpisodePlace, Limits, Opened, Played, Turns


class Host(Protocol):
    """Plays the Rollouts that episodes open. What it is told it carries out later, never within the call."""

    def open(self, rollout: Rollout) -> None:
        """A WAITING Rollout of a held group, with a prompt. Where the Episode has one with this id already, which the
        group was admitted with, that gets the prompt and the role."""
        ...

    def restart(self, group_id: int, sibling: int) -> None:
        """The Episode failed: its Rollouts leave, none of which plays, and it begins again."""
        ...

    def ended(self, group_id: int, sibling: int) -> None:
        """The Episode has ended, and has its rewards."""
        ...


class Calls(Protocol):
    """See EpisodeCalls (episodes.py)."""

    def add(self, run: AgentRun, trajectory: EpisodeTrajectory, /) -> None: ...

    def close(self, run: AgentRun, /) -> set[str]: ...


class Surroundings(Protocol):
    """What a run is told of, and tells."""

    function: Workflow
    chats: Chats
    large_calls: LargeCalls
    limits: Limits
    lane: Lane
    base_url: str
    counts: Counter[str]

    @property
    def host(self) -> Host | None: ...

    @property
    def calls(self) -> Calls: ...

    def arguments(self, api_key: str) -> Mapping[str, Any]:
        """Those of the function that depend on nothing but the key."""
        ...

    def may_retry(self, place: EpisodePlace, why: str) -> bool:
        """The function failed. Whether it may be run again."""
        ...


@dataclass(eq=False)
class _Playing:
    """A turn under way. `begun`: its tokens that are on record."""

    trajectory: EpisodeTrajectory
    begun: int
    reply: asyncio.Future[Reply]


@dataclass(eq=False)
class _Waiting:
    """A Rollout between two turns, or one that is on record. `rollout`: a copy with all its tokens; `answer`: what
    follows them."""

    rollout: Rollout
    answer: asyncio.Future[Segment | None]


class AgentRun:
    """`task_prompt`: the task's own prompt. `once`: the Episode's, over all its runs; `recorded`: copies of the
    Rollouts of an earlier one. `over`: the function has ended, or nobody waits for it. `lost`: it was cancelled from
    outside, as when an event loop ends. `unasked`: after the end, the Rollouts on record with turns that were not asked
    for again, and how many of their tokens were; while there are any, the others wait for `close`."""

    def __init__(
        self,
        around: Surroundings,
        place: EpisodePlace,
        task: Task,
        task_prompt: Prompt,
        once: Once,
        recorded: Sequence[Rollout] = (),
    ) -> None:
        assert around.host is not None
        self.around, self.place, self.task = around, place, task
        self._host = around.host
        self.turns = Turns(place, task, task_prompt, around.limits, around.counts, recorded)
        self.trajectories: list[EpisodeTrajectory] = []
        self.unasked: dict[str, int] = {}
        self._playing: dict[str, _Playing] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._on_record: dict[str, asyncio.Future[Segment | None]] = {}  # nobody waits for these answers yet
        for rollout in recorded:
            if rollout.num_tokens:
                waiting = _Waiting(rollout, asyncio.get_running_loop().create_future())
                self._waiting[rollout.rollout_id], self._on_record[rollout.rollout_id] = waiting, waiting.answer
        self._of_model: dict[tuple[str, str], EpisodeTrajectory] = {}
        self._given_up: set[str] = set()  # ids of Rollouts with a turn that the agent did not wait for
        sampled = sum(rollout.num_sampled_tokens for rollout in recorded)
        self._tokens = TokenBudget(around.limits.max_tokens, sampled)
        self._refused = False  # for want of tokens or turns: what the agent makes of that is the policy's doing
        self.over = self.lost = self._restarts = self._cut_off = False
        self._otherwise = Reward(None, error="the workflow gave it no reward")  # where a trajectory has none of its own
        self.episode = Episode(episode_name(*place), task, around.base_url, self._new_trajectory, once)
        self.episode.sampled(*recorded)
        self._default = self._new_trajectory(MODEL)
        self._clock = AgentClock(around.limits.timeout_s, self._on_timeout)
        self._run = asyncio.ensure_future(self._play())

    # The agent's side

    async def ask(self, trajectory: EpisodeTrajectory, call: Call) -> Reply:
        """One turn of the policy. CallRefused where there is none to be had."""
        if asyncio.get_running_loop() is not self._run.get_loop():
            raise RuntimeError(
                "chat is awaited on the event loop of the workflow, which runs in no other thread. What"
                " runs in a thread asks over HTTP (parameters base_url and api_key)"
            )
        try:
            with self._clock.waiting():
                async with trajectory.placing:
                    turn, begun = await self._turn(trajectory, call)
                if isinstance(turn, Played):
                    await asyncio.sleep(0)  # others are answered, too
                    return turn.reply
                playing = _Playing(trajectory, begun, asyncio.get_running_loop().create_future())
                self._playing[turn.rollout_id] = playing
                if isinstance(turn, Opened):
                    self._host.open(turn.rollout)
                else:
                    waiting = self._waiting.pop(turn.rollout_id)
                    waiting.answer.set_result(written(waiting.rollout, turn.tokens))
                return await playing.reply
        except BudgetUsedUp:
            self._refused = True
            raise

    def of_model(self, trajectory: EpisodeTrajectory, role: str) -> EpisodeTrajectory:
        """The trajectory of another role, for an agent that can say the role by the model's name alone."""
        if role == trajectory.role:
            return trajectory
        key = trajectory.api_key, role
        if key not in self._of_model:
            self._of_model[key] = self._new_trajectory(role)
        return self._of_model[key]

    # The host's side

    async def next(self, rollout: Rollout) -> Segment | None:
        """The turn of the Rollout has ended, and `rollout` has its tokens; or it is on record, and waits for its agent.
        What the agent's next call appends; None at the end of the Episode."""
        if (answer := self._on_record.pop(rollout.rollout_id, None)) is not None:
            return await answer
        playing = self._playing.pop(rollout.rollout_id)
        self.episode.sampled(rollout)
        reply = playing.trajectory.conversations.on_turn(rollout)
        self._tokens.end(rollout.rollout_id, len(reply.token_ids) - playing.begun)
        if self.over or playing.reply.done():
            self._given_up.add(rollout.rollout_id)
        if not playing.reply.done():
            playing.reply.set_result(reply)
        if self.over and not self._restarts:
            return self._abandoned(rollout)
        waiting = _Waiting(rollout, asyncio.get_running_loop().create_future())
        self._waiting[rollout.rollout_id] = waiting
        self._restart_if_idle()
        return await waiting.answer

    def reward_of(self, rollout: Rollout) -> Reward:
        """After the end."""
        if rollout.rollout_id in self._given_up:
            return Reward(None, error="the agent gave up a call of it")
        if all(trajectory.index is None for trajectory in self.trajectories):
            none = Reward(None, error="the workflow made no model call")
            return self._otherwise if self._cut_off and self._otherwise.missing else none
        of = next((t for t in self.trajectories if t.index == rollout.trajectory), None)
        if of is None:
            return self._otherwise
        nums, where = of.conversations.num_turns, f"trajectory {of.index} (role {of.role!r}) of {self.episode_id}"
        given = of.brought(self._otherwise)
        if self._cut_off and given.advantages is None and self.around.limits.precomputed(of.role):
            return Reward(None, error="its episode was cut off before it had an advantage")
        try:
            rewards = divided(given, list(nums.values()), where)
        except ValueError as error:
            return Reward(None, error=str(error))
        return rewards[list(nums).index(rollout.rollout_id)]

    def close(self) -> None:
        """After the end: no Rollout waits any more, and those that are left in `unasked` have gone."""
        for rollout_id, waiting in self._waiting.items():
            if rollout_id not in self.unasked:
                waiting.answer.set_result(self._abandoned(waiting.rollout))
        self._waiting.clear()
        self.unasked = {}

    def cancel(self) -> None:
        """Nobody waits for its end."""
        self.over = True
        self._stop()
        for playing in self._playing.values():
            playing.reply.cancel()

    # Private

    def _new_trajectory(self, role: str) -> EpisodeTrajectory:
        key = f"rollover-{self.episode_id}-{secrets.token_urlsafe(16)}"
        trajectory = EpisodeTrajectory(role, key, self.ask, self.around.chats)
        self.trajectories.append(trajectory)
        self.around.calls.add(self, trajectory)
        return trajectory

    @property
    def episode_id(self) -> str:
        return episode_name(*self.place)

    async def _turn(self, trajectory: EpisodeTrajectory, call: Call) -> tuple[Opened | Continued | Played, int]:
        """The turn that answers the call, which begins now, and how many of its tokens are sampled already."""
        self.turns.refuse_after_the_last()
        place = await self.around.large_calls.place_of(call, trajectory.conversations)
        most = self.around.limits.max_new_tokens
        wanted = most if call.max_tokens is None else min(most, call.max_tokens)
        self._refuse_after_the_end()
        found = self.turns.find(trajectory, call, place)
        if found.has_ended:
            return self.turns.begin(trajectory, call, found, wanted), 0
        if found.begun is not None:
            room = min(wanted, found.begun + self._tokens.free) if self._tokens.most else wanted
        else:
            room = await self._tokens.room(wanted)
            self._refuse_after_the_end()
            if self._tokens.most:  # others have gone on meanwhile
                found = self.turns.find(trajectory, call, place)
        turn, begun = self.turns.begin(trajectory, call, found, room), found.begun or 0
        if not isinstance(turn, Played):
            self._tokens.begin(turn.rollout_id, room - begun)
        return turn, begun

    def _refuse_after_the_end(self) -> None:
        if self.over:
            raise UnknownKey(f"episode {self.episode.episode_id} has ended: it can make no calls")

    async def _play(self) -> None:
        around, key = self.around, self._default.api_key
        values: dict[str, Any] = {"task": self.task, "episode": self.episode, "model": MODEL}
        values |= {"base_url": around.base_url, "api_key": key, **around.arguments(key)}
        try:
            name = f"episode {self.episode_id}"
            answer, failure = await outcome_of(around.function, values, self._clock.waiting, around.lane, name=name)
            if failure is not None:
                raise failure
            reward = give(answer, self.trajectories)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's function
            task = asyncio.current_task()
            if self.over:
                return
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                self.over = self.lost = True
                self._stop()
                raise
            self._on_error(error)
        else:
            if not self.over:
                self._end("done", reward)

    def _on_error(self, error: BaseException) -> None:
        why = explained(error)
        if self._refused:
            # Where there is no budget left the policy talked too long: that is no fault, and scores nothing.
            self._end("length", Reward(0.0))
        elif self.around.may_retry(self.place, why):
            self.over = self._restarts = True
            self._stop()
            self._restart_if_idle()
        else:
            self._end("error", Reward(None, error=f"the workflow failed: {why}"))

    def _on_timeout(self) -> None:
        limits = self.around.limits
        missing = Reward(None, error=f"timed out: its agent took more than {limits.timeout_s:g} s (workflow.timeout_s)")
        self._end("timeout", Reward(limits.timeout_score) if limits.on_timeout == "score" else missing)

    def _end(self, how: str, otherwise: Reward | None) -> None:
        """For good. `otherwise`: the reward of every trajectory that has none of its own."""
        self.over, self._cut_off = True, how != "done"
        self._otherwise = otherwise or self._otherwise
        if otherwise is not None and otherwise.missing:
            for trajectory in self.trajectories:
                trajectory.take_back()
        self.around.counts[f"episodes/{how}"] += 1
        self._stop()
        self.unasked = self.turns.record.unasked()
        if self.unasked:
            asked = ((of.rollout, self.unasked.get(of_id)) for of_id, of in self._waiting.items())
            self.around.counts["episodes/diverged"] += any(n is not None and r.num_tokens > n for r, n in asked)
        else:
            self.close()
        self._host.ended(*self.place)

    def _abandoned(self, rollout: Rollout) -> Segment | None:
        """What ends a Rollout with a call that was given up; None for others, which end as their last turn did."""
        given_up = rollout.rollout_id in self._given_up
        return replace(written(rollout, ()), stop_reason=StopReason.ABANDONED) if given_up else None

    def _stop(self) -> None:
        self._clock.end()
        self._given_up |= self.around.calls.close(self)
        if self._run is not asyncio.current_task():
            self._run.cancel()

    def _restart_if_idle(self) -> None:
        if self._restarts and not self._playing:
            self.around.counts["episodes/restarted"] += 1
            self._host.restart(*self.place)
