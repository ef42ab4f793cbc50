"""Into the model of an engine in this process: weights are copied to where they are used, and there is no way between.

Owns where each weight of that model is. Never runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollover.weights.protocol import Holder, NamedTensors

if TYPE_CHECKING:
    import torch


class InPlace:
    """The way into `model`: its holders are asked first, the rest are its parameters."""

    def __init__(self, model: Any, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def send(self, tensors: NamedTensors) -> int:
        """Write weights, and return their bytes. AssertionError for a weight that the model does not have."""
        import torch

        with torch.no_grad():
            num_bytes = sum(self._write(name, tensor) for name, tensor in tensors)
            for holder in self._holders:
                holder.refresh()
        return num_bytes

    def _write(self, name: str, tensor: torch.Tensor) -> int:
        for holder in self._holders:
            if (written := holder.load(name, tensor)) is not None:
                return written
        parameter = self._parameters.get(name)
        assert parameter is not None, f"the engine's model has no parameter {name}"
        parameter.copy_(tensor)
        return parameter.numel() * parameter.element_size()
