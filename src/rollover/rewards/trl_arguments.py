"""The arguments that TRL passes to a reward function beside the columns: trainer_state, log_metric and log_extra.

Import-light: the reward worker imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NAMES = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"})
"""Parameters that only functions of TRL's signature have."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Fields of TRL's `trainer_state` that reward functions read.

    global_step: optimizer updates behind the newest weights that sampled the completion. max_steps: updates of the
    whole run. epoch: passes over the data before the one that the task belongs to. num_train_epochs: passes that the
    data permits. log_history is empty. The defaults are those of the call at start-up.
    """

    global_step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    num_train_epochs: int = 1
    log_history: list[Any] = field(default_factory=list)


class Logged:
    """The values that one call logs with `log_metric` and `log_extra`, by completion."""

    def __init__(self, num_completions: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(num_completions)]

    def log_metric(self, name: str, value: float) -> None:
        self.log_extra(name, [float(value)] * len(self.rows))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """ValueError unless there is a value for each completion."""
        if len(values) != len(self.rows):
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {len(self.rows)} completions")
        for row, value in zip(self.rows, values, strict=True):
            row[column] = value
