"""A TrainerBackend over a table of bigrams and plain gradient descent: the smallest one that passes the contract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from rollover.engine.protocol import ExtendRequest
from rollover.models.load import ModelLimits
from rollover.trainer.backend import BackendSetup, Stream, Version
from rollover.trainer.objective import Counts, Objective, Tally
from rollover.trainer.passes import PackedBatch, pack
from rollover.types import Sample, Segment, StopReason

VOCAB = 102


class Bigrams:
    def __init__(self, setup: BackendSetup) -> None:
        self.config, self.objective = setup.config.train, Objective(setup.config.algorithm, 16)
        self.limits = ModelLimits.from_model(setup.loaded.model)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator).requires_grad_()
        self.policy_version, self.flops = 0, 0.0

    def _forward(self, samples: list[Sample]) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [M] of the loss tokens."""
        packed = pack(samples, self.table.device, self.limits)
        before_M = packed.input_ids_N[packed.loss_positions_M]
        logprobs_MV = (self.table[before_M] / packed.temperature_M[:, None]).log_softmax(-1)
        self.flops += 2.0 * logprobs_MV.numel()
        logprobs_M = logprobs_MV.gather(1, packed.targets_M[:, None])[:, 0]
        return packed, logprobs_M, -(logprobs_MV.exp() * logprobs_MV).sum(-1)

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        if version not in (None, self.policy_version):
            raise ValueError(f"the weights of policy version {version} are not kept")
        with torch.no_grad():
            return {s.rollout_id: self._forward([s])[1].numpy() for s in samples if s.mask.any()}

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        raise ValueError("there are no statistics")

    def compute_values(self, samples: list[Sample]) -> Stream:
        raise ValueError("there is no value head")

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        sums = Tally()
        if samples := [s for s in samples if s.mask.any()]:
            batch, logprobs_M, entropy_M = self._forward(samples)
            batch = batch.with_streams(logprobs=batch.unpack(logprobs_M), entropy=batch.unpack(entropy_M.detach()))
            loss, of_micro = self.objective(batch, counts)
            loss.backward()
            sums.add(of_micro)
        return sums

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        norm, rate = 0.0, rate_scale * self.config.learning_rate
        if self.table.grad is not None:
            norm = float(self.table.grad.norm()) / divisor
            with torch.no_grad():
                self.table -= rate / divisor * self.table.grad
        self.table.grad = None
        self.policy_version += ends_step
        return {"grad_norm": norm, "learning_rate": rate, "train/skipped_steps": 0.0}

    def forget_gradients(self) -> None:
        self.table.grad = None

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        return [("table", self.table.detach())]

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        return [[self._answer(request)] for request in requests]

    def _answer(self, request: ExtendRequest) -> Segment:
        generator, ids, logprobs = torch.Generator().manual_seed(request.seed), [request.prompt.ids[-1]], []
        with torch.no_grad():
            for _ in range(request.max_new_tokens):
                logprobs_V = self.table[ids[-1]].log_softmax(-1)
                ids.append(int(torch.multinomial(logprobs_V.exp(), 1, generator=generator)))
                logprobs.append(float(logprobs_V[ids[-1]]))
        arrays = np.array(ids[1:], np.int32), np.array(logprobs, np.float32)
        return Segment(*arrays, self.policy_version, request.sampling, StopReason.LENGTH, start=0)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {"master/table": self.table.detach()}, {"policy_version": self.policy_version}

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        with torch.no_grad():
            self.table.copy_(tensors["master/table"])
        self.policy_version = meta["policy_version"]

    def save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        safetensors.torch.save_file({"table": self.table.detach()}, folder / "model.safetensors")


def without_verbs(setup: BackendSetup) -> object:
    """No backend."""
    return object()
