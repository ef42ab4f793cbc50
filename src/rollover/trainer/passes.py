"""Packed rows, and the forward passes of one model over them: log-probs, entropies, hidden states of the loss tokens.

    samples ──micro_batches──▶ samples of one row ──pack──▶ PackedBatch: the row, with the samples' streams [B, T]
                                                                └──Passes.forward──▶ [M] ──unpack──▶ [B, T]

Shapes: N row tokens, M loss positions, B samples, T longest response, E hidden size. `Passes` owns the model's limits
and the count of its FLOPs; the policy's backend, the critic and a teacher have one each. The weights may be spread over
ranks (`Sharded`): then all ranks compute equally many micro-batches, and a rank that has fewer computes empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollover.algorithms.token_batch import TokenBatch
from rollover.models.attention import Spans, hidden_states
from rollover.models.flex import packed_attention
from rollover.models.flops import ModelFlops
from rollover.models.load import ModelLimits
from rollover.models.logprobs import Head, TrainedHead, chunked_logprobs, chunked_squares
from rollover.models.threads import Team
from rollover.models.vision import ImagePlaces, ImageTokens, Vision, image_places, joined_positions, tower_modules
from rollover.trainer.backend import Stream
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


# Passes

# An empty micro-batch: a prompt and an answer of one token each.
_EMPTY = Sample("", 0, np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, bool), {}, temperature=1.0)


def set_training(model: torch.nn.Module, on: bool) -> None:
    """Switch gradient checkpointing (transformers does it in training mode only) and LoRA dropout.

    The model's own dropout stays off, as in the engine. So does that of a vision tower's attention, which is not
    checkpointed.
    """
    model.train(on)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" not in name:
            module.eval()
    for name, module in tower_modules(model):
        if "lora_dropout" not in name:
            module.training = False


def _hidden(model: Any, batch: PackedBatch, vision: Vision | None) -> torch.Tensor:
    """Return the last hidden states [M, E] before the loss tokens, in float32."""
    attention = packed_attention(batch.lengths, batch.prefixes, batch.input_ids_N.device, batch.bidirectional)
    images = vision.row(batch.images) if vision is not None else None
    hidden_NE = hidden_states(model, batch.input_ids_N, batch.position_ids, attention, images)
    return hidden_NE.index_select(0, batch.loss_positions_M)


class Policy(torch.nn.Module):
    """The whole way from a row to its log-probs, as one module: all weights are read inside of its forward.

    `model`: a Hugging Face causal LM, adapters in place. `head`: returns its output layer, called in every pass.
    `vision`: its images; None: it takes none.
    """

    def __init__(self, model: Any, head: Callable[[], Head], vision: Vision | None = None) -> None:
        super().__init__()
        self.model, self._head, self.vision = model, head, vision

    def forward(self, batch: PackedBatch, *, squares: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (log-probs [M], entropies [M], hidden states [M, E]) of the loss tokens.

        `squares`: return sums of squared probabilities [M], without a gradient, instead of the hidden states.
        """
        hidden_ME = _hidden(self.model, batch, self.vision)
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_ME, self._head(), batch.targets_M, batch.temperature_M, unit=batch.unit
        )
        if squares:
            return logprobs_M, entropy_M, chunked_squares(hidden_ME, self._head(), batch.temperature_M)
        return logprobs_M, entropy_M, hidden_ME


@dataclass(frozen=True)
class Sharded:
    """A policy whose weights are spread over ranks (ranks/sharded.py).

    `flops`: those of the whole model. `max_over_ranks`: largest of the ranks' arguments; all ranks call it together.
    """

    policy: Policy
    flops: ModelFlops
    max_over_ranks: Callable[[int], int]


class Passes:
    """Passes of `model`, a Hugging Face causal LM with adapters in place. `vision`: its images, or None."""

    def __init__(
        self,
        model: Any,
        team: Team,
        micro_batch_tokens: int,
        sharded: Sharded | None = None,
        vision: Vision | None = None,
    ) -> None:
        self.model, self.team, self.micro_batch_tokens = model, team, micro_batch_tokens
        self.device = next(model.parameters()).device
        self.limits = ModelLimits.from_model(model)
        self.vision = vision if sharded is None else sharded.policy.vision
        self._policy = Policy(model, TrainedHead(model).now, vision) if sharded is None else sharded.policy
        self._of_model = ModelFlops.from_model(model) if sharded is None else sharded.flops
        self._max_over_ranks = None if sharded is None else sharded.max_over_ranks
        self._of_text = 0.0

    @property
    def flops(self) -> float:
        """Model FLOPs so far. Recomputation to save memory counts once, empty micro-batches not at all."""
        return self._of_text + (0.0 if self.vision is None else self.vision.flops)

    def micro_batches(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Yield the micro-batches of `samples`, then empty ones as long as another rank has more."""
        if self._max_over_ranks is None:
            yield from micro_batches(samples, self.micro_batch_tokens)
            return
        own = list(micro_batches(samples, self.micro_batch_tokens))
        num = self._max_over_ranks(len(own))
        yield from own
        yield from ([] for _ in range(num - len(own)))

    def pack(self, micro: list[Sample], *, spare_last: bool = False) -> PackedBatch:
        """Pack a micro-batch on the model's device. ValueError for samples that the model cannot take.

        `spare_last`: a sample may have one token more than the model has positions; its last one is not in the row.
        """
        limits, positions = self.limits, self.limits.positions
        if spare_last and positions is not None:
            limits = replace(limits, positions=positions + 1)
        return pack(micro or [_EMPTY], self.device, limits, self.vision)

    def forward(self, batch: PackedBatch, *, squares: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run `Policy.forward` under the current weights, and count its FLOPs."""
        out = self._policy(batch, squares=squares)
        if batch.sequences != [""]:
            self._of_text += self._of_model.forward(batch.lengths, batch.prefixes, len(batch.targets_M))
        return out

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden states [M, E] before the loss tokens, without the output layer. Not sharded."""
        self._of_text += self._of_model.forward(batch.lengths, batch.prefixes, 0)
        return _hidden(self.model, batch, self.vision)

    def count_backward(self, batch: PackedBatch, *, head: bool = True) -> None:
        """Count the FLOPs of a row's backward pass; `head`: through the output layer, too."""
        num_logits = len(batch.targets_M) if head else 0
        self._of_text += self._of_model.backward(batch.lengths, batch.prefixes, num_logits)

    def logprobs(self, samples: list[Sample]) -> Stream:
        """Return the log-probs of the loss tokens, each at its sample's temperature; no gradient."""
        return self.evaluate(samples, lambda batch: self.forward(batch)[0])

    def statistics(self, samples: list[Sample]) -> Stream:
        """Return log-prob, entropy and sum of squared probabilities [loss tokens, 3]; no gradient."""
        return self.evaluate(samples, lambda batch: torch.stack(self.forward(batch, squares=True), -1))

    @torch.no_grad()
    def evaluate(
        self, samples: list[Sample], what: Callable[[PackedBatch], torch.Tensor], *, spare_last: bool = False
    ) -> Stream:
        """Return rollout_id -> `what` [loss tokens], packed as for training: equal weights and threads give equal bits.

        `spare_last`: see `pack`.
        """
        evaluated: list[Sample] = []
        values: list[torch.Tensor] = []
        for micro in self.micro_batches(samples):
            self.team.assemble()
            of_micro = what(self.pack(micro, spare_last=spare_last))
            if micro:
                values.append(of_micro)
                evaluated += micro
        if not values:
            return {}
        ends = np.cumsum([int(s.mask.sum()) for s in evaluated])
        parts = np.split(torch.cat(values).cpu().numpy(), ends[:-1])
        return {s.rollout_id: part for s, part in zip(evaluated, parts, strict=True)}
