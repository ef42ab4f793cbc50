"""Episodes: every sibling of a group is a run of the user's function, and its model calls are turns of Rollouts.

    begin ──▶ function ──call──▶ host.open(rollout)  or  the answer to `next`: tokens that continue a Rollout
                  ▲                        │
                  └──reply── next(rollout) ◀── the turn has ended, and the Rollout waits for the next call, or the end
              returns ──▶ None for every `next` ──▶ score

`Episodes` is the environment of a run with a workflow: what follows the policy's turn is the agent's next call. Each
Episode is an `AgentRun`, one run of the function:

    playing ──returned, timed out, no budget left, failed too often──▶ over: every Rollout ends, with a reward or none
       └─────failed, and may try again──▶ over: its Rollouts leave once none of them plays, and another run begins

A run may begin with what an earlier one left, as a kill ended it: calls that it makes again are answered from that
record (record.py). Owns the runs, their clocks, and which Rollouts play a turn or wait for the next one. Never changes
a Rollout, and never decides who runs: the host does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollover.envs.protocol import Keep, RunEnvironment, TurnOptions, keeps_nothing, written
from rollover.functions import Causes, explained, outcome_of
from rollover.images import Places, stored
from rollover.trajectories import divided
from rollover.types import Prompt, Reward, Rollout, Segment, StopReason, Task, episode_name
from rollover.workflows.budgets import AgentClock, TokenBudget
from rollover.workflows.calls import MODEL, BudgetUsedUp, Call, Reply, UnknownKey
from rollover.workflows.conversations import Chats, LargeCalls, with_stored_images
from rollover.workflows.episode import Episode, EpisodeTrajectory, Once, give
from rollover.workflows.gateway.server import EpisodeServer
from rollover.workflows.matching import Break
from rollover.workflows.protocol import Lane, Workflow
from rollover.workflows.turns import Continued, EpisodePlace, Limits, Opened, Played, Turns

logger = logging.getLogger(__name__)

COUNTERS = (
    *(f"episodes/{how}" for how in ("done", "length", "timeout", "error", "restarted", "replayed", "diverged")),
    "turns/continued",
    *(f"turns/breaks/{reason.value}" for reason in Break),
)


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


class Episodes(RunEnvironment):
    """Of one run. `server` answers what agents ask. `keep` is told of what an Episode keeps over a kill. `resumes`:
    whether an Episode whose agent was lost goes on from what is on record of it; else it begins again."""

    def __init__(
        self,
        function: Workflow,
        chats: Chats,
        limits: Limits,
        server: EpisodeServer,
        *,
        resumes: bool = True,
        lane: Lane = Lane.TRAINING,
        keep: Keep = keeps_nothing,
    ) -> None:
        self.agents = self
        self.function, self.chats, self.limits, self.server = function, chats, limits, server
        self.resumes, self.lane = resumes, lane
        self.large_calls = LargeCalls(chats, limits.max_prompt_tokens + limits.max_new_tokens)
        self.notice = "" if (fit := chats.of(()).fit("user")).exact else f"{fit.why}: every call opens a rollout"
        self.counts: Counter[str] = Counter()
        self._keep = keep
        self._agent_runs: dict[EpisodePlace, AgentRun] = {}
        self._failures: Counter[EpisodePlace] = Counter()
        self._once: dict[EpisodePlace, Once] = {}
        self._said = Causes()

    def apart(self) -> Episodes:
        """Those of an evaluation, by the same function, with counts of their own; their agents ask by the same
        server."""
        return Episodes(self.function, self.chats, self.limits, self.server, lane=Lane.EVALUATION)

    async def close(self) -> None:
        await self.server.close()

    # The host's side: it is the run's Environment

    def prompt(self, task: Task, instead: Sequence[Mapping[str, str]] | str | None = None) -> Prompt:
        """The task's own, as `chat` makes it of the task's messages: which calls have it is the function's business."""
        said = task.messages or task.prompt if instead is None else instead
        if said is None or isinstance(said, str):
            return Prompt.of(self.chats.tokenizer(said)["input_ids"])
        return self.chats.of(()).prompt(said)

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Their groups have left: what still runs of their episodes is cancelled."""
        self.end({rollout.group_id for rollout in rollouts})

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        ended = sum(self.counts[f"episodes/{how}"] for how in ("done", "length", "timeout", "error"))
        return {name: float(self.counts[name]) for name in COUNTERS} | {"episodes/ended": float(ended)}

    def begin(
        self,
        host: Host,
        rollout: Rollout,
        kept: Mapping[str, Any] | None = None,
        recorded: Sequence[Rollout] = (),
    ) -> None:
        """The Episode of a sibling begins, or begins again: `host` plays the Rollouts that it opens. `rollout`: its
        only one, as its group was admitted with it. `kept`: what an earlier process kept of it.

        `recorded`: copies of all Rollouts that it has, where its agent was lost. None of them runs. What the agent asks
        again is answered from these.
        """
        place = rollout.group_id, rollout.sibling
        if place in self._agent_runs:
            self._agent_runs.pop(place).cancel()
        once = self._once.setdefault(place, Once(partial(self._keep_of, place)))
        once.know(kept or {})
        if recorded:
            self.counts["episodes/replayed"] += 1
        self._agent_runs[place] = AgentRun(self, host, place, rollout.task, rollout.prompt, once, recorded)

    def unasked(self, place: EpisodePlace) -> Mapping[str, int]:
        """Of an Episode that has ended: what was on record and was not asked for again, see AgentRun."""
        return self._agent_runs[place].unasked if place in self._agent_runs else {}

    def on_cut(self, place: EpisodePlace) -> None:
        """What was not asked for again has gone."""
        if place in self._agent_runs:
            self._agent_runs[place].close()

    @property
    def num_at_work(self) -> int:
        """Episodes that have not ended."""
        return sum(not run.over for run in self._agent_runs.values())

    def has(self, place: EpisodePlace) -> bool:
        """Whether somebody plays the Episode, or has played it to its end."""
        return place in self._agent_runs and not self._agent_runs[place].lost

    def end_all(self) -> None:
        """As `end`, of every group."""
        self.end({place[0] for place in self._agent_runs})

    def end(self, group_ids: Iterable[int]) -> None:
        """These groups have left: what still runs of their episodes is cancelled."""
        groups = set(group_ids)
        for place in [place for place in self._agent_runs if place[0] in groups]:
            self._agent_runs.pop(place).cancel()
            del self._failures[place]
            self._once.pop(place, None)

    async def next(self, rollout: Rollout) -> Segment | None:
        """The turn goes to the agent that asked for it; what comes back begins its next call. None: the end."""
        return await self._agent_runs[rollout.group_id, rollout.sibling].next(rollout)

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        """Each gets the reward of its trajectory."""
        return [self._agent_runs[rollout.group_id, rollout.sibling].reward_of(rollout) for rollout in rollouts]

    def scores_singly(self, task: Task, /) -> bool:
        return True

    def options(self, rollout: Rollout) -> TurnOptions:
        """Of the call that the Rollout's present turn answers."""
        return self._agent_runs[rollout.group_id, rollout.sibling].turns.options[rollout.rollout_id]

    # The agents' side

    def may_retry(self, place: EpisodePlace, why: str) -> bool:
        """The function failed. Whether it may be run again."""
        self._failures[place] += 1
        again = self._failures[place] <= self.limits.retries
        if self._said.is_new(why):
            what = "it is run again" if again else "its rewards are missing"
            logger.warning(
                f"{self.function.spec} failed at episode {episode_name(*place)} ({why}): {what}; later ones are"
                " counted (episodes/restarted, episodes/error)"
            )
        return again

    # Private

    def _keep_of(self, place: EpisodePlace, name: str, value: Any) -> None:
        if place in self._agent_runs:
            self._keep(*place, name, value)


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
        around: Episodes,
        host: Host,
        place: EpisodePlace,
        task: Task,
        task_prompt: Prompt,
        once: Once,
        recorded: Sequence[Rollout] = (),
    ) -> None:
        self.around, self.place, self.task = around, place, task
        self._host = host
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
        self.episode = Episode(episode_name(*place), task, around.server.base_url, self._new_trajectory, once)
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

    async def ask_by_key(self, trajectory: EpisodeTrajectory, role: str, call: Call) -> Reply:
        """As `ask`, over HTTP. `role`: another one than the trajectory's, for an agent that can say it by the model's
        name alone; "": the trajectory's. It may name images of its task by their paths, and no other file."""
        call = await with_stored_images(call, self._stored)
        return await self.ask(self._of_role(trajectory, role) if role else trajectory, call)

    def _stored(self, value: Any) -> tuple[str, str]:
        if isinstance(value, str) and value in self.task.images:
            return stored(value, Places(Path("/")))
        return stored(value, Places(None, self.around.limits.image_urls))

    def _of_role(self, trajectory: EpisodeTrajectory, role: str) -> EpisodeTrajectory:
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
        self.around.server.open(key, partial(self.ask_by_key, trajectory))
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
        values |= {"base_url": around.server.base_url, "api_key": key, **around.server.arguments(key)}
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
        self._given_up |= self.around.server.shut(trajectory.api_key for trajectory in self.trajectories)
        if self._run is not asyncio.current_task():
            self._run.cancel()

    def _restart_if_idle(self) -> None:
        if self._restarts and not self._playing:
            self.around.counts["episodes/restarted"] += 1
            self._host.restart(*self.place)
