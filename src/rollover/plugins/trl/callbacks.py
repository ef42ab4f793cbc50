"""transformers' TrainerCallbacks, told between steps; and the TrainerState that they, and the script, read.

Owns the state and the log history. A callback that needs an event which does not happen here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollover.config import ConfigError
from rollover.plugins.trl.arguments import Run
from rollover.plugins.trl.config import GRPOConfig
from rollover.plugins.trl.history import of_steps

TOLD = ("on_init_end", "on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_log", "on_evaluate")


class Callbacks:
    """The callbacks, in their order. `args`: its logging_steps say how often there is an entry of the history."""

    def __init__(self, callbacks: Sequence[Any], args: GRPOConfig, what: Run) -> None:
        from transformers import TrainerControl, TrainerState

        self._args, self._what = args, what
        self.state = TrainerState(
            max_steps=what.num_steps * what.updates, num_train_epochs=round(args.num_train_epochs),
            is_local_process_zero=True, is_world_process_zero=True, logging_steps=max(1, round(args.logging_steps)),
        )  # fmt: skip
        self._control = TrainerControl()
        self._callbacks: list[Any] = []
        self._rows: list[Mapping[str, Any]] = []
        for callback in callbacks:
            self.add(callback)
        self.tell("on_init_end")

    @property
    def wants_to_stop(self) -> bool:
        return self._control.should_training_stop

    def add(self, callback: Any) -> None:
        """ConfigError for one that needs an event which does not happen here."""
        from transformers import TrainerCallback

        callback = callback() if isinstance(callback, type) else callback
        own = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in TOLD]
        for name in own:
            if getattr(type(callback), name, None) not in (None, getattr(TrainerCallback, name)):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__}.{name} would never be called: there are {', '.join(TOLD)}."
                    " docs/trainer.md has the hooks of a run"
                )
        self._callbacks.append(callback)

    def begin_step(self, number: int) -> None:
        """A training step, of `updates` steps of TRL's, is about to be told of."""
        self.tell("on_step_begin")
        self.state.global_step = number * self._what.updates
        if self._what.steps_of_epoch:
            self.state.epoch = number / self._what.steps_of_epoch

    def end_step(self, row: Mapping[str, Any]) -> None:
        """Its row; every logging_steps an entry of the history."""
        self._rows.append(row)
        self.tell("on_step_end")
        every = max(1, round(self._args.logging_steps / self._what.updates))
        wanted = len(self._rows) >= every or (self._args.logging_first_step and not self.state.log_history)
        if (wanted or row["step"] == self._what.num_steps) and self._args.logging_strategy != "no":
            self.log(of_steps(self._rows, self._what.reward_names))
            self._rows = []

    def log(self, entry: dict[str, Any]) -> None:
        """An entry of the history."""
        entry = entry | {"step": self.state.global_step, "epoch": self.state.epoch}
        self.state.log_history.append(entry)
        self.tell("on_log", logs=entry)

    def tell(self, event: str, **further: Any) -> None:
        """Call this event of all."""
        for callback in self._callbacks:
            control = getattr(callback, event)(self._args, self.state, self._control, **further)
            self._control = self._control if control is None else control
