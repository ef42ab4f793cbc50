"""Tasks of environments: one for each rollout whose turn has ended; it returns what the environment writes next.

    turn ended ──▶ start ──▶ the environment's answer ──▶ result ──▶ appended
                     ├── it raises ──▶ retried workflow.retries times ──▶ result raises EnvironmentFailed
                     ├── its state is lost ──▶ result raises StateLost, at most workflow.retries times
                     └── exceeds workflow.timeout_s, over all turns ──▶ it ends with StopReason.TIMEOUT

Owns the tasks, and the time that each rollout's environment has used. Waiting for the model, a slot or weights does not
count, nor does time in which the event loop is blocked (as while a trainer trains in its thread). Never changes a
rollout.
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
from rollover.rollout.lifecycle import end_segment
from rollover.shutdown import cancel_in_background
from rollover.types import Rollout, Segment, StopReason

logger = logging.getLogger(__name__)

Actor = Callable[[Rollout], Awaitable[Segment | None]]
"""Called with a copy of a rollout whose turn has ended; returns the next environment segment, None if it is done."""
EnvTask = asyncio.Future[Segment | None]

_CHECKS_PER_TIMEOUT, _LONGEST_PAUSE_S = 8, 1.0


class EnvironmentFailed(ValueError):
    """The environment raised at a rollout in every try."""


@dataclass(slots=True)
class _Running:
    rollout: Rollout
    counted: float
    """Loop time up to which its time is counted."""


class EnvTasks:
    """Environment tasks of one driver. Logs the first one that times out or fails.

    `num_ended`: rollouts whose environment ended them; `num_timed_out`: those of them that timed out; `num_failed`:
    those whose environment failed for good; `num_retried`: retries.
    """

    def __init__(self, actor: Actor, workflow: WorkflowConfig) -> None:
        self.actor, self.workflow = actor, workflow
        self.num_ended = self.num_timed_out = self.num_failed = self.num_retried = 0
        self._running: dict[EnvTask, _Running] = {}
        self._used_s: dict[str, float] = {}  # by rollout id
        self._restarts: Counter[str] = Counter()  # by rollout id
        self._logged = Causes()
        self._pause_s = min(workflow.timeout_s / _CHECKS_PER_TIMEOUT, _LONGEST_PAUSE_S)
        self._timer: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def pending(self) -> list[asyncio.Future]:
        """Return the tasks to wait for."""
        return [*self._running, *([] if self._timer is None else [self._timer])]

    def start(self, rollout: Rollout) -> EnvTask:
        """Start the environment's turn."""
        task = asyncio.ensure_future(self._answer(rollout))
        self._running[task] = _Running(rollout, asyncio.get_running_loop().time())
        self._update_timer()
        return task

    def pending_ids(self) -> set[str]:
        """Return the ids of rollouts that have a task. Tasks cancelled by the end of an event loop do not count."""
        for task in [task for task in self._running if task.cancelled()]:
            del self._running[task]
        return {each.rollout.rollout_id for each in self._running.values()}

    def start_missing(self, rollouts: Iterable[Rollout]) -> None:
        """Start tasks of those of these rollouts that have none: after a restart, or the end of an event loop."""
        pending = self.pending_ids()
        for rollout in rollouts:
            if rollout.rollout_id not in pending:
                self.start(rollout)

    def done(self) -> list[tuple[Rollout, EnvTask]]:
        """Return the tasks that are done, in order of (group id, sibling)."""
        done = [(each.rollout, task) for task, each in self._running.items() if task.done()]
        return sorted(done, key=lambda item: (item[0].group_id, item[0].sibling))

    def result(self, task: EnvTask) -> Segment | None:
        """Remove a task that is done, and return its answer.

        Raises EnvironmentFailed after the last retry, StateLost if the rollout must restart; InvalidTurn ends the run.
        """
        self._add_time(task, asyncio.get_running_loop().time())
        rollout = self._running.pop(task).rollout
        self._update_timer()
        try:
            answer = task.result()
        except InvalidTurn:
            raise
        except (Exception, asyncio.CancelledError) as error:  # boundary: it fails its rollout, not the run
            if isinstance(error, StateLost) and self._restarts[rollout.rollout_id] < self.workflow.retries:
                self._restarts[rollout.rollout_id] += 1
                self.num_retried += 1
                self._log_failure(rollout, error, "it restarts")
                raise
            self.num_failed += 1
            raise EnvironmentFailed(self._log_failure(rollout, error, "its reward is missing")) from error
        self.num_ended += answer is None or answer.stop_reason is not StopReason.PAUSED
        return answer

    def stats(self) -> dict[str, float]:
        """Return cumulative counters."""
        return {
            "episodes/ended": float(self.num_ended),
            "episodes/timeout": float(self.num_timed_out),
            "episodes/failed": float(self.num_failed),
            "episodes/retried": float(self.num_retried),
        }

    def cancel(self, rollout_ids: Iterable[str], *, left: bool = False) -> None:
        """Cancel the tasks of rollouts that restart, or that have `left`."""
        ids = set(rollout_ids)
        for rollout_id in ids if left else ():
            self._restarts.pop(rollout_id, None)
        for rollout_id in ids:
            self._used_s.pop(rollout_id, None)
        for task in [task for task, each in self._running.items() if each.rollout.rollout_id in ids]:
            del self._running[task]
            cancel_in_background(task)
        self._update_timer()

    def cancel_all(self) -> list[EnvTask]:
        """Cancel all tasks, and return them."""
        tasks = list(self._running)
        self._running.clear()
        for task in tasks:
            cancel_in_background(task)
        self._update_timer()
        return tasks

    # Private

    async def _answer(self, rollout: Rollout) -> Segment | None:
        """Call the environment, with retries if it raises: its answers depend on the tokens alone."""
        for left in reversed(range(self.workflow.retries + 1)):
            try:
                return await self.actor(replace(rollout))
            except (InvalidTurn, StateLost):
                raise
            except (Exception, asyncio.CancelledError) as error:  # boundary: the user's environment
                if not left or was_cancelled(error):
                    raise
                self.num_retried += 1
                self._log_failure(rollout, error, "retry")
        raise AssertionError("there is at least one try")

    def _log_failure(self, rollout: Rollout, error: BaseException, then: str) -> str:
        """Return the failure as a text; log it unless a similar one was logged."""
        why = f"the environment failed at rollout {rollout.rollout_id} ({explained(error)})"
        if self._logged.is_new(f"{explained(error)}: {then}"):
            logger.warning(f"{why}: {then}; later ones are counted (episodes/failed, episodes/retried)")
        return why

    def _update_timer(self) -> None:
        """Run the timer while, and only while, there are tasks."""
        if self._running and (self._timer is None or self._timer.done()):
            self._timer = asyncio.ensure_future(self._wait_for_timeout())
        elif not self._running and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait_for_timeout(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._pause_s)
            late = False
            for task in [task for task in self._running if not task.done()]:
                self._add_time(task, loop.time())
                if self._used_s[self._running[task].rollout.rollout_id] >= self.workflow.timeout_s:
                    self._time_out(task)
                    late = True
            if late:
                return

    def _add_time(self, task: EnvTask, now: float) -> None:
        """Count the task's time until now, at most two pauses of it: beyond that the event loop was blocked."""
        running = self._running[task]
        rollout_id = running.rollout.rollout_id
        self._used_s[rollout_id] = self._used_s.get(rollout_id, 0.0) + min(now - running.counted, 2 * self._pause_s)
        running.counted = now

    def _time_out(self, task: EnvTask) -> None:
        running = self._running.pop(task)
        cancel_in_background(task)
        timed_out: EnvTask = asyncio.get_running_loop().create_future()
        timed_out.set_result(end_segment(running.rollout, StopReason.TIMEOUT))
        self._running[timed_out] = running
        if not self.num_timed_out:
            score = f"{self.workflow.timeout_score:g}" if self.workflow.on_timeout == "score" else "missing"
            logger.warning(
                f"the environment of rollout {running.rollout.rollout_id} exceeded workflow.timeout_s ="
                f" {self.workflow.timeout_s:g} s: the rollout ends, and its reward is {score}. Later ones are only"
                " counted (episodes/timeout)"
            )
        self.num_timed_out += 1
