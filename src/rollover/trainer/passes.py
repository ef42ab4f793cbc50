"""Forward passes of one model over packed samples: log-probs, entropies and hidden states of the loss tokens.

Shapes: N row tokens, M loss positions, E hidden size. Owns the model's limits and the count of its FLOPs; used by the
policy's backend, the critic and a teacher. The weights may be spread over ranks (`Sharded`): then all ranks compute
equally many micro-batches, and a rank that has fewer computes empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollover.models.attention import hidden_states
from rollover.models.flex import packed_attention
from rollover.models.flops import ModelFlops
from rollover.models.load import ModelLimits
from rollover.models.logprobs import Head, TrainedHead, chunked_logprobs, chunked_squares
from rollover.models.threads import Team
from rollover.models.vision import Vision, tower_modules
from rollover.trainer.backend import Stream
from rollover.trainer.packing import PackedBatch, micro_batches, pack
from rollover.types import Sample

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
