"""Packing: samples -> micro-batches of flattened rows with their streams [B, T].

Shapes: N tokens of the flattened row, M loss positions of it, B samples, T longest response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollover.algorithms.token_batch import TokenBatch
from rollover.models.attention import Spans
from rollover.models.load import ModelLimits
from rollover.models.vision import ImagePlaces, ImageTokens, Vision, image_places, joined_positions
from rollover.types import Media, Prompt, Sample

_PromptKey = tuple[int, bytes, tuple[Media, ...]]


def micro_batches(samples: list[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    """Yield micro-batches whose rows have at most `max_tokens` tokens, filled greedily in order.

    A longer sample is alone. Siblings with equal prompts share one copy. Samples without a loss token are left out.
    """
    current: list[Sample] = []
    prompts: set[_PromptKey] = set()
    used = 0
    for sample in samples:
        if not sample.mask.any():
            continue
        prompt = _prompt_key(sample)
        length = len(sample.token_ids) + (0 if prompt in prompts else len(sample.prompt_ids))
        if current and used + length > max_tokens:
            yield current
            current, used, length = [], 0, len(sample.token_ids) + len(sample.prompt_ids)
            prompts.clear()
        current.append(sample)
        prompts.add(prompt)
        used += length
    if current:
        yield current


def row_tokens(samples: list[Sample]) -> int:
    """Return the row length of these samples, as `micro_batches` counts it."""
    prompts = {_prompt_key(s): len(s.prompt_ids) for s in samples}
    return sum(prompts.values()) + sum(len(s.token_ids) for s in samples)


@dataclass(frozen=True, kw_only=True)
class PackedBatch(TokenBatch):
    """A TokenBatch with the row that a model reads: each prompt of a group once, before its first answer.

    lengths: of the blocks. prefixes: the prompt's block of each answer's block, None for a prompt (PackedAttention).
    input_ids_N, position_ids: the row, its positions [N] or [3, N]. images: its image tokens. bidirectional: as in
    PackedAttention. loss_positions_M: row positions whose next token is in the loss.
    targets_M, temperature_M: those next tokens. rows_M, columns_M: their place in [B, T]. unit: all temperatures are 1.
    """

    lengths: list[int]
    prefixes: list[int | None]
    input_ids_N: torch.Tensor
    position_ids: torch.Tensor
    images: list[ImageTokens]
    bidirectional: dict[int, Spans]
    loss_positions_M: torch.Tensor
    targets_M: torch.Tensor
    temperature_M: torch.Tensor
    unit: bool
    rows_M: torch.Tensor
    columns_M: torch.Tensor

    def unpack(self, values_M: torch.Tensor) -> torch.Tensor:
        """Scatter [M] to [B, T], 0 outside the loss. Differentiable."""
        out_BT = torch.zeros(self.mask_BT.shape, dtype=values_M.dtype, device=values_M.device)
        return out_BT.index_put((self.rows_M, self.columns_M), values_M)

    def in_loss(self, name: str) -> torch.Tensor:
        """Return the stream of that name at the loss tokens [M]."""
        return self.stream(name)[self.rows_M, self.columns_M]


def pack(samples: list[Sample], device: torch.device, limits: ModelLimits, vision: Vision | None = None) -> PackedBatch:
    """Flatten the samples, with all their streams, into one row.

    The last token of an answer is left out, as it predicts nothing. The first one is predicted from the last position
    of its prompt, which siblings with an equal prompt share. ValueError for samples that the model cannot take: they
    may come from recorded rollouts or a custom producer. `vision`: for models that take images.
    """
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    loss_at: list[np.ndarray] = []
    prefixes: list[int | None] = []
    offset = 0
    images: list[ImageTokens] = []
    bidirectional: dict[int, Spans] = {}
    prompts: dict[_PromptKey, tuple[int, int, ImagePlaces]] = {}

    def add_block(tokens: np.ndarray, start: int, shown: ImagePlaces, prefix: int | None) -> None:
        """Tokens [start, start + n) of a rollout become a block at `offset`."""
        nonlocal offset, images
        end = start + len(tokens)
        images += shown.tokens(start, end, offset)
        if spans := shown.spans(start, end):
            bidirectional[len(rows)] = spans
        rows.append(tokens)
        positions.append(shown.positions(start, end))
        prefixes.append(prefix)
        offset += len(tokens)

    for s in samples:
        limits.check(s.rollout_id, s.prompt_ids, s.token_ids)
        num_prompt = len(s.prompt_ids)
        key = _prompt_key(s)
        if key not in prompts:
            prompt = Prompt(tuple(s.prompt_ids.tolist()), key[2]) if key[2] or vision else Prompt()
            shown = image_places(vision, prompt)
            prompts[key] = len(rows), offset + num_prompt, shown
            add_block(s.prompt_ids, 0, shown, None)
        prompt_block, prompt_end, shown = prompts[key]
        if len(s.media) > len(key[2]):
            shown = image_places(vision, Prompt((*s.prompt_ids.tolist(), *s.token_ids.tolist()), s.media))
        predicted = np.flatnonzero(s.mask)
        loss_at.append(np.where(predicted == 0, prompt_end - 1, offset + predicted - 1))
        if len(s.token_ids) > 1:
            add_block(s.token_ids[:-1], num_prompt, shown, prompt_block)

    def flat(arrays: list[np.ndarray], dtype: type = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device)

    masks = [s.mask for s in samples]
    return PackedBatch(
        **vars(token_batch(samples, device)),
        lengths=[len(r) for r in rows],
        prefixes=prefixes,
        input_ids_N=flat(rows),
        position_ids=torch.from_numpy(joined_positions(positions)).to(device),
        images=images,
        bidirectional=bidirectional,
        loss_positions_M=flat(loss_at),
        targets_M=flat([s.token_ids[s.mask] for s in samples]),
        temperature_M=flat([np.full(int(s.mask.sum()), s.temperature) for s in samples], np.float32),
        unit=all(s.temperature == 1 for s in samples),
        rows_M=flat([np.full(int(m.sum()), i) for i, m in enumerate(masks)]),
        columns_M=flat([np.flatnonzero(m) for m in masks]),
    )


def token_batch(samples: Sequence[Sample], device: torch.device | str = "cpu") -> TokenBatch:
    """Make a TokenBatch of the samples and all their streams, integers as int64, the rest as float32."""
    return TokenBatch(
        mask_BT=padded([s.mask for s in samples], np.bool_).to(device),
        streams={name: _stream(samples, name).to(device) for name in samples[0].streams},
        group_B=torch.tensor([s.group_id for s in samples]),
        sequences=[s.sequence_id for s in samples],
    )


def _stream(samples: Sequence[Sample], name: str) -> torch.Tensor:
    whole = [s.streams[name] for s in samples]
    masked = [np.where(s.mask, values, 0) for s, values in zip(samples, whole, strict=True)]
    return padded(masked, np.int64 if np.issubdtype(whole[0].dtype, np.integer) else np.float32)


def padded(arrays: Sequence[np.ndarray], dtype: type = np.float32) -> torch.Tensor:
    """Stack arrays as [B, T] on the CPU, padded with 0 (False) on the right."""
    out = np.zeros((len(arrays), max(map(len, arrays))), dtype)
    for row, values in enumerate(arrays):
        out[row, : len(values)] = values
    return torch.from_numpy(out)


def _prompt_key(sample: Sample) -> _PromptKey:
    """Return a key that is equal for samples that share one copy of their prompt in a row."""
    num = len(sample.prompt_ids)
    return sample.group_id, sample.prompt_ids.tobytes(), tuple(m for m in sample.media if m.offset < num)
