"""Which tasks are not scored any more, as their calls ended too many workers. Pure; lives as long as the process."""

from __future__ import annotations

from collections import OrderedDict

_MAX_TASKS = 100_000


class Quarantine:
    """Counts the workers that each task ended. After `limit` of them (0: never) the task is quarantined.

    Bounded: of more than `max_tasks` tasks the one that was quiet for longest is forgotten.
    """

    def __init__(self, limit: int, max_tasks: int = _MAX_TASKS) -> None:
        self.limit, self.max_tasks = limit, max_tasks
        self._deaths: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        return 0 < self.limit <= self._deaths.get(task_id, 0)

    def blame(self, task_id: str) -> None:
        """A call for this task ended a worker."""
        self._deaths[task_id] = self._deaths.pop(task_id, 0) + 1
        if len(self._deaths) > self.max_tasks:
            self._deaths.popitem(last=False)
