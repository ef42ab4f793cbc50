"""RMS norms of a model in training, by compiled kernels: one pass forward, one backward, out in the matmuls' dtype.

Shapes: N tokens, E hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rollover.models import kernels
from rollover.models.inference import InferenceDecoder


class _RmsNorm(torch.autograd.Function):
    """Zhang and Sennrich 2019 (arXiv 1910.07467): x / rms(x) * weight, of float32 x, in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        compiled = kernels.load()
        out_NE, scales_N = compiled.norm(x_NE, weight_E.float(), eps, weight_E.dtype)
        ctx.save_for_backward(x_NE, weight_E, scales_N)
        return out_NE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NE, weight_E, scales_N = ctx.saved_tensors
        compiled = kernels.load()
        grad_x_NE, grad_weight_E = compiled.norm_backward(grads[0].contiguous(), x_NE, weight_E.float(), scales_N)
        return grad_x_NE, grad_weight_E.to(weight_E.dtype) if ctx.needs_input_grad[1] else None, None


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32 or module.weight.dtype == torch.float32:
        return type(module).forward(module, x)
    rows_NE = x.reshape(-1, x.shape[-1]).contiguous()
    out: Any = _RmsNorm.apply(rows_NE, module.weight, module.variance_epsilon)
    return out.view(x.shape)


def compile_norms(model: Any, dtype: torch.dtype) -> None:
    """Compile the norms whose output goes only to linear layers, if `model` is shaped like Llama and on a CPU.

    `dtype`: of its weights in a pass; shards of ranks may have another one. Autocast would make the same bfloat16
    output for each layer; without it three casts become one.
    """
    first = next(model.parameters())
    if dtype != torch.bfloat16 or not InferenceDecoder.supported(model):
        return
    if kernels.for_device(first.device.type) is None:
        return
    for layer in model.get_decoder().layers:
        for module in (layer.input_layernorm, layer.post_attention_layernorm):
            module.forward = partial(_forward, module)
