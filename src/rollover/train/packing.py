"""Packing: samples -> micro-batches of flattened rows, and the way back from the row to [B, T].

Shapes: N tokens of the flattened row, M loss positions of it, B samples, T longest response.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rollover.types import Sample


def split_groups(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Minibatches: whole groups, in order, as evenly as can be."""
    ids = list(dict.fromkeys(s.group_id for s in samples))
    chunks = [set(c.tolist()) for c in np.array_split(np.asarray(ids), parts) if len(c)]
    return [[s for s in samples if s.group_id in chunk] for chunk in chunks]


def micro_batches(samples: list[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    """Greedy, in order, by prompt + response tokens; a sample longer than max_tokens is alone.

    Samples without a loss token are left out: they are part of baselines only.
    """
    current: list[Sample] = []
    used = 0
    for sample in samples:
        if not sample.mask.any():
            continue
        length = len(sample.prompt_ids) + len(sample.token_ids)
        if current and used + length > max_tokens:
            yield current
            current, used = [], 0
        current.append(sample)
        used += length
    if current:
        yield current


@dataclass(frozen=True)
class Packed:
    """Tensors of one micro-batch. Position i of the row predicts token i + 1 of its sequence.

    input_ids_N, position_ids_N: the row. loss_positions_M: row positions whose next token is in the loss.
    targets_M, temperature_M: those tokens. rows_M, columns_M: their place in [B, T]. The *_BT streams are padded
    with 0.
    """

    lengths: list[int]
    input_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    loss_positions_M: torch.Tensor
    targets_M: torch.Tensor
    temperature_M: torch.Tensor
    rows_M: torch.Tensor
    columns_M: torch.Tensor
    mask_BT: torch.Tensor
    behavior_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor

    def unpack(self, values_M: torch.Tensor) -> torch.Tensor:
        """[M] -> [B, T], 0 outside the loss. Differentiable."""
        out_BT = torch.zeros(self.mask_BT.shape, dtype=values_M.dtype, device=values_M.device)
        return out_BT.index_put((self.rows_M, self.columns_M), values_M)


def pack(samples: list[Sample], device: torch.device) -> Packed:
    """Flatten the samples into one row, each without its last token (it predicts nothing)."""
    rows, positions, loss_at, lengths = [], [], [], []
    offset = 0
    for s in samples:
        assert len(s.prompt_ids), f"rollout {s.rollout_id} has an empty prompt: nothing predicts its first token"
        ids = np.concatenate([s.prompt_ids, s.token_ids])[:-1]
        rows.append(ids)
        positions.append(np.arange(len(ids)))
        loss_at.append(offset + len(s.prompt_ids) - 1 + np.flatnonzero(s.mask))
        lengths.append(len(ids))
        offset += len(ids)
    width = max(len(s.token_ids) for s in samples)

    def padded(arrays: list[np.ndarray], dtype: type) -> torch.Tensor:
        out = np.zeros((len(arrays), width), dtype=dtype)
        for i, a in enumerate(arrays):
            out[i, : len(a)] = a
        return torch.from_numpy(out).to(device)

    def flat(arrays: list[np.ndarray], dtype: type = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device)

    masks = [s.mask for s in samples]
    return Packed(
        lengths=lengths,
        input_ids_N=flat(rows),
        position_ids_N=flat(positions),
        loss_positions_M=flat(loss_at),
        targets_M=flat([s.token_ids[s.mask] for s in samples]),
        temperature_M=flat([np.full(int(s.mask.sum()), s.temperature) for s in samples], np.float32),
        rows_M=flat([np.full(int(m.sum()), i) for i, m in enumerate(masks)]),
        columns_M=flat([np.flatnonzero(m) for m in masks]),
        mask_BT=padded(masks, np.bool_),
        behavior_logprobs_BT=padded([s.behavior_logprobs * s.mask for s in samples], np.float32),
        advantages_BT=padded([s.advantages for s in samples], np.float32),
    )
