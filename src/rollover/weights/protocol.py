"""What the ways of weights to an engine share. No torch: an engine elsewhere imports this too.

    in_place.py      into the model of an engine in this process
    shared_file.py   to an engine in a child process
    weights_file.py  to servers

When `send` returns, the trainer may change its tensors: the engine has the values that they had, or can get them. What
an earlier version needed, and this one does not, is given back by then.
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
    """Weights that were sent. `num_bytes` were moved to send them.

    `message` (JSON) tells the engine's end where they are.
    """

    version: int
    num_bytes: int
    message: dict[str, Any]


class WeightHolder(Protocol):
    """A part of an engine's model that keeps some weights in a form of its own: packed ones, adapters."""

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        """Replace this weight, and return the bytes written; None if it is not held here."""
        ...

    def refresh(self) -> None:
        """All weights of a version were replaced: compute what is derived from them again."""
        ...
