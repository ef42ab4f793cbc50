"""The trainer: samples with per-token streams in, new weights out. Algorithm-blind: losses are named, not known.

Shapes: N row tokens, M loss positions, B samples, T longest response. Owns weights, optimizer and `policy_version`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollover.algorithms.aggregate import aggregate
from rollover.algorithms.correction import importance_weights, mismatch_metrics
from rollover.algorithms.loss import policy_loss
from rollover.config import AlgorithmConfig, LoraConfig, TrainConfig
from rollover.models.attention import PackedAttention, hidden_states
from rollover.models.load import LoadedModel
from rollover.models.logprobs import Head, chunked_logprobs
from rollover.models.norms import compile_norms
from rollover.train.batch import Batch
from rollover.train.optimizer import Optimizer
from rollover.train.packing import Packed, micro_batches, pack, split_groups
from rollover.types import Sample

Sums = dict[str, torch.Tensor]


def add_lora(model: Any, lora: LoraConfig) -> Any:
    """Freeze the model and give the named linear layers adapters (peft). ValueError where a name matches none.

    The embeddings are refused: log-probs are computed from the plain head, which may be tied to the input embedding.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError as error:
        raise ValueError("model.lora.rank > 0 needs the package peft: pip install peft") from error
    # Names as peft matches them: the whole path of a module, or its end.
    for target in lora.target_modules:
        matches = [m for n, m in model.named_modules() if n == target or n.endswith(f".{target}")]
        if not matches:
            raise ValueError(f"model.lora.target_modules: the model has no layer {target!r}; remove it or correct it")
        if any(m is model.get_output_embeddings() or m is model.get_input_embeddings() for m in matches):
            raise ValueError(f"model.lora.target_modules: {target!r} is an embedding, which cannot have an adapter")
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (peft divides by the rank: a float will do)
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"model.lora.target_modules = {lora.target_modules}: {error}") from error


class Trainer:
    """Verbs: compute_logprobs, forward_backward, optim_step, publish, save_state; `train_step` strings them together.

    `loaded` holds the model in float32; its parameters are cast to `dtype` here, after the masters are taken.
    `max_new_tokens` is the norm of seq-mean-token-sum-norm.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        *,
        dtype: torch.dtype,
        max_new_tokens: int,
        lora: LoraConfig | None = None,
    ) -> None:
        self.config, self.algorithm = train, algorithm
        self.tokenizer = loaded.tokenizer
        self.max_new_tokens = max_new_tokens
        self.policy_version = 0
        self.lora = lora is not None and lora.rank > 0
        self.model = add_lora(loaded.model, lora) if self.lora and lora is not None else loaded.model
        self._plain = self.model.get_base_model() if self.lora else self.model
        total = train.num_steps * train.minibatches_per_step
        self.optimizer = Optimizer(self.model, train, total, dtype)
        compile_norms(self._plain)
        self.device = next(self.model.parameters()).device
        self._published = False
        if train.gradient_checkpointing:
            self._plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers checkpoints in training mode only.
        self._training_mode = train.gradient_checkpointing or (lora is not None and self.lora and lora.dropout > 0)

    def _train_mode(self, on: bool) -> None:
        """Switch gradient checkpointing and LoRA dropout. The model's own dropout stays off: the engine has none."""
        self.model.train(on and self._training_mode)
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Dropout) and "lora_dropout" not in name:
                module.eval()

    def _logprobs(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropies) [M] of the loss tokens under the current weights."""
        hidden_NE = hidden_states(
            self._plain, packed.input_ids_N, packed.position_ids_N, PackedAttention(packed.lengths, packed.prefixes)
        )
        return chunked_logprobs(
            hidden_NE.index_select(0, packed.loss_positions_M),
            Head.of(self._plain),
            packed.targets_M,
            packed.temperature_M,
        )

    @torch.no_grad()
    def compute_logprobs(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        """rollout_id -> log-probs [loss tokens] under the current weights, without dropout.

        Packed as `train_step` packs a minibatch of these samples: at equal weights the values are the same bits.
        """
        self._train_mode(False)
        out: dict[str, np.ndarray] = {}
        for micro in micro_batches(samples, self.config.micro_batch_tokens):
            logprobs_M, _ = self._logprobs(pack(micro, self.device))
            counts = [int(s.mask.sum()) for s in micro]
            for s, part in zip(micro, logprobs_M.split(counts), strict=True):
                out[s.rollout_id] = part.cpu().numpy()
        return out

    def forward_backward(self, micro: list[Sample], denominator: float, proximal: dict[str, np.ndarray] | None) -> Sums:
        """Loss and gradient of one micro-batch. `proximal` None: the current log-probs are the proximal ones.

        The current/proximal ratio is then exactly 1, and no extra forward pass is spent.
        """
        cfg = self.algorithm
        self._train_mode(True)
        packed = pack(micro, self.device)
        logprobs_M, entropy_M = self._logprobs(packed)
        logprobs_BT = packed.unpack(logprobs_M)
        if proximal is None:
            proximal_BT = logprobs_BT.detach()
        else:
            known = np.concatenate([proximal[s.rollout_id] for s in micro])
            proximal_BT = packed.unpack(torch.from_numpy(known).to(self.device))
        loss_BT, sums = policy_loss(
            logprobs_BT,
            proximal_BT,
            packed.advantages_BT,
            packed.mask_BT,
            kind=cfg.loss,
            clip_low=cfg.clip_low,
            clip_high=cfg.clip_high,
        )
        if cfg.correction == "none":
            weights_BT = packed.mask_BT.float()
        else:
            weights_BT = importance_weights(
                proximal_BT,
                packed.behavior_logprobs_BT,
                packed.mask_BT,
                mode=cfg.correction,
                cap=cfg.correction_cap,
            )
        loss = aggregate(
            loss_BT * weights_BT,
            packed.mask_BT,
            cfg.aggregation,
            denominator=denominator,
            norm=float(self.max_new_tokens),
        )
        loss.backward()
        sums |= mismatch_metrics(
            proximal_BT, packed.behavior_logprobs_BT, packed.mask_BT, mode=cfg.correction, cap=cfg.correction_cap
        )
        return sums | {"sum/loss": loss.detach(), "sum/entropy": entropy_M.detach().sum()}

    def optim_step(self) -> dict[str, float]:
        """One optimizer step on the accumulated gradient."""
        return self.optimizer.step()

    def _denominator(self, samples: list[Sample]) -> float:
        """Global count of what the aggregation divides by, over the whole minibatch."""
        if self.algorithm.aggregation.startswith("seq-"):
            return float(sum(bool(s.mask.any()) for s in samples))
        return float(sum(int(s.mask.sum()) for s in samples))

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One training step: every minibatch once, in order. Raises policy_version by one.

        Samples whose advantages are all 0 (a group that agrees) add nothing to the gradient: they count in the
        denominators and are not computed, unless `train.skip_zero_advantage` is off.
        """
        assert batch.samples, "a training step needs at least one sample"
        minibatches = split_groups(batch.samples, self.config.minibatches_per_step)
        denominators = [self._denominator(samples) for samples in minibatches]
        loss_tokens = sum(int(s.mask.sum()) for s in batch.samples)
        if self.config.skip_zero_advantage:
            minibatches = [[s for s in samples if s.advantages[s.mask].any()] for samples in minibatches]
        skipped_tokens = loss_tokens - sum(int(s.mask.sum()) for samples in minibatches for s in samples)
        # The first minibatch meets the weights of the step's start: its current log-probs are the proximal ones.
        # Those of the others are computed minibatch by minibatch, to be packed as they will be in training.
        proximal: dict[str, np.ndarray] = {}
        for samples in minibatches[1:]:
            proximal |= self.compute_logprobs(samples)
        totals: dict[str, float] = {}
        updates: list[dict[str, float]] = []
        for index, (samples, denominator) in enumerate(zip(minibatches, denominators, strict=True)):
            for micro in micro_batches(samples, self.config.micro_batch_tokens):
                _combine(totals, self.forward_backward(micro, denominator, proximal if index else None))
            if denominator and not samples:
                self.optimizer.set_zero_gradients()
            updates.append(self.optim_step())
        self._train_mode(False)
        self.policy_version += 1
        return _metrics(totals, updates, len(minibatches)) | {"train/zero_advantage_tokens": float(skipped_tokens)}

    def publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights for an engine, by the plain model's parameter names, tied ones once. Views: copy them at once.

        With LoRA only what differs from the first hand-over: the merged weights of adapted layers.
        """
        yield from self._weights(adapted_only=self._published)
        self._published = self.lora

    @torch.no_grad()
    def _weights(self, *, adapted_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Named weights of the plain model, adapters merged: W + scale * B A, rounded once from the unchanged W."""
        if not self.lora:
            yield from ((n, p.detach()) for n, p in self._plain.named_parameters())
            return
        from peft.tuners.lora import LoraLayer

        merged = set()
        for name, layer in self._plain.named_modules():
            if isinstance(layer, LoraLayer):
                base = layer.get_base_layer()
                assert isinstance(base, torch.nn.Module)
                weight = base.weight
                assert isinstance(weight, torch.Tensor)
                merged.add(f"{name}.base_layer.weight")
                delta: Any = layer.get_delta_weight  # pyright: ignore[reportAttributeAccessIssue]
                yield f"{name}.weight", (weight.float() + delta("default").float()).to(weight.dtype)
        if adapted_only:
            return
        for name, parameter in self._plain.named_parameters():
            if name not in merged and ".lora_" not in name:
                yield name.replace(".base_layer.", "."), parameter.detach()

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, JSON-able rest) from which `load_state` continues exactly."""
        tensors, meta = self.optimizer.state()
        tensors["random/cpu"] = torch.get_rng_state()  # LoRA's dropout draws from it
        if self.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors, {"policy_version": self.policy_version, "optimizer": meta}

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.optimizer.load_state(tensors, meta["optimizer"])
        if "random/cpu" in tensors:
            torch.set_rng_state(tensors["random/cpu"])
        if self.device.type == "cuda" and "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"], self.device)
        self.policy_version = meta["policy_version"]

    def save_model(self, folder: Path) -> None:
        """A folder that transformers' from_pretrained loads: compute dtype, adapters merged, tokenizer included."""
        model = self._plain
        tensors = dict(self._weights(adapted_only=False)) if self.lora else model.state_dict()
        model.save_pretrained(folder, state_dict=tensors)
        self.tokenizer.save_pretrained(folder)


def _combine(totals: dict[str, float], sums: Sums) -> None:
    for key, value in sums.items():
        old = totals.get(key)
        number = float(value)
        totals[key] = number if old is None else max(old, number) if key.startswith("max/") else old + number


def _metrics(totals: dict[str, float], updates: list[dict[str, float]], minibatches: int) -> dict[str, float]:
    """Metrics of the step under their names in docs/metrics.md."""
    tokens = max(1.0, totals.get("count/tokens", 0.0))
    means = {
        "entropy": "sum/entropy",
        "clip_fraction": "sum/clipped",
        "ratio/mean": "sum/ratio",
        "importance/mean": "sum/importance",
        "importance/capped_share": "sum/capped",
        "mismatch/logprob_abs_mean": "sum/logprob_abs",
        "mismatch/kl": "sum/kl",
    }
    maxima = {
        "ratio/max": "max/ratio",
        "importance/max": "max/importance",
        "mismatch/logprob_abs_max": "max/logprob_abs",
    }
    return {
        "loss": totals.get("sum/loss", 0.0) / minibatches,
        **{key: totals.get(source, 0.0) / tokens for key, source in means.items()},
        **{key: totals.get(source, 0.0) for key, source in maxima.items()},
        "grad_norm": max(u["grad_norm"] for u in updates),
        "learning_rate": updates[-1]["learning_rate"],
        "train/skipped_steps": sum(u["train/skipped_steps"] for u in updates),
    }
