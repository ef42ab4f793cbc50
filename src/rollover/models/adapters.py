"""Low-rank adapters beside the frozen weights of linear layers, without autograd: out = W x + scale * B A x.

Shapes: N tokens, I inputs, O outputs, R rank (of layers side by side: the sum of theirs).

LoRA (Hu et al. 2021, arXiv 2106.09685). W + scale * B A rounded to bfloat16 is W nearly everywhere while B A is small,
so what was sampled would not be what is trained: the engine computes both products, rounded as the trainer's are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

_PARTS = ("lora_A.weight", "lora_B.weight", "lora_scale")


def names(layer: str) -> tuple[str, str, str]:
    """Return the names of A [R, I], B [O, R] and the scale [] of a layer's adapter, for an engine."""
    down, up, scale = (f"{layer}.{part}" for part in _PARTS)
    return down, up, scale


def base_weights(plain: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named weights of a model without peft's adapters. Views."""
    for name, parameter in plain.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer, or of several whose outputs stand side by side."""

    down_RI: torch.Tensor
    up_OR: torch.Tensor
    scale: float

    @classmethod
    def create(cls, down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> Adapter:
        """Make an adapter. A scale that is a power of two is multiplied into B, without rounding."""
        if math.frexp(scale)[0] == 0.5:
            return cls(down_RI, up_OR * scale, 1.0)
        return cls(down_RI, up_OR, scale)

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self.scaled(F.linear(F.linear(x_NI, self.down_RI), self.up_OR))

    def scaled(self, product_NO: torch.Tensor) -> torch.Tensor:
        """Multiply the product with A and B by the scale."""
        return product_NO if self.scale == 1 else product_NO * self.scale

    @classmethod
    def concatenated(cls, adapters: Sequence[Adapter | None], sizes: Sequence[int]) -> Adapter | None:
        """Return one adapter of layers with `sizes` outputs, some of which may have none; None without any."""
        present = [adapter for adapter in adapters if adapter is not None]
        if not present:
            return None
        (scale,) = {adapter.scale for adapter in present}  # a model's adapters have one rank and one alpha
        down_RI = torch.cat([adapter.down_RI for adapter in present])
        up_OR = down_RI.new_zeros(sum(sizes), len(down_RI))
        row = column = 0
        for adapter, size in zip(adapters, sizes, strict=True):
            if adapter is not None:
                rank = len(adapter.down_RI)
                up_OR[row : row + size, column : column + rank] = adapter.up_OR
                column += rank
            row += size
        return cls(down_RI, up_OR, scale)


class Adapters:
    """The adapters of one model's layers, by layer name. Owns copies in the model's dtype; starts empty.

    `attach`: hook the adapters into all modules of the model. Otherwise the language model's modules get none: the code
    that replaces them applies the adapters.
    """

    def __init__(self, model: Any, *, attach: bool) -> None:
        first = next(model.parameters())
        self._device, self._dtype = first.device, first.dtype
        self._layers = dict(model.named_modules())
        self._unhooked = set[Any]() if attach else set(model.get_decoder().modules())
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._adapters: dict[str, Adapter] = {}

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        """Replace a part of a layer's adapter; return the bytes written, or None if `name` is not an adapter's.

        Call `refresh` after the last one.
        """
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is None:
            return None
        layer = name.removesuffix(f".{part}")
        assert layer in self._layers, f"the engine's model has no layer {layer}"
        if layer not in self._parts and self._layers[layer] not in self._unhooked:
            self._layers[layer].register_forward_hook(partial(self._add, layer))
        # A copy: the trainer changes its tensors in place.
        mine = tensor.detach().to(self._device, self._dtype if tensor.ndim else None, copy=True)
        self._parts.setdefault(layer, {})[part] = mine
        return mine.numel() * mine.element_size()

    def refresh(self) -> None:
        """Apply the loaded parts."""
        for layer, parts in self._parts.items():
            down_RI, up_OR, scale = (parts[part] for part in _PARTS)
            self._adapters[layer] = Adapter.create(down_RI, up_OR, float(scale))

    def get(self, layer: str) -> Adapter | None:
        """Return the adapter of the layer, or None."""
        return self._adapters.get(layer)

    def _add(self, layer: str, module: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return out + self._adapters[layer](inputs[0].to(self._dtype))
