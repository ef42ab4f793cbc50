"""transformers' TrainerCallbacks, and the TrainerState with the log history by TRL's metric names.

Callbacks run between steps. A callback for an event that does not happen here is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollover.config import ConfigError
from rollover.plugins.trl.arguments import RunArguments
from rollover.plugins.trl.config import GRPOConfig

EVENTS = ("on_init_end", "on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_log", "on_evaluate")
# TRL's name -> ours
_NAMES = {
    "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "reward": "reward/mean",
    "reward_std": "reward/std", "frac_reward_zero_std": "groups/zero_variance", "entropy": "entropy",
    "kl": "kl/reference", "clip_ratio/region_mean": "clip_fraction", "completions/mean_length": "length/mean",
    "completions/max_length": "length/max", "completions/clipped_ratio": "length/truncated",
    "num_tokens": "tokens/generated", "step_time": "time/step_s",
}  # fmt: skip
_LAST = ("num_tokens", "learning_rate")


class Callbacks:
    """The callbacks in order. `args.logging_steps`: the interval of history entries."""

    def __init__(self, callbacks: Sequence[Any], args: GRPOConfig, arguments: RunArguments) -> None:
        from transformers import TrainerControl, TrainerState

        self._args, self._arguments = args, arguments
        self.state = TrainerState(
            max_steps=arguments.num_steps * arguments.updates, num_train_epochs=round(args.num_train_epochs),
            is_local_process_zero=True, is_world_process_zero=True, logging_steps=max(1, round(args.logging_steps)),
        )  # fmt: skip
        self._control = TrainerControl()
        self._callbacks: list[Any] = []
        self._rows: list[Mapping[str, Any]] = []
        for callback in callbacks:
            self.add(callback)
        self.notify("on_init_end")

    @property
    def wants_to_stop(self) -> bool:
        return self._control.should_training_stop

    def add(self, callback: Any) -> None:
        """Add a callback. ConfigError if it needs an event that does not happen here."""
        from transformers import TrainerCallback

        callback = callback() if isinstance(callback, type) else callback
        own = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in EVENTS]
        for name in own:
            if getattr(type(callback), name, None) not in (None, getattr(TrainerCallback, name)):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__}.{name} would never be called: there are {', '.join(EVENTS)}."
                    " docs/trainer.md has the hooks of a run"
                )
        self._callbacks.append(callback)

    def begin_step(self, number: int) -> None:
        """Begin a training step, which is `updates` steps of TRL."""
        self.notify("on_step_begin")
        self.state.global_step = number * self._arguments.updates
        if self._arguments.steps_of_epoch:
            self.state.epoch = number / self._arguments.steps_of_epoch

    def end_step(self, row: Mapping[str, Any]) -> None:
        """End a training step, and log an entry every logging_steps."""
        self._rows.append(row)
        self.notify("on_step_end")
        every = max(1, round(self._args.logging_steps / self._arguments.updates))
        wanted = len(self._rows) >= every or (self._args.logging_first_step and not self.state.log_history)
        if (wanted or row["step"] == self._arguments.num_steps) and self._args.logging_strategy != "no":
            self.log(history_entry(self._rows, self._arguments.reward_names))
            self._rows = []

    def log(self, entry: dict[str, Any]) -> None:
        """Append an entry to the history."""
        entry = entry | {"step": self.state.global_step, "epoch": self.state.epoch}
        self.state.log_history.append(entry)
        self.notify("on_log", logs=entry)

    def notify(self, event: str, **further: Any) -> None:
        """Call this event's method of all callbacks."""
        for callback in self._callbacks:
            control = getattr(callback, event)(self._args, self.state, self._control, **further)
            self._control = self._control if control is None else control


def history_entry(rows: Sequence[Mapping[str, Any]], rewards: Sequence[str]) -> dict[str, Any]:
    """Return an entry of log_history: means over the steps `rows`. rewards: names of the reward functions."""
    names = dict(_NAMES)
    if len(rewards) == 1:
        names[f"rewards/{rewards[0]}/mean"] = "reward/mean"
    names |= {f"rewards/{name}/mean": f"reward/extra/{name}" for name in rewards if len(rewards) > 1}
    known = set(names.values())
    names |= {
        key.removeprefix("reward/extra/"): key for row in rows for key in row
        if key.startswith("reward/extra/") and key not in known
    }  # fmt: skip
    entry: dict[str, Any] = {}
    for theirs, ours in names.items():
        found = [row[ours] for row in rows if isinstance(row.get(ours), int | float) and math.isfinite(row[ours])]
        if found:
            entry[theirs] = found[-1] if theirs in _LAST else sum(found) / len(found)
    return entry


def evaluation_entry(row: Mapping[str, Any], prefix: str = "eval") -> dict[str, Any]:
    """Return an evaluation's numbers by TRL's names; the mean score is `eval_reward`."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {f"{prefix}_{'reward' if name == 'mean' else name}": value for name, value in numbers.items()}
