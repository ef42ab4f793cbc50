"""Tasks of environments: for each rollout whose turn has ended, one that returns what its environment writes.

    turn ended ──▶ begin ──▶ the environment's answer ──▶ end ──▶ appended
                     ├── it raises ──▶ asked again, workflow.retries times ──▶ end raises EnvironmentFailed
                     ├── what it knew is lost ──▶ end raises StateLost, workflow.retries times
                     └── longer than the limit, over all turns ──▶ it ends with StopReason.TIMEOUT

Owns those futures, and how long each rollout's environment has worked. That is its own time: what the rollout waits for
the model, for a slot or for weights is none of it, nor is time in which the event loop stood still, as it does while a
trainer trains in its thread. Never changes a rollout. Whoever answers (`Actor`) may be an environment or anything else
that writes the next tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from rollover.config.workflow import WorkflowConfig
from rollover.envs.protocol import InvalidTurn, StateLost
from rollover.functions import Causes, explained, was_cancelled
from rollover.rollout.cancelled_tasks import CancelledTasks
from rollover.rollout.requests import ending
from rollover.types import Rollout, Segment, StopReason

logger = logging.getLogger(__name__)

Actor = Callable[[Rollout], Awaitable[Segment | None]]
"""Gets a copy of a rollout whose turn has ended, and gives what an environment writes next; None: it is done."""
Answering = asyncio.Future[Segment | None]

_LOOKS_PER_LIMIT, _LONGEST_PAUSE_S = 8, 1.0


class EnvironmentFailed(ValueError):
    """The environment raised at a rollout, as often as it was asked."""


@dataclass(slots=True)
class _Act:
    rollout: Rollout
    counted: float
    """Until when its time is counted."""


class EnvTasks:
    """The environment tasks of one driver. Logs the first one that takes too long, or fails.

    `num_ended`: rollouts that ended with an answer; `num_timed_out`: those among them that were given up; `num_failed`:
    those whose environment failed for good; `num_retried`: how often it was asked again.
    """

    def __init__(self, actor: Actor, workflow: WorkflowConfig) -> None:
        self.actor, self.workflow = actor, workflow
        self.num_ended = self.num_timed_out = self.num_failed = self.num_retried = 0
        self._acts: dict[Answering, _Act] = {}
        self._used: dict[str, float] = {}  # seconds, by rollout id
        self._lost: Counter[str] = Counter()  # how often a rollout began again, by its id
        self._said = Causes()
        self._cancelled = CancelledTasks()
        self._pause_s = min(workflow.timeout_s / _LOOKS_PER_LIMIT, _LONGEST_PAUSE_S)
        self._looking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._acts)

    @property
    def waited_for(self) -> list[asyncio.Future]:
        """What ends when there is something to take."""
        return [*self._acts, *([] if self._looking is None else [self._looking])]

    def begin(self, rollout: Rollout) -> Answering:
        """Ask for what comes next."""
        task = asyncio.ensure_future(self._answer(rollout))
        self._acts[task] = _Act(rollout, asyncio.get_running_loop().time())
        self._look_on()
        return task

    def asked(self) -> set[str]:
        """The ids of rollouts for which somebody is asked. Those cut off by the end of an event loop are not."""
        for task in [task for task in self._acts if task.cancelled()]:
            del self._acts[task]
        return {act.rollout.rollout_id for act in self._acts.values()}

    def begin_again(self, rollouts: Iterable[Rollout]) -> None:
        """Ask for those of these rollouts for which nobody is asked: after a restart, or the end of an event loop."""
        asked = self.asked()
        for rollout in rollouts:
            if rollout.rollout_id not in asked:
                self.begin(rollout)

    def done(self) -> list[tuple[Rollout, Answering]]:
        """Whose answers are there, in order of (group id, sibling)."""
        done = [(act.rollout, task) for task, act in self._acts.items() if task.done()]
        return sorted(done, key=lambda item: (item[0].group_id, item[0].sibling))

    def end(self, task: Answering) -> Segment | None:
        """Take the answer, which is there. EnvironmentFailed where it raised every time; StateLost where the rollout
        has to; InvalidTurn ends the run."""
        self._count(task, asyncio.get_running_loop().time())
        rollout = self._acts.pop(task).rollout
        self._look_on()
        try:
            answer = task.result()
        except InvalidTurn:
            raise
        except (Exception, asyncio.CancelledError) as error:  # boundary: it fails its rollout, not the run
            if isinstance(error, StateLost) and self._lost[rollout.rollout_id] < self.workflow.retries:
                self._lost[rollout.rollout_id] += 1
                self.num_retried += 1
                self._told_of(rollout, error, "it begins again")
                raise
            self.num_failed += 1
            raise EnvironmentFailed(self._told_of(rollout, error, "its reward is missing")) from error
        self.num_ended += answer is None or answer.stop_reason is not StopReason.PAUSED
        return answer

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        return {
            "episodes/ended": float(self.num_ended),
            "episodes/timeout": float(self.num_timed_out),
            "episodes/failed": float(self.num_failed),
            "episodes/retried": float(self.num_retried),
        }

    def forget(self, rollout_ids: Iterable[str], *, left: bool = False) -> None:
        """Nobody waits for their answers any more: they begin again, or have `left` the system."""
        gone = set(rollout_ids)
        for rollout_id in gone if left else ():
            self._lost.pop(rollout_id, None)
        for rollout_id in gone:
            self._used.pop(rollout_id, None)
        for task in [task for task, act in self._acts.items() if act.rollout.rollout_id in gone]:
            del self._acts[task]
            self._cancelled.add(task)
        self._look_on()

    def clear(self) -> list[Answering]:
        """Nobody waits for any answer any more. Returns what was under way, cancelled."""
        tasks = list(self._acts)
        self._acts.clear()
        for task in tasks:
            self._cancelled.add(task)
        self._look_on()
        return tasks

    # Private

    async def _answer(self, rollout: Rollout) -> Segment | None:
        """What the environment writes, which is asked again where it raises: its answers depend on the tokens alone."""
        for left in reversed(range(self.workflow.retries + 1)):
            try:
                return await self.actor(replace(rollout))
            except (InvalidTurn, StateLost):
                raise
            except (Exception, asyncio.CancelledError) as error:  # boundary: the user's environment
                if not left or was_cancelled(error):
                    raise
                self.num_retried += 1
                self._told_of(rollout, error, "it is asked again")
        raise AssertionError("it is asked once at least")

    def _told_of(self, rollout: Rollout, error: BaseException, then: str) -> str:
        """Why it failed; said where nothing alike was said before."""
        why = f"the environment failed at rollout {rollout.rollout_id} ({explained(error)})"
        if self._said.is_new(f"{explained(error)}: {then}"):
            logger.warning(f"{why}: {then}; later ones are counted (episodes/failed, episodes/retried)")
        return why

    def _look_on(self) -> None:
        """Somebody looks at the time while, and only while, anything is under way."""
        if self._acts and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look_until_one_is_late())
        elif not self._acts and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look_until_one_is_late(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._pause_s)
            late = False
            for task in [task for task in self._acts if not task.done()]:
                self._count(task, loop.time())
                if self._used[self._acts[task].rollout.rollout_id] >= self.workflow.timeout_s:
                    self._give_up(task)
                    late = True
            if late:
                return

    def _count(self, task: Answering, now: float) -> None:
        """Its time up to now, but for what is more than two pauses: the event loop stood still then."""
        act = self._acts[task]
        rollout_id = act.rollout.rollout_id
        self._used[rollout_id] = self._used.get(rollout_id, 0.0) + min(now - act.counted, 2 * self._pause_s)
        act.counted = now

    def _give_up(self, task: Answering) -> None:
        act = self._acts.pop(task)
        self._cancelled.add(task)
        given_up: Answering = asyncio.get_running_loop().create_future()
        given_up.set_result(ending(act.rollout, StopReason.TIMEOUT))
        self._acts[given_up] = act
        if not self.num_timed_out:
            score = f"{self.workflow.timeout_score:g}" if self.workflow.on_timeout == "score" else "missing"
            logger.warning(
                f"the environment of rollout {act.rollout.rollout_id} has worked for workflow.timeout_s ="
                f" {self.workflow.timeout_s:g} s: it is given up, and its reward is {score}. The next ones are counted"
                " (episodes/timeout)"
            )
        self.num_timed_out += 1
