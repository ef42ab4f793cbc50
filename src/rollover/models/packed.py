"""Faster linear layers: weights in oneDNN's blocked layout, and the output layer in bfloat16 (ShiftedHead).

Shapes: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

_COMMON_TOKENS = 1024
_SHIFT_COLUMNS = 32  # one is used: the others keep the inner dimension a multiple of the matmul's blocks


class PackedWeight:
    """A linear layer's weight [out, in] in oneDNN's blocked layout: a third less time a decode step (docs/log.md)."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, rows: int) -> None:
        self.bias_O = bias_O
        self.rows = rows  # the layout is optimal for this number of rows; any number works
        self.load(weight_OI)

    @staticmethod
    def supported(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether oneDNN supports it. bfloat16 without hardware support would be slower."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def load(self, weight_OI: torch.Tensor) -> None:
        """Replace the weight."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), self.rows)

    def plain(self) -> torch.Tensor:
        """Return the weight [out, in] as it was loaded."""
        return self.packed.to_dense()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_NI, self.packed, self.bias_O, "none", [], "")


class ShiftedHead:
    """Logits of bfloat16 weights at bfloat16's speed, minus a guess of each token's largest one. Without autograd.

    A bfloat16 matmul sums in float32 and rounds the sum to 8 bits: a logit of 30 is off by up to 0.06, too much for
    log-probs. So the weight gets a column of ones, and the hidden state minus the guess: the sums near the largest are
    near 0, where bfloat16 is precise. The guess is the largest logit among the first tokens of the vocabulary, the
    commonest ones; a softmax does not depend on it. Measured on SmolLM2 (docs/log.md): 0.5 from the largest logit in
    the mean, log-probs as good as from float32 logits of the same hidden state, in half the time.

    `rows`: pack the weights for about this many tokens at a time; None leaves them plain, for weights that change soon.
    """

    def __init__(self, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, rows: int | None) -> None:
        vocab, self.hidden_size = weight_VE.shape
        augmented = weight_VE.new_zeros(vocab, self.hidden_size + _SHIFT_COLUMNS)
        augmented[:, : self.hidden_size] = weight_VE
        augmented[:, self.hidden_size] = 1
        if rows is not None and PackedWeight.supported(weight_VE.device, weight_VE.dtype):
            self._all = PackedWeight(augmented, bias_V, rows)
            self._common = PackedWeight(weight_VE[:_COMMON_TOKENS], None, rows)
        else:
            self._all = partial(F.linear, weight=augmented, bias=bias_V)
            self._common = partial(F.linear, weight=weight_VE[:_COMMON_TOKENS])

    def __call__(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] in bfloat16, each row minus a constant."""
        narrow_NE = hidden_NE.to(torch.bfloat16)
        shifted = narrow_NE.new_zeros(narrow_NE.shape[0], self.hidden_size + _SHIFT_COLUMNS)
        shifted[:, : self.hidden_size] = narrow_NE
        shifted[:, self.hidden_size] = -self._common(narrow_NE).amax(-1)
        return self._all(shifted)


def float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right of matrices, or of batches of them [B, ., .], in float32 without rounding.

    CUDA's matmul of bfloat16 can return its float32 sums; elsewhere the factors are converted.
    """
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type in ("cpu", "mps"):
        return left.float() @ right.float()
    product = torch.mm if left.ndim == 2 else torch.bmm
    return product(left, right, out_dtype=torch.float32)
