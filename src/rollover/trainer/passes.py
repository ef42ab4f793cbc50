"""Forward passes of one model over packed samples: log-probs, entropies and hidden states of the loss tokens.

Shapes: N row tokens, M loss positions, E hidden size. Owns the model's limits and the count of its FLOPs. Whose weights
they are, and what becomes of the numbers, is for who asks: the policy's backend, or a teacher that is another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollover.models.attention import hidden_states
from rollover.models.flex import packed_attention
from rollover.models.flops import ModelFlops
from rollover.models.limits import Limits
from rollover.models.logprobs import TrainedHead, chunked_logprobs
from rollover.models.team import Team
from rollover.trainer.backend import Stream
from rollover.trainer.packing import Packed, micro_batches, pack
from rollover.types import Sample


class Passes:
    """`model`: a Hugging Face causal LM, adapters in place. `flops`: model FLOPs so far; what is computed again to save
    memory counts once."""

    def __init__(self, model: Any, team: Team, micro_batch_tokens: int) -> None:
        self.model, self.team, self.micro_batch_tokens = model, team, micro_batch_tokens
        self.device = next(model.parameters()).device
        self.limits = Limits.of(model)
        self._head, self._of_model = TrainedHead(model), ModelFlops.of(model)
        self.flops = 0.0

    def pack(self, micro: list[Sample]) -> Packed:
        """The row of a micro-batch, on the model's device. ValueError for samples that the model cannot be given."""
        return pack(micro, self.device, self.limits)

    def forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-probs [M], entropies [M], hidden states [M, E]) of the loss tokens under the current weights."""
        attention = packed_attention(packed.lengths, packed.prefixes, self.device)
        hidden_NE = hidden_states(self.model, packed.input_ids_N, packed.position_ids_N, attention)
        hidden_ME = hidden_NE.index_select(0, packed.loss_positions_M)
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_ME, self._head.now(), packed.targets_M, packed.temperature_M, unit=packed.unit
        )
        self.flops += self._of_model.forward(packed.lengths, packed.prefixes, len(hidden_ME))
        return logprobs_M, entropy_M, hidden_ME

    def count_backward(self, packed: Packed) -> None:
        """Count the FLOPs of the backward pass of a row."""
        self.flops += self._of_model.backward(packed.lengths, packed.prefixes, len(packed.targets_M))

    def logprobs(self, samples: list[Sample]) -> Stream:
        """Log-probs of the loss tokens, each at the temperature of its sample; no gradient."""
        return self.evaluate(samples, lambda packed: self.forward(packed)[0])

    @torch.no_grad()
    def evaluate(self, samples: list[Sample], what: Callable[[Packed], torch.Tensor]) -> Stream:
        """rollout_id -> `what` [loss tokens]. Packed as for training: the same bits at equal weights and threads."""
        evaluated: list[Sample] = []
        values: list[torch.Tensor] = []
        for micro in micro_batches(samples, self.micro_batch_tokens):
            self.team.assemble()
            values.append(what(self.pack(micro)))
            evaluated += micro
        if not values:
            return {}
        ends = np.cumsum([int(s.mask.sum()) for s in evaluated])
        parts = np.split(torch.cat(values).cpu().numpy(), ends[:-1])
        return {s.rollout_id: part for s, part in zip(evaluated, parts, strict=True)}
