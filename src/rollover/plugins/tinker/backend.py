"""The backend of a Tinker-compatible service: it holds adapters and optimizer; the loss is computed here.

    forward_backward   the service's log-probs ──▶ our objective ──▶ dLoss/dlogprob of each token, kept here
    optim_step         cross-entropy with the weights -dLoss/dlogprob, and the update, sent together

The gradient is exact: cross-entropy is -sum(weight * logprob), whose gradient is the chain rule's. It costs two forward
passes. (The SDK's forward_backward_custom does the same in one call; with two calls, a gradient can be discarded, or
divided at the end.) Owns the unsent gradient, `policy_version`, and the name of the teacher's weights at the service.
Weights stay at the service.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollover.engine.protocol import ExtendRequest
from rollover.models.load import ModelLimits
from rollover.models.save import save_tokenizer
from rollover.plugins.tinker.engine import session_of
from rollover.plugins.tinker.service import TinkerSession
from rollover.trainer.auxiliary_models import load_teacher_outline
from rollover.trainer.backend import TEACHER, BackendSetup, RunBackend, Stream, Version
from rollover.trainer.local_backend import sample_with
from rollover.trainer.objective import Counts, Objective, Tally
from rollover.trainer.optimizer import learning_rate
from rollover.trainer.passes import token_batch
from rollover.types import Sample, Segment


def make_tinker(setup: BackendSetup) -> TinkerBackend:
    """Create the backend in the engine's session at the service."""
    return TinkerBackend(setup, session_of(setup.engine))


class TinkerBackend(RunBackend):
    """The `RunBackend` over a session at the service. Each verb is documented there.

    `setup.loaded` has tokenizer, configuration and shapes of the model; its weights are not used.
    """

    def __init__(self, setup: BackendSetup, service: TinkerSession) -> None:
        config = setup.config
        self.config, self.algorithm, self.lora = config.train, config.algorithm, config.model.lora
        self.distill = config.distill
        self.engine, self.service, self.tokenizer = setup.engine, service, setup.loaded.tokenizer
        self._base = setup.loaded.path
        self.objective = Objective(config.algorithm, config.rollout.max_new_tokens, tells_tokens=config.tells_tokens)
        self._policy = self._teacher_model = setup.loaded.model
        if config.distill.model_path:
            self._teacher_model = load_teacher_outline(config, setup.loaded).model
        self._teacher = config.distill.model_path or self.service.base_model
        """The name of the teacher's weights at the service; adapters begin as the base model."""
        self._flops, self._version, self.step_count = 0.0, 0, 0
        self.training = self.service.new_training(self.lora.rank, config.run.seed)
        self._gradient: list[tuple[Sample, np.ndarray]] = []
        """Samples, each with dLoss/dlogprob [loss tokens]."""
        self._is_zero = False
        """Whether the gradient includes a minibatch without loss tokens."""
        self._num_saved = 0
        self._samplers: dict[str, Any] = {}
        """Sampling clients by the name of their weights."""

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def flops(self) -> float:
        return self._flops

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        samples = [s for s in samples if s.mask.any()]
        if version == 0 and self.algorithm.needs_reference:
            return self._scored_by(self.service.base_model, self._policy, samples)
        if version == TEACHER and self.distill.teacher and not self.distill.is_current:
            return self._scored_by(self._teacher, self._teacher_model, samples)
        if version == TEACHER and self.distill.is_current:
            version = None
        if version not in (None, self.policy_version):
            what = f"the weights of policy version {version} are" if isinstance(version, int) else f"a {version} is"
            raise ValueError(f"{what} not kept at the service: request the current weights")
        return dict(zip((s.rollout_id for s in samples), self._forward(samples), strict=True))

    def compute_values(self, samples: list[Sample]) -> Stream:
        raise ValueError("there is no value head at the service")

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        raise ValueError("the service returns log-probs of given tokens, and no other statistics of distributions")

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        sums, samples = Tally(), [s for s in samples if s.mask.any()]
        if not samples:
            self._is_zero |= counts.tokens > 0
            return sums
        logprobs = [torch.from_numpy(values).requires_grad_() for values in self._forward(samples)]
        batch = token_batch(samples)
        unknown_BT = torch.full(batch.mask_BT.shape, math.nan)
        logprobs_BT = torch.zeros(batch.mask_BT.shape).masked_scatter(batch.mask_BT, torch.cat(logprobs))
        loss, of_samples = self.objective(batch.with_streams(logprobs=logprobs_BT, entropy=unknown_BT), counts)
        loss.backward()
        for s, values in zip(samples, logprobs, strict=True):
            assert values.grad is not None
            self._gradient.append((s, values.grad.numpy()))
        del of_samples["sum/entropy"]  # unknown: the service returns log-probs of the sampled tokens only
        sums.add(of_samples, samples)
        return sums

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        rate = rate_scale * learning_rate(self.config, self.step_count, self._total_steps)
        finite = np.isfinite(rate) and all(np.isfinite(gradient).all() for _, gradient in self._gradient)
        norm = 0.0
        if finite and (self._gradient or self._is_zero):
            norm = self._send(rate, divisor)
        self.forget_gradients()
        self.step_count += 1
        self._version += ends_step
        if ends_step and self.distill.keeps_weights and self.policy_version % self.distill.refresh_steps == 0:
            name = f"teacher-{self.policy_version:06d}-{self._next_number()}"
            self._teacher = self.service.save_for_sampler(self.training, name, expires=False)
        return {"grad_norm": norm, "learning_rate": rate, "train/skipped_steps": float(not finite)}

    def forget_gradients(self) -> None:
        self._gradient, self._is_zero = [], False

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the path of the weights at the service, as the name of an empty tensor."""
        name = f"step-{self.policy_version:06d}-{self._next_number()}"
        return [(await asyncio.to_thread(self.service.save_for_sampler, self.training, name), torch.empty(0))]

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        """Sample by the service's engine, which first loads the current weights if it has others."""
        return await sample_with(self, self.engine, requests)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        meta = {"policy_version": self.policy_version, "step_count": self.step_count, "path": self._saved("state")}
        return {}, meta | ({"teacher": self._teacher} if self.distill.keeps_weights else {})

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        if self.distill.keeps_weights:
            if "teacher" not in meta:
                raise ValueError(
                    '--resume with distill.teacher = "policy" and distill.refresh_steps > 1: the checkpoint names no'
                    " such weights; start with it instead"
                )
            self._teacher = meta["teacher"]
        self.training = self.service.training_from(meta["path"])
        self._version, self.step_count = meta["policy_version"], meta["step_count"]
        self.forget_gradients()

    def save_model(self, folder: Path) -> None:
        """Save the tokenizer, and in tinker.json the paths of the weights at the service."""
        save_tokenizer(self.tokenizer, self._base, folder)
        saved = self.service.result(
            "saving weights to sample with", lambda: self.training.save_weights_for_sampler("model"), retry=True
        )
        paths = {"base_model": self.service.base_model, "sampler": saved.path, "state": self._saved("model")}
        (folder / "tinker.json").write_text(json.dumps(paths, indent=2) + "\n", encoding="utf-8")

    # Private

    @property
    def _total_steps(self) -> int:
        return self.config.num_steps * self.config.updates_per_step

    def _next_number(self) -> int:
        """Count the saved weights, so that a retry never reuses a name."""
        self._num_saved += 1
        return self._num_saved

    def _saved(self, what: str) -> str:
        """Save weights and optimizer without expiry, and return their path."""
        name = f"{what}-{self.policy_version:06d}-{self._next_number()}"
        return self.service.result("saving a checkpoint", lambda: self.training.save_state(name), retry=True).path

    def _forward(self, samples: list[Sample]) -> list[np.ndarray]:
        """Return log-probs [loss tokens] of each sample under the current weights."""
        if not samples:
            return []
        _check(self._policy, samples)
        data = [self._datum(s, np.zeros(int(s.mask.sum()), np.float32)) for s in samples]
        found = self.service.result(
            "a forward pass", lambda: self.training.forward(data, "cross_entropy"), retry=True
        ).loss_fn_outputs
        self._count(samples, self._policy)
        return [_at_loss_tokens(s, np.asarray(out["logprobs"].data)) for s, out in zip(samples, found, strict=True)]

    def _scored_by(self, name: str, model: Any, samples: list[Sample]) -> Stream:
        """Return log-probs of the loss tokens under the service's weights `name`. `model` has their shapes."""
        if not samples:
            return {}
        _check(model, samples)
        sampler, sdk = self._sampler_of(name), self.service.sdk
        prompts = [sdk.types.ModelInput.from_ints([*s.prompt_ids.tolist(), *s.token_ids.tolist()]) for s in samples]
        futures = [sampler.compute_logprobs(prompt) for prompt in prompts]  # all at once: the service batches them
        found: Stream = {}
        for s, prompt, future in zip(samples, prompts, futures, strict=True):
            tries = chain([future], (sampler.compute_logprobs(prompt) for _ in count()))
            values = self.service.result(f"log-probs of {name}", partial(next, tries), retry=True)
            found[s.rollout_id] = _at_loss_tokens(s, np.array(values[1:], dtype=np.float64))  # None becomes NaN
            if np.isnan(found[s.rollout_id]).any():
                raise ValueError(f"rollout {s.rollout_id}: the service has no log-prob of a token under {name}")
        self._count(samples, model)
        return found

    def _sampler_of(self, name: str) -> Any:
        """Return the sampling client of the weights `name`, opened once. Drop those of replaced teachers."""
        if name not in self._samplers:
            current = {self.service.base_model, self._teacher}
            self._samplers = {name: sampler for name, sampler in self._samplers.items() if name in current}
            self._samplers[name] = self.service.sampler(name)
        return self._samplers[name]

    def _send(self, rate: float, divisor: float) -> float:
        """Send the gradient and the update. Return the gradient norm; NaN if the service does not report it."""
        data = [self._datum(s, (-gradient / divisor).astype(np.float32)) for s, gradient in self._gradient]
        if not data:  # a gradient of 0 still updates the optimizer's moments
            data = [_datum(self.service.sdk.types, [0, 0], np.zeros(1, np.float32))]
        cfg = self.config
        params = self.service.sdk.types.AdamParams(
            learning_rate=rate,
            beta1=cfg.adam_beta1,
            beta2=cfg.adam_beta2,
            eps=cfg.adam_eps,
            weight_decay=cfg.weight_decay,
            grad_clip_norm=cfg.max_grad_norm,
        )
        backward = self.training.forward_backward(data, "cross_entropy")
        update = self.training.optim_step(params)  # submitted before the first result: one round of the service
        self.service.result("a backward pass", lambda: backward)
        metrics = self.service.result("an update", lambda: update).metrics or {}
        samples = [s for s, _ in self._gradient]
        self._count(samples, self._policy, passes=3)
        return _gradient_norm(metrics)

    def _datum(self, s: Sample, weights_M: np.ndarray) -> Any:
        """Return the sample as a datum. weights_M: [loss tokens]."""
        ids = np.concatenate([s.prompt_ids, s.token_ids]).tolist()
        weights = np.zeros(len(ids) - 1, np.float32)
        weights[len(s.prompt_ids) - 1 :][s.mask] = weights_M
        return _datum(self.service.sdk.types, ids, weights)

    def _count(self, samples: list[Sample], model: Any, passes: int = 1) -> None:
        """Count FLOPs of forward passes over prompts and answers; a backward pass is two. Attention is not counted: the
        service's implementation is unknown."""
        num_tokens = sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
        self._flops += 2.0 * _num_weights(model) * num_tokens * passes


def _check(model: Any, samples: list[Sample]) -> None:
    """Raise ValueError for samples that exceed the model's limits or whose temperature is not 1."""
    limits = ModelLimits.from_model(model)
    for s in samples:
        limits.check(s.rollout_id, s.prompt_ids, s.token_ids)
        if s.temperature != 1:
            raise ValueError(
                f"rollout {s.rollout_id} was sampled at temperature {s.temperature:g}, and the service's log-probs"
                " are those at temperature 1"
            )


def _datum(types: Any, ids: list[int], weights: np.ndarray) -> Any:
    """Return a datum of all tokens but the last. weights: of the log-prob of each next token."""
    targets = ids[1:]
    inputs = {
        "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
        "weights": types.TensorData(data=weights.tolist(), dtype="float32", shape=[len(weights)]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _num_weights(model: Any) -> int:
    """Count the parameters that multiply every token: linear layers and the output layer."""
    inputs, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layers = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and p is not inputs and p is not head)
    return layers + head.numel()


def _gradient_norm(metrics: Mapping[str, float]) -> float:
    """Return the norm before clipping. Services have no common name for it."""
    names = [name for name in metrics if "grad" in name and ("norm" in name or "l2" in name)]
    names.sort(key=lambda name: "unclipped" not in name)
    return float(metrics[names[0]]) if names else math.nan


def _at_loss_tokens(s: Sample, values: np.ndarray) -> np.ndarray:
    """Select the loss tokens, float32, from the values [prompt + answer - 1] of all tokens but the first."""
    return values[len(s.prompt_ids) - 1 :][s.mask].astype(np.float32)
