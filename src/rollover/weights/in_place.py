"""Into the model of an engine in this process: weights are copied to where they are used, and there is no way between.

Owns where each weight of that model is. Never runs the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollover.weights.protocol import NamedTensors, Parcel, TransportSetup

if TYPE_CHECKING:
    import torch


class InPlace:
    """A WeightTransport into `setup.model`: its holders are asked first, the rest are parameters of the model."""

    def __init__(self, setup: TransportSetup) -> None:
        self._holders = setup.holders
        self._parameters = dict(setup.model.named_parameters(remove_duplicate=False))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Nothing: the model has its room."""

    def send(self, version: int, tensors: NamedTensors) -> Parcel:
        """See WeightTransport. AssertionError for a weight that the model does not have."""
        import torch

        with torch.no_grad():
            num_bytes = sum(self._write(name, tensor) for name, tensor in tensors)
            for holder in self._holders:
                holder.refresh()
        return Parcel(version, num_bytes, {"transport": "in_place", "version": version})

    def _write(self, name: str, tensor: torch.Tensor) -> int:
        for holder in self._holders:
            if (written := holder.load(name, tensor)) is not None:
                return written
        parameter = self._parameters.get(name)
        assert parameter is not None, f"the engine's model has no parameter {name}"
        parameter.copy_(tensor)
        return parameter.numel() * parameter.element_size()

    def everything(self) -> None:
        """Nothing is kept: the model ends with this process."""

    @staticmethod
    def receive(message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: all of it is there."""
        return iter(())

    def close(self) -> None:
        """Forget the model."""
        self._parameters, self._holders = {}, ()
