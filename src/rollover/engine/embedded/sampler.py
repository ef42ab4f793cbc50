"""The draw: one uniform number per token, from a counter; the inverse of the distribution's cumulative sum.

Shapes: B rows, V vocabulary. A row's result depends on its own logits and uniform only, never on who shares the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from rollover.models.devices import widest_float
from rollover.models.kernels import Kernels
from rollover.types import SamplingParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256


def uniforms(seeds: Seq[int], indices: Seq[int]) -> np.ndarray:
    """Uniform doubles in [0, 1): SplitMix64 (Steele et al. 2014) of seed at counter index. One per row."""
    with np.errstate(over="ignore"):
        z = np.asarray(seeds, dtype=np.uint64) + (np.asarray(indices, dtype=np.uint64) + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _truncate(scaled_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set what top-k, then top-p, then min-p remove to -inf. The likeliest token always stays."""
    sorted_BV, order_BV = torch.sort(scaled_BV, dim=-1, descending=True, stable=True)
    if params.top_k > 0:
        sorted_BV[:, params.top_k :] = float("-inf")
    probs_BV = torch.softmax(sorted_BV, dim=-1)
    remove_BV = torch.zeros_like(probs_BV, dtype=torch.bool)
    if params.top_p < 1.0:
        remove_BV |= probs_BV.cumsum(-1) - probs_BV >= params.top_p
    if params.min_p > 0.0:
        remove_BV |= probs_BV < params.min_p * probs_BV[:, :1]
    remove_BV[:, 0] = False
    sorted_BV = sorted_BV.masked_fill(remove_BV, float("-inf"))
    return torch.empty_like(scaled_BV).scatter_(1, order_BV, sorted_BV)


def _draw(scaled_BV: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling from softmax(scaled), in two levels so that no cumulative sum over V is needed."""
    rows, vocab = scaled_BV.shape
    peak_B1, likeliest_B1 = scaled_BV.max(-1, keepdim=True)
    weights_BV = (scaled_BV - peak_B1).exp_()
    if vocab % _BLOCK:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights_BV.view(rows, -1, _BLOCK)
    wide = widest_float(scaled_BV.device)
    cumulative = blocks.sum(-1).to(wide).cumsum(-1)
    total_B1 = cumulative[:, -1:]
    target_B1 = uniforms_B[:, None].to(wide).to(cumulative.device) * total_B1
    block_B1 = torch.searchsorted(cumulative, target_B1, right=True).clamp_(max=blocks.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, cumulative.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block_B1[:, :, None].expand(rows, 1, _BLOCK)).squeeze(1).to(wide).cumsum(-1)
    offset_B1 = torch.searchsorted(inside, target_B1 - before_B1, right=True).clamp_(max=_BLOCK - 1)
    tokens_B1 = block_B1 * _BLOCK + offset_B1
    # Rounding at a block's edge could pick a token of probability 0: take the likeliest one instead.
    tokens_B1 = torch.where(weights_BV.gather(1, tokens_B1) > 0, tokens_B1, likeliest_B1)
    logprobs_B1 = scaled_BV.gather(1, tokens_B1) - peak_B1 - total_B1.log().float()
    return tokens_B1.squeeze(1), logprobs_B1.squeeze(1)


def sample(
    logits_BV: torch.Tensor, params: Seq[SamplingParams], uniforms_B: np.ndarray, kernels: Kernels | None = None
) -> tuple[list[int], list[float]]:
    """Token and behavior log-prob per row, of the distribution really sampled from (temperature, truncation included).

    Greedy rows (temperature 0) sample a point mass: log-prob 0. `kernels` do the same without sorting the vocabulary.
    """
    draws_B = torch.from_numpy(uniforms_B)
    if kernels is not None:
        drawn, drawn_logprobs = kernels.draw(logits_BV, params, draws_B)
        return drawn.tolist(), drawn_logprobs.tolist()
    logits_BV = logits_BV.float()
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, p in enumerate(params):
        rows_of.setdefault(p, []).append(row)
    found: list[torch.Tensor] = []
    for p, rows in rows_of.items():
        part_BV = logits_BV if len(rows) == len(params) else logits_BV[rows]
        if p.temperature == 0:
            part_tokens = part_BV.argmax(-1)
            part_logprobs = torch.zeros_like(part_tokens)
        else:
            scaled_BV = part_BV if p.temperature == 1 else part_BV / p.temperature
            if p.truncated:
                scaled_BV = _truncate(scaled_BV, p)
            part_tokens, part_logprobs = _draw(scaled_BV, draws_B[rows])
        wide = widest_float(part_tokens.device)
        found.append(torch.stack((part_tokens.to(wide), part_logprobs.to(wide))))
    # One transfer from the device; both are exact in either dtype: a token id is below 2^24.
    tokens_B, logprobs_B = torch.cat(found, 1).tolist()
    drawn_rows = [row for rows in rows_of.values() for row in rows]
    tokens, logprobs = [0] * len(params), [0.0] * len(params)
    for row, token, logprob in zip(drawn_rows, tokens_B, logprobs_B, strict=True):
        tokens[row], logprobs[row] = int(token), logprob
    return tokens, logprobs
