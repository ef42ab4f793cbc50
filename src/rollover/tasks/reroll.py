"""Deferred re-roll: tasks whose rollouts all failed are given to the driver again, later in the run.

`Reroll` has a queue of failed tasks in front of the task stream, and is the driver's `next_task`. Pure: no clock, no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from rollover.config import RerollConfig
from rollover.rewards.built_in import score_names
from rollover.types import Group, NextTask, Prompt, Task

# Added to Task.attempt by each re-roll, for other random draws. No pass of the stream has so high a number.
ATTEMPT = 1_000_000


_ZERO = 1e-6  # Axolotl's bound


def has_failed(group: Group, failed_at_most: float | Literal["equal_zero"]) -> bool:
    """Return whether all rewards of a group are equal, and at most `failed_at_most`.

    "equal_zero": equal and 0, up to 1e-6, for each of several reward functions. Missing rewards and the greedy baseline
    are ignored.
    """
    rewards = [r.reward for r in group.rollouts if r.reward is not None and not r.greedy]
    scores = [reward.score for reward in rewards if reward.score is not None]
    if failed_at_most != "equal_zero":
        return bool(scores) and min(scores) == max(scores) <= failed_at_most
    of_parts = ([r.extras[name] for r in rewards if name in r.extras] for name in score_names(group.task.reward))
    return bool(scores) and all(min(of) == max(of) and abs(of[0]) < _ZERO for of in (scores, *of_parts) if of)


class Reroll:
    """`next_task` of the driver: at most `config.max_groups` failed tasks per step, first in first out, then the
    stream's.

    Failed tasks are queued from the start, and given again from `config.start_fraction` of `num_steps` on. One that
    fails again is queued again. Cumulative counters: `queued`; `given`; `solved`, given tasks that did not fail again;
    `dropped`, failed tasks that did not fit into the queue.
    """

    def __init__(self, config: RerollConfig, num_steps: int, next_task: NextTask) -> None:
        self.config, self.next_task = config, next_task
        self.first_version = config.start_fraction * num_steps
        self.version = 0
        self.queued = self.given = self.solved = self.dropped = 0
        self._given_in_step = 0
        self._queue: dict[str, tuple[Task, Prompt]] = {}  # by task_id, in order of failure
        self._looked_at: set[int] = set()  # ids of groups that were counted before their step was rolled back

    def __len__(self) -> int:
        return len(self._queue)

    def change_tasks(self, change: Callable[[Task], Task]) -> None:
        """Replace every waiting task, after a restore."""
        self._queue = {name: (change(task), prompt) for name, (task, prompt) in self._queue.items()}

    def __call__(self) -> tuple[Task, Prompt] | None:
        return self._next(again=self.version >= self.first_version and self._given_in_step < self.config.max_groups)

    def as_before(self, attempt: int) -> tuple[Task, Prompt] | None:
        """Return the next task of a replayed journal: re-rolled if it had such an `attempt`, whatever the settings."""
        return self._next(again=attempt >= ATTEMPT)

    def _next(self, *, again: bool) -> tuple[Task, Prompt] | None:
        if again and self._queue:
            task, prompt = self._queue.pop(next(iter(self._queue)))
            self.given += 1
            self._given_in_step += 1
            return replace(task, attempt=task.attempt + ATTEMPT), prompt
        return self.next_task()

    def on_step(self, trained: Iterable[Group], version: int) -> None:
        """Queue the failed tasks of a step, after which the trainer is at `version`."""
        self.version, self._given_in_step = version, 0
        for group in trained:
            self.look(group)

    def look(self, group: Group) -> None:
        """Queue the task of a group, trained or dropped by a filter, if it failed."""
        if not self.config.max_groups:
            return
        if group.group_id in self._looked_at:
            self._looked_at.remove(group.group_id)
            return
        failed = has_failed(group, self.config.failed_at_most)
        self.solved += group.task.attempt >= ATTEMPT and not failed
        if not failed or group.task.task_id in self._queue:
            return
        if len(self._queue) < self.config.size:
            self._queue[group.task.task_id] = (group.task, group.prompt)
            self.queued += 1
        else:
            self.dropped += 1

    def on_roll_back(self, version: int, held_again: Iterable[int]) -> None:
        """Set the version back, and ignore the next result of these groups, which are trained again."""
        self.on_step([], version)
        self._looked_at.update(held_again)

    def metrics(self) -> dict[str, float]:
        """Return the metrics `reroll/...`; {} if re-roll is off."""
        if not self.config.max_groups:
            return {}
        return {
            "reroll/size": len(self),
            "reroll/queued": self.queued,
            "reroll/given": self.given,
            "reroll/solved": self.solved,
            "reroll/dropped": self.dropped,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return JSON: the queue and the counters."""
        return {
            "queue": [
                [task.to_json(), list(prompt.ids), *prompt.media_to_json().values()]
                for task, prompt in self._queue.values()
            ],
            "looked_at": sorted(self._looked_at),
            "version": self.version,
            "given_in_step": self._given_in_step,
            "queued": self.queued,
            "given": self.given,
            "solved": self.solved,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any], max_prompt_tokens: int) -> None:
        """Restore `state`. Tasks beyond `config.size`, or with a prompt above `max_prompt_tokens`, are dropped."""
        self.version, self._given_in_step = state["version"], state["given_in_step"]
        self.given, self.solved, self.dropped = state["given"], state["solved"], state["dropped"]
        # Absent in a checkpoint of an earlier version: queued, looked_at.
        self.queued, self._looked_at = state.get("queued", 0), set(state.get("looked_at", ()))
        self._queue = {}
        for saved, *of_prompt in state["queue"]:
            prompt = Prompt.of(*of_prompt)
            if len(self._queue) < self.config.size and len(prompt) <= max_prompt_tokens:
                task = Task.from_json(saved)
                self._queue[task.task_id] = (task, prompt)
            else:
                self.dropped += 1
