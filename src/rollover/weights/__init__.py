"""Transports of weights from the trainer to an engine: common parts. No torch: remote engines import this too.

    engine/embedded/runner.py   into the model of an engine in this process
    shared_file.py              to an engine in a child process
    weights_file.py             to servers

After `write` the trainer may change its tensors: the engine has the written values, or can read them. Resources of
earlier versions are freed by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights of one version in a file. `num_bytes`: written bytes. `message` (JSON): where the engine reads."""

    version: int
    num_bytes: int
    message: dict[str, Any]


class WeightHolder(Protocol):
    """A part of an engine's model that stores some weights in another form: packed ones, adapters."""

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        """Replace this weight, and return the bytes written; None if it is not stored here."""
        ...

    def refresh(self) -> None:
        """Recompute derived tensors after all weights of a version were replaced."""
        ...
