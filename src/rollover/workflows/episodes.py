"""Episodes: each sibling of a group is a run of the user's workflow, and its model calls are turns of Rollouts.

    begin ──▶ workflow ──call──▶ a request to open a Rollout, or the result of `next`: tokens that continue one
                  ▲                        │
                  └──reply── next(rollout) ◀── the turn has ended; the Rollout waits for the next call, or the end
              returns ──▶ None from every `next` ──▶ score

`Episodes` is the environment of a run with a workflow: the agent's next call follows the policy's turn. An `AgentRun`
is one run of the workflow for an Episode:

    running ──returned, timed out, no budget left, failed too often──▶ over: every Rollout ends, with or without reward
       └─────failed, retries left──▶ over: its Rollouts are dropped once no turn is in flight, and another run begins

After a restart, a run may begin with the Rollouts that an earlier one left: calls that it repeats are answered from
that record (turns.py). This file owns the runs, their clocks and token budgets, which Rollouts play a turn or wait for
the next call, and the requests until the player takes them (rollout/player.py). It never changes a Rollout.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.envs.protocol import Keep, RunEnvironment, TurnOptions, keeps_nothing, written
from rollover.functions import Causes, explained, outcome_of
from rollover.images import Places, stored
from rollover.trajectories import divided
from rollover.types import Prompt, Reward, Rollout, Segment, StopReason, Task, episode_name
from rollover.workflows.conversations import (
    MODEL,
    Break,
    BudgetUsedUp,
    Call,
    Chats,
    LargeCalls,
    Reply,
    UnknownKey,
    with_stored_images,
)
from rollover.workflows.episode import Episode, EpisodeTrajectory, Once, assign_rewards
from rollover.workflows.protocol import Lane, Workflow
from rollover.workflows.turns import Continued, EpisodeLimits, EpisodePlace, Opened, Replayed, Turns

if TYPE_CHECKING:
    from rollover.workflows.gateway import Gateway

logger = logging.getLogger(__name__)

COUNTERS = (
    *(f"episodes/{how}" for how in ("done", "length", "timeout", "error", "restarted", "replayed", "diverged")),
    "turns/continued",
    *(f"turns/breaks/{reason.value}" for reason in Break),
)


class Episodes(RunEnvironment):
    """The episodes of one run. `gateway`: for agents that call over HTTP. `keep` stores what survives a restart.
    `resumes`: whether an Episode that lost its agent replays its recorded turns; else it begins again."""

    def __init__(
        self,
        workflow: Workflow,
        chats: Chats,
        limits: EpisodeLimits,
        gateway: Gateway | None = None,
        *,
        resumes: bool = True,
        lane: Lane = Lane.TRAINING,
        keep: Keep = keeps_nothing,
    ) -> None:
        self.agents = self
        self.workflow, self.chats, self.limits, self.gateway = workflow, chats, limits, gateway
        self.resumes, self.lane = resumes, lane
        self.large_calls = LargeCalls(chats, limits.max_prompt_tokens + limits.max_new_tokens)
        self.notice = "" if (fit := chats.for_tools(()).fit("user")).exact else f"{fit.why}: every call opens a rollout"
        self.counts: Counter[str] = Counter()
        self._keep = keep
        self._agent_runs: dict[EpisodePlace, AgentRun] = {}
        self._failures: Counter[EpisodePlace] = Counter()
        self._once: dict[EpisodePlace, Once] = {}
        self._requests: list[tuple[EpisodePlace, Rollout | None]] = []
        self._ended: list[EpisodePlace] = []
        self._wakeup: asyncio.Future[None] | None = None
        self._reported = Causes()

    def for_evaluation(self) -> Episodes:
        """Return the episodes of an evaluation: the same workflow and gateway, separate counts."""
        return Episodes(self.workflow, self.chats, self.limits, self.gateway, lane=Lane.EVALUATION)

    async def start(self) -> None:
        """Serve the gateway. ValueError if its port is taken."""
        if self.gateway is not None:
            await self.gateway.start()

    async def close(self) -> None:
        try:
            await self.workflow.close()
        finally:
            if self.gateway is not None:
                await self.gateway.close()

    # Environment, for the player

    def prompt(self, task: Task, instead: Sequence[Mapping[str, str]] | str | None = None) -> Prompt:
        """Encode the task's own prompt. The workflow decides which of its calls use it."""
        content = task.messages or task.prompt if instead is None else instead
        if content is None or isinstance(content, str):
            return Prompt.of(self.chats.tokenizer(content)["input_ids"])
        return self.chats.for_tools(()).prompt(content)

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Cancel the episodes of groups that left."""
        self.end({rollout.group_id for rollout in rollouts})

    def stats(self) -> dict[str, float]:
        """Return cumulative counters."""
        ended = sum(self.counts[f"episodes/{how}"] for how in ("done", "length", "timeout", "error"))
        return {name: float(self.counts[name]) for name in COUNTERS} | {"episodes/ended": float(ended)}

    def begin(self, rollout: Rollout, kept: Mapping[str, Any] | None = None, recorded: Sequence[Rollout] = ()) -> None:
        """Start, or restart, the Episode of a sibling.

        `rollout`: the one that the group was admitted with. `kept`: values that an earlier process stored by `keep`.
        `recorded`: copies of all Rollouts of an Episode that lost its agent; none of them runs, and calls that the
        agent repeats are answered from them.
        """
        place = rollout.group_id, rollout.sibling
        if place in self._agent_runs:
            self._agent_runs.pop(place).cancel()
        once = self._once.setdefault(place, Once(partial(self._keep_value, place)))
        once.restore(kept or {})
        if recorded:
            self.counts["episodes/replayed"] += 1
        self._agent_runs[place] = AgentRun(self, rollout, once, recorded)

    def unreplayed(self, place: EpisodePlace) -> Mapping[str, int]:
        """Return the recorded Rollouts of an ended Episode that were not replayed to their end: see AgentRun."""
        return self._agent_runs[place].unreplayed if place in self._agent_runs else {}

    def on_truncated(self, place: EpisodePlace) -> None:
        """End the remaining Rollouts, after the player removed the turns that were not replayed."""
        if place in self._agent_runs:
            self._agent_runs[place].close()

    @property
    def pending(self) -> list[asyncio.Future]:
        """Return the future that ends when `take_requests` has something; none if no agent runs any more."""
        has_requests = bool(self._requests or self._ended)
        if not has_requests and all(run.over for run in self._agent_runs.values()):
            return []
        if self._wakeup is None or self._wakeup.done():
            self._wakeup = asyncio.get_running_loop().create_future()
            if has_requests:
                self._wakeup.set_result(None)
        return [self._wakeup]

    def take_requests(self) -> tuple[list[tuple[EpisodePlace, Rollout | None]], list[EpisodePlace]]:
        """Take the Rollouts to open (None: restart the Episode), and the Episodes that have ended, in order of place.

        A Rollout with the id of the one that the group was admitted with stands for that, with another prompt or role.
        """
        requests, self._requests = sorted(self._requests, key=lambda item: item[0]), []
        ended, self._ended = sorted(self._ended), []
        return requests, ended

    def has(self, place: EpisodePlace) -> bool:
        """Return whether the Episode is running or has ended in this process."""
        return place in self._agent_runs and not self._agent_runs[place].lost

    def end_all(self) -> None:
        """Cancel the episodes of all groups, and discard the requests."""
        self._requests.clear()
        self._ended.clear()
        self.end({place[0] for place in self._agent_runs})

    def end(self, group_ids: Iterable[int]) -> None:
        """Cancel the episodes of these groups."""
        groups = set(group_ids)
        for place in [place for place in self._agent_runs if place[0] in groups]:
            self._agent_runs.pop(place).cancel()
            del self._failures[place]
            self._once.pop(place, None)

    async def next(self, rollout: Rollout) -> Segment | None:
        """Hand the turn to its agent. Return the tokens of the agent's next call; None at the end of the Episode."""
        return await self._agent_runs[rollout.group_id, rollout.sibling].next(rollout)

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        """Return for each Rollout the reward of its trajectory."""
        return [self._agent_runs[rollout.group_id, rollout.sibling].reward_of(rollout) for rollout in rollouts]

    def scores_singly(self, task: Task, /) -> bool:
        return True

    def options(self, rollout: Rollout) -> TurnOptions:
        """Return the options of the call that the Rollout's present turn answers."""
        return self._agent_runs[rollout.group_id, rollout.sibling].turns.options[rollout.rollout_id]

    # For the agents

    def request(self, place: EpisodePlace, rollout: Rollout | None) -> None:
        """Request to open a Rollout of the Episode; None: to begin it again. None of its Rollouts plays then."""
        self._requests.append((place, rollout))
        self._wake()

    def on_end(self, place: EpisodePlace) -> None:
        """Request to score the Rollouts of an Episode that has ended."""
        self._ended.append(place)
        self._wake()

    def may_retry(self, place: EpisodePlace, why: str) -> bool:
        """Count a failure of the workflow, and return whether the Episode may begin again."""
        self._failures[place] += 1
        again = self._failures[place] <= self.limits.retries
        if self._reported.is_new(why):
            what = "it is run again" if again else "its rewards are missing"
            logger.warning(
                f"{self.workflow.spec} failed at episode {episode_name(*place)} ({why}): {what}; later ones are"
                " counted (episodes/restarted, episodes/error)"
            )
        return again

    # Private

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _keep_value(self, place: EpisodePlace, name: str, value: Any) -> None:
        if place in self._agent_runs:
            self._keep(*place, name, value)


@dataclass(eq=False)
class _Playing:
    """A turn in flight. `begun`: how many of its tokens were recorded before."""

    trajectory: EpisodeTrajectory
    begun: int
    reply: asyncio.Future[Reply]


@dataclass(eq=False)
class _Waiting:
    """A Rollout between two turns, or a recorded one. `rollout`: a copy with all its tokens; `answer`: the tokens that
    continue it."""

    rollout: Rollout
    answer: asyncio.Future[Segment | None]


class AgentRun:
    """One run of the workflow for an Episode.

    `first`: the Rollout that the group was admitted with. `once`: shared by all runs of the Episode. `recorded`: copies
    of the Rollouts of an earlier run. `over`: the workflow has ended or was cancelled. `lost`: it was cancelled from
    outside, as when an event loop ends. `unreplayed`: after the end, the recorded Rollouts with turns that were not
    replayed, and how many of their tokens were; while there are any, the other Rollouts wait for `close`.
    """

    def __init__(self, episodes: Episodes, first: Rollout, once: Once, recorded: Sequence[Rollout] = ()) -> None:
        self.episodes, self.place, self.task = episodes, (first.group_id, first.sibling), first.task
        self.turns = Turns(first, episodes.limits, episodes.counts, recorded)
        self.trajectories: list[EpisodeTrajectory] = []
        self.unreplayed: dict[str, int] = {}
        self._playing: dict[str, _Playing] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._recorded: dict[str, asyncio.Future[Segment | None]] = {}  # answers that the player has not requested yet
        for rollout in recorded:
            if rollout.num_tokens:
                waiting = _Waiting(rollout, asyncio.get_running_loop().create_future())
                self._waiting[rollout.rollout_id], self._recorded[rollout.rollout_id] = waiting, waiting.answer
        self._by_role: dict[tuple[str, str], EpisodeTrajectory] = {}
        self._abandoned_ids: set[str] = set()  # Rollouts with a turn that the agent did not wait for
        sampled = sum(rollout.num_sampled_tokens for rollout in recorded)
        self._tokens = TokenBudget(episodes.limits.max_tokens, sampled)
        self._budget_exhausted = False  # of tokens or turns: an error of the agent that follows is the policy's fault
        self.over = self.lost = self._restarts = self._cut_off = False
        self._default_reward = Reward(None, error="the workflow gave it no reward")
        self._base_url = "" if episodes.gateway is None else episodes.gateway.base_url
        self.episode = Episode(episode_name(*self.place), self.task, self._base_url, self._new_trajectory, once)
        self.episode.note_versions(*recorded)
        self._default = self._new_trajectory(MODEL)
        self._clock = AgentClock(episodes.limits.timeout_s, self._on_timeout)
        self._task = asyncio.ensure_future(self._play())

    # For the agent

    async def call(self, trajectory: EpisodeTrajectory, call: Call) -> Reply:
        """Run one turn of the policy. CallRefused if the call is invalid or no budget is left."""
        if asyncio.get_running_loop() is not self._task.get_loop():
            raise RuntimeError(
                "chat is awaited on the event loop of the workflow, which runs in no other thread. What"
                " runs in a thread asks over HTTP (parameters base_url and api_key)"
            )
        try:
            with self._clock.waiting():
                async with trajectory.placing:
                    turn, begun = await self._turn(trajectory, call)
                if isinstance(turn, Replayed):
                    await asyncio.sleep(0)  # let other agents proceed
                    return turn.reply
                playing = _Playing(trajectory, begun, asyncio.get_running_loop().create_future())
                self._playing[turn.rollout_id] = playing
                if isinstance(turn, Opened):
                    self.episodes.request(self.place, turn.rollout)
                else:
                    waiting = self._waiting.pop(turn.rollout_id)
                    waiting.answer.set_result(written(waiting.rollout, turn.tokens))
                return await playing.reply
        except BudgetUsedUp:
            self._budget_exhausted = True
            raise

    async def call_by_key(self, trajectory: EpisodeTrajectory, role: str, call: Call) -> Reply:
        """Run `call` for the gateway. `role`: another role than the trajectory's, which the agent gave in the model's
        name; "": the trajectory's. The call may name images of its task by their paths, and no other file."""
        call = await with_stored_images(call, self._stored)
        return await self.call(self._for_role(trajectory, role) if role else trajectory, call)

    def _stored(self, value: Any) -> tuple[str, str]:
        if isinstance(value, str) and value in self.task.images:
            return stored(value, Places(Path("/")))
        return stored(value, Places(None, self.episodes.limits.image_urls))

    def _for_role(self, trajectory: EpisodeTrajectory, role: str) -> EpisodeTrajectory:
        if role == trajectory.role:
            return trajectory
        key = trajectory.api_key, role
        if key not in self._by_role:
            self._by_role[key] = self._new_trajectory(role)
        return self._by_role[key]

    # For the player

    async def next(self, rollout: Rollout) -> Segment | None:
        """Hand a finished turn, or a recorded Rollout, to the agent. Return the tokens that the agent's next call
        appends; None at the end of the Episode."""
        if (answer := self._recorded.pop(rollout.rollout_id, None)) is not None:
            return await answer
        playing = self._playing.pop(rollout.rollout_id)
        self.episode.note_versions(rollout)
        reply = playing.trajectory.conversations.on_turn(rollout)
        self._tokens.end(rollout.rollout_id, len(reply.token_ids) - playing.begun)
        if self.over or playing.reply.done():
            self._abandoned_ids.add(rollout.rollout_id)
        if not playing.reply.done():
            playing.reply.set_result(reply)
        if self.over and not self._restarts:
            return self._last_segment(rollout)
        waiting = _Waiting(rollout, asyncio.get_running_loop().create_future())
        self._waiting[rollout.rollout_id] = waiting
        self._restart_if_idle()
        return await waiting.answer

    def reward_of(self, rollout: Rollout) -> Reward:
        """Return the reward of a Rollout, after the end."""
        if rollout.rollout_id in self._abandoned_ids:
            return Reward(None, error="the agent gave up a call of it")
        if all(trajectory.index is None for trajectory in self.trajectories):
            none = Reward(None, error="the workflow made no model call")
            return self._default_reward if self._cut_off and self._default_reward.missing else none
        trajectory = next((t for t in self.trajectories if t.index == rollout.trajectory), None)
        if trajectory is None:
            return self._default_reward
        nums = trajectory.conversations.num_turns
        given = trajectory.final_reward(self._default_reward)
        if self._cut_off and given.advantages is None and self.episodes.limits.precomputed(trajectory.role):
            return Reward(None, error="its episode was cut off before it had an advantage")
        where = f"trajectory {trajectory.index} (role {trajectory.role!r}) of {self.episode.episode_id}"
        try:
            rewards = divided(given, list(nums.values()), where)
        except ValueError as error:
            return Reward(None, error=str(error))
        return rewards[list(nums).index(rollout.rollout_id)]

    def close(self) -> None:
        """End the waiting Rollouts, after the end. Those in `unreplayed` were truncated or dropped."""
        for rollout_id, waiting in self._waiting.items():
            if rollout_id not in self.unreplayed:
                waiting.answer.set_result(self._last_segment(waiting.rollout))
        self._waiting.clear()
        self.unreplayed = {}

    def cancel(self) -> None:
        """Stop the workflow and all pending calls."""
        self.over = True
        self._stop()
        for playing in self._playing.values():
            playing.reply.cancel()

    # Private

    def _new_trajectory(self, role: str) -> EpisodeTrajectory:
        key = f"rollover-{self.episode.episode_id}-{secrets.token_urlsafe(16)}"
        trajectory = EpisodeTrajectory(role, key, self.call, self.episodes.chats)
        self.trajectories.append(trajectory)
        if self.episodes.gateway is not None:
            self.episodes.gateway.open(key, partial(self.call_by_key, trajectory))
        return trajectory

    async def _turn(self, trajectory: EpisodeTrajectory, call: Call) -> tuple[Opened | Continued | Replayed, int]:
        """Begin the turn that answers the call. Return it, and how many of its tokens are recorded already."""
        self.turns.check_turns_left()
        place = await self.episodes.large_calls.place_of(call, trajectory.conversations)
        most = self.episodes.limits.max_new_tokens
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
            if self._tokens.most:  # other turns may have begun meanwhile
                found = self.turns.find(trajectory, call, place)
        turn, begun = self.turns.begin(trajectory, call, found, room), found.begun or 0
        if not isinstance(turn, Replayed):
            self._tokens.begin(turn.rollout_id, room - begun)
        return turn, begun

    def _refuse_after_the_end(self) -> None:
        if self.over:
            raise UnknownKey(f"episode {self.episode.episode_id} has ended: it can make no calls")

    async def _play(self) -> None:
        episodes, key = self.episodes, self._default.api_key
        values: dict[str, Any] = {"task": self.task, "episode": self.episode, "model": MODEL}
        values |= {"base_url": self._base_url, "api_key": key}
        if episodes.gateway is not None and "client" in episodes.workflow.wanted:
            values["client"] = episodes.gateway.client(key)
        try:
            name = f"episode {self.episode.episode_id}"
            answer, failure = await outcome_of(episodes.workflow, values, self._clock.waiting, episodes.lane, name=name)
            if failure is not None:
                raise failure
            reward = assign_rewards(answer, self.trajectories)
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
        if self._budget_exhausted:
            # The policy used up its budget: no failure of the workflow, and worth 0.
            self._end("length", Reward(0.0))
        elif self.episodes.may_retry(self.place, why):
            self.over = self._restarts = True
            self._stop()
            self._restart_if_idle()
        else:
            self._end("error", Reward(None, error=f"the workflow failed: {why}"))

    def _on_timeout(self) -> None:
        limits = self.episodes.limits
        missing = Reward(None, error=f"timed out: its agent took more than {limits.timeout_s:g} s (workflow.timeout_s)")
        self._end("timeout", Reward(limits.timeout_score) if limits.on_timeout == "score" else missing)

    def _end(self, how: str, default: Reward | None) -> None:
        """End the Episode. `default`: the reward of each trajectory without its own."""
        self.over, self._cut_off = True, how != "done"
        self._default_reward = default or self._default_reward
        if default is not None and default.missing:
            for trajectory in self.trajectories:
                trajectory.clear_reward()
        self.episodes.counts[f"episodes/{how}"] += 1
        self._stop()
        self.unreplayed = self.turns.record.unreplayed()
        if self.unreplayed:
            waiting = ((w.rollout, self.unreplayed.get(rollout_id)) for rollout_id, w in self._waiting.items())
            self.episodes.counts["episodes/diverged"] += any(n is not None and r.num_tokens > n for r, n in waiting)
        else:
            self.close()
        self.episodes.on_end(self.place)

    def _last_segment(self, rollout: Rollout) -> Segment | None:
        """Return the Segment that ends a Rollout with an abandoned call; None for others: their last turn ends them."""
        abandoned = rollout.rollout_id in self._abandoned_ids
        return replace(written(rollout, ()), stop_reason=StopReason.ABANDONED) if abandoned else None

    def _stop(self) -> None:
        self._clock.end()
        if (gateway := self.episodes.gateway) is not None:
            self._abandoned_ids |= gateway.revoke(trajectory.api_key for trajectory in self.trajectories)
        if self._task is not asyncio.current_task():
            self._task.cancel()

    def _restart_if_idle(self) -> None:
        if self._restarts and not self._playing:
            self.episodes.counts["episodes/restarted"] += 1
            self.episodes.request(self.place, None)


_CHECKS_PER_LIMIT, _MAX_INTERVAL_S = 8, 1.0


class AgentClock:
    """Timeout of an agent (workflow.timeout_s): calls `on_timeout` after `limit_s` seconds (0: never) of its own work.

    Time while a model call is in flight does not count, so pauses, new weights and other rollouts' turns time no agent
    out. Nor does time while the event loop is blocked, by a training trainer or another agent: this agent could not
    proceed, and its next call has not been read yet.
    """

    def __init__(self, limit_s: float, on_timeout: Callable[[], None]) -> None:
        self._left_s, self._limited, self._on_timeout = limit_s, limit_s > 0, on_timeout
        self._num_waits = 0
        self._loop = asyncio.get_running_loop()
        self._interval_s = min(limit_s / _CHECKS_PER_LIMIT, _MAX_INTERVAL_S)
        self._counted_s = 0.0  # the loop's time up to which the agent's time is counted
        self._alarm: asyncio.TimerHandle | None = None
        self._resume()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock while the agent waits for a model call or for a place to run."""
        self._num_waits += 1
        if self._num_waits == 1:
            self._stop()
        try:
            yield
        finally:
            self._num_waits -= 1
            if not self._num_waits:
                self._resume()

    def end(self) -> None:
        """Stop the clock for good."""
        self._stop()
        self._limited = False

    def _resume(self) -> None:
        self._counted_s = self._loop.time()
        if self._limited:
            self._alarm = self._loop.call_later(min(self._left_s, self._interval_s), self._check)

    def _check(self) -> None:
        self._stop()
        if self._left_s > 0:
            self._resume()
        else:
            self._on_timeout()

    def _stop(self) -> None:
        """Count the time up to now, at most two check intervals: the event loop was blocked for the rest."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
            self._left_s -= min(self._loop.time() - self._counted_s, 2 * self._interval_s)


class TokenBudget:
    """Tokens that the turns of an Episode may sample together (workflow.max_tokens): `most`; 0: no limit. `sampled`:
    tokens of an earlier run.

    A turn reserves as many tokens as it may get and returns what it did not sample, so that concurrent turns cannot
    exceed the limit together.
    """

    def __init__(self, most: int, sampled: int = 0) -> None:
        self.most = most
        self._left = most - sampled
        self._reserved: dict[str, int] = {}  # by rollout id, of turns in flight
        self._ended = asyncio.Event()  # set when the next turn ends

    async def room(self, wanted: int) -> int:
        """Return how many of `wanted` tokens a turn may sample; 0 or less: none is left. Waits while the end of a turn
        in flight may free more. The caller calls `begin` before it awaits anything."""
        if not self.most:
            return wanted
        while self._reserved and self.free < wanted:
            await self._ended.wait()
        return min(wanted, self.free)

    def begin(self, rollout_id: str, num: int) -> None:
        """Reserve `num` tokens for a turn of the Rollout."""
        if self.most:
            self._reserved[rollout_id] = num

    def end(self, rollout_id: str, num_sampled: int) -> None:
        """Return what the turn did not sample."""
        if self.most:
            del self._reserved[rollout_id]
            self._left -= num_sampled
            self._ended.set()
            self._ended = asyncio.Event()

    @property
    def free(self) -> int:
        """Tokens that are neither sampled nor reserved."""
        return self._left - sum(self._reserved.values())
