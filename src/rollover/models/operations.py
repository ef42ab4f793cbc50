"""Operations of a Llama-shaped decoder between its matmuls, in torch; models/kernels.py has them compiled.

Shapes: N tokens, E hidden size, I inner size of the MLP, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Norm:
    """Weight (float32) and epsilon of a module's RMS norm. Call `reload` after a change of the module's weight."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.eps: float = module.variance_epsilon
        self.reload()

    def reload(self) -> None:
        self.weight = self._module.weight.detach().float().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Operations(Protocol):
    """The operations; float32 inside, `dtype` is that of the matmuls."""

    def add_norm(self, x_NE: torch.Tensor, y_NE: torch.Tensor | None, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
        """Add y to x in place; return the norm of x in `dtype`."""
        ...

    def rotate(
        self,
        query_key_value: torch.Tensor,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
        norms: tuple[Norm, Norm] | None,
        heads: int,
        kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated queries [N, H, D] and keys [N, K, D] of rows [H + K + K heads of D]."""
        ...

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of rows [gate, up], [N, I]."""
        ...


class TorchOperations:
    """The operations in plain torch, on any device."""

    def add_norm(self, x_NE: torch.Tensor, y_NE: torch.Tensor | None, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
        if y_NE is not None:
            x_NE += y_NE
        return norm(x_NE).to(dtype)

    def rotate(
        self,
        query_key_value: torch.Tensor,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
        norms: tuple[Norm, Norm] | None,
        heads: int,
        kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num, size = cos_ND.shape
        both = query_key_value.view(num, -1, size)[:, : heads + kv_heads]
        if norms is not None:
            both = torch.cat([norm(x) for norm, x in zip(norms, both.split((heads, kv_heads), 1), strict=True)], 1)
        # Always a copy: it is rotated in place.
        both = both.to(torch.float32, copy=True)
        first, second = both.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        both = both.mul_(cos_ND[:, None]).addcmul_(turned, sin_ND[:, None]).to(query_key_value.dtype)
        return both[:, :heads], both[:, heads:]

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
