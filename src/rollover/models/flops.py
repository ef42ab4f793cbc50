"""Model FLOPs: the multiplications and additions of the matrix products that a pass needs, whatever computes it.

Counted as Chowdhery et al. 2022 do for MFU (PaLM, arXiv 2204.02311, appendix B), but exactly instead of with means:

    forward    2 x weights of the linear layers x tokens + 2 x hidden x vocabulary x logits
               + 4 x heads x head size x pairs
    backward   as much again for the gradient of every product's input, and once more for that of every trained weight;
               attention: twice the forward pass
    pairs      (query, key) that may look at each other, over all layers: causal, within the window

So a full training pass is 3 forward passes (the 6 x parameters x tokens of the paper), and with LoRA, whose frozen
weights get no gradient, about 2. Of a mixture of experts those count that a token goes through. What is computed twice
to save memory (gradient checkpointing, logits, scores) counts once; norms, rotations, softmax and the optimizer not at
all. With LoRA the gradients before the first adapter are counted, too, though they are not needed.

`peak_flops` gives what a device computes at best: the denominator of MFU. It is configured, known by the device's name
(bfloat16), or measured.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollover.models.attention import attention_widths
from rollover.models.devices import synchronize
from rollover.models.vision import takes_images, tower_parameters

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")


def visible_pairs(lengths: Sequence[int], prefixes: Sequence[int | None] | None, window: int | None) -> int:
    """Count the (query, key) pairs of a row of blocks (models/attention.py's PackedAttention)."""
    before = [0 if prefix is None else lengths[prefix] for prefix in prefixes or [None] * len(lengths)]
    return sum(_pairs(start, start + length, window) for start, length in zip(before, lengths, strict=True))


def _pairs(start: int, end: int, window: int | None) -> int:
    """Count the pairs of queries at positions [start, end) of a sequence with all keys up to each."""
    if window is None:
        return (end * (end + 1) - start * (start + 1)) // 2
    short = min(max(window, start), end)  # from here on a query sees `window` keys
    return _pairs(start, short, None) + (end - short) * window


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of passes of one model.

    `linear`, `linear_trained`: weights of linear layers per token, and the trained ones; `head`, `head_trained`: the
    same of the output layer. `widths`: heads x head size, summed over the layers with this window (None: without one).
    """

    linear: float
    linear_trained: float
    head: float
    head_trained: float
    widths: dict[int | None, int]

    @classmethod
    def from_model(cls, model: Any) -> ModelFlops:
        """Count the weights of a Hugging Face causal LM, adapters included; before an engine packs them."""
        head = model.get_output_embeddings()
        head = getattr(head, "base_layer", head).weight
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {id(head)}
        config = model.config.get_text_config()
        share, num_experts = _active_experts(config)
        linear = trained = 0.0
        # An image goes through its tower once, whatever its tokens (models/vision.py counts that).
        tower = {id(p) for _, p in tower_parameters(model)} if takes_images(model.config) else set[int]()
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or id(parameter) in embeddings or parameter is head or id(parameter) in tower:
                continue
            of_experts = (
                parameter.ndim == 3 and parameter.shape[0] == num_experts or re.search(r"\.experts\.\d+\.", name)
            )
            numbers = parameter.numel() * (share if of_experts else 1.0)
            linear += numbers
            trained += numbers if parameter.requires_grad else 0.0
        return cls(linear, trained, head.numel(), head.numel() if head.requires_grad else 0.0, attention_widths(model))

    def forward(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None, num_logits: int) -> float:
        """Return the FLOPs of a packed row of these blocks, with logits at `num_logits` positions."""
        return 2 * (self.linear * sum(lengths) + self.head * num_logits) + self._attention(lengths, prefixes)

    def backward(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None, num_logits: int) -> float:
        """Return the FLOPs of the backward pass of the same row."""
        numbers = (self.linear + self.linear_trained) * sum(lengths) + (self.head + self.head_trained) * num_logits
        return 2 * numbers + 2 * self._attention(lengths, prefixes)

    def continued(self, spans: Sequence[tuple[int, int]], num_logits: int) -> float:
        """Return the FLOPs of a pass over positions [start, end) of sequences with a cached prefix."""
        tokens = sum(end - start for start, end in spans)
        pairs = {window: sum(_pairs(start, end, window) for start, end in spans) for window in self.widths}
        attention = sum(4 * width * pairs[window] for window, width in self.widths.items())
        return 2 * (self.linear * tokens + self.head * num_logits) + attention

    def _attention(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None) -> float:
        return sum(4 * width * visible_pairs(lengths, prefixes, window) for window, width in self.widths.items())


def _active_experts(config: Any) -> tuple[float, int]:
    """Return (share of a layer's experts per token, number of experts); (1, 0) without experts."""
    num = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
    active = next((n for name in _EXPERTS_A_TOKEN if (n := getattr(config, name, None))), 0)
    return (active / num, num) if num and active else (1.0, 0)


# Dense bfloat16 with float32 sums, TFLOP/s, without sparsity, from the vendors' data sheets. The first entry in the
# device's name counts.
_BF16_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200 NVL", 835.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H800", 989.4),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
)
_SECONDS = 0.02  # of one measurement, approximately
_TRIES = 5


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a device of this name; None if it is not in the table."""
    if dtype != torch.bfloat16:
        return None
    words = ((re.escape(device), tflops) for device, tflops in _BF16_TFLOPS)
    return next((tflops * 1e12 for words, tflops in words if re.search(rf"(?<!\w){words}(?!\w)", name)), None)


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of the fastest of a few square matrix products, once per process and number of threads.

    A busy machine measures less than its best.
    """
    return _measured(dtype, device, torch.get_num_threads())


@functools.cache
def _measured(dtype: torch.dtype, device: torch.device, num_threads: int) -> float:
    size = 1024 if device.type == "cpu" else 8192
    # No random numbers: a run's come from the same generator.
    left = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)

    def seconds(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, left)
        synchronize(device)
        return time.perf_counter() - started

    seconds(1)
    times = max(1, round(_SECONDS / seconds(1)))
    return 2 * size**3 * times / min(seconds(times) for _ in range(_TRIES))


def peak_flops(device: torch.device, dtype: torch.dtype, given_tflops: float = 0.0) -> float:
    """Return the device's peak FLOP/s in this dtype: as given, else known by name, else measured."""
    if given_tflops:
        return given_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return known_peak(name, dtype) or measured_peak(dtype, device)
