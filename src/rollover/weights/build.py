"""The weight transports by name. Both ends find theirs here: the trainer's by `build_transport`, the engine's by
`received`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollover.weights.in_place import InPlace
from rollover.weights.protocol import TransportSetup, WeightTransport
from rollover.weights.shared_file import SharedFile
from rollover.weights.weights_file import WeightsFile

if TYPE_CHECKING:
    import torch

TRANSPORTS: dict[str, type[WeightTransport]] = {
    "in_place": InPlace,
    "shared_file": SharedFile,
    "weights_file": WeightsFile,
}


def build_transport(name: str, setup: TransportSetup) -> WeightTransport:
    """The trainer's end of the transport of this name."""
    return TRANSPORTS[name](setup)


def received(message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parcel, in the engine's process: see WeightTransport.receive."""
    return TRANSPORTS[message["transport"]].receive(message)
