"""What a weight transport must do. No torch: an engine elsewhere imports this too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Weights that were sent. `num_bytes` were moved to send them.

    `message` (JSON) tells the engine's end where they are.
    """

    version: int
    num_bytes: int
    message: dict[str, Any]


class Holder(Protocol):
    """A part of an engine's model that keeps some weights in a form of its own: packed ones, adapters."""

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        """Replace this weight, and return the bytes written; None if it is not held here."""
        ...

    def refresh(self) -> None:
        """All weights of a version were replaced: compute what is derived from them again."""
        ...


@dataclass(frozen=True)
class TransportSetup:
    """What a transport is made from: `model` and `holders` of an engine in this process, where there is one.

    `folder`: where a transport that leaves files for other
    machines puts them; empty: it chooses.
    """

    model: Any = None
    holders: Sequence[Holder] = field(default=())
    folder: str = ""


class WeightTransport(Protocol):
    """The trainer's end of the way to one engine; `receive` is the engine's (tests/contract/test_transports.py
    checks every one of the table).

    When `send` returns, the trainer may change its tensors: the engine has the values that they had, or can get them
    by `receive`. What an earlier version needed, and this one does not, is given back by then.
    """

    def __init__(self, setup: TransportSetup) -> None: ...

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take room for tensors of these bytes, so that no later `send` lacks it. ValueError if there is none."""
        ...

    def send(self, version: int, tensors: NamedTensors) -> Parcel:
        """Hand over weights of `version`: all of the model's, or those that have changed."""
        ...

    def everything(self) -> Parcel | None:
        """All that was ever sent, in its last state, for an engine that begins anew; None: nothing was, or nothing is
        kept, as the engine ends with this process."""
        ...

    @staticmethod
    def receive(message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a parcel that this process, the engine's, does not have yet.

        They are views of what is shared: whoever keeps one beyond the next `send` copies it.
        """
        ...

    def close(self) -> None:
        """Give back all that is held."""
        ...
