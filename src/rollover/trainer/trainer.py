"""The trainer: samples with per-token streams in, new weights out. Algorithm-blind: losses are named, not known.

Shapes: N row tokens, M loss positions, B samples, T longest response. Owns weights, optimizer and `policy_version`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollover.config import AlgorithmConfig, LoraConfig, TrainConfig
from rollover.files import give_usual_mode
from rollover.models import devices
from rollover.models.attention import hidden_states
from rollover.models.flex import packed_attention
from rollover.models.flops import ModelFlops
from rollover.models.limits import Limits
from rollover.models.load import LoadedModel
from rollover.models.logprobs import TrainedHead, chunked_logprobs
from rollover.models.norms import compile_norms
from rollover.models.team import Team
from rollover.staleness import staleness
from rollover.trainer.batch import Batch
from rollover.trainer.critic import Critic, Stream
from rollover.trainer.kept_weights import REFERENCE, Snapshots, of_version
from rollover.trainer.lora import ADAPTER, adapter_weights, add_lora, base_weights, merged_weights, save_adapter
from rollover.trainer.objective import Counts, Objective, Streams, Sums, step_metrics
from rollover.trainer.optimizer import Optimizer
from rollover.trainer.packing import Packed, micro_batches, pack, row_tokens, split_groups
from rollover.trainer.rejection import rejections, restricted, rewritten, why_none_is_left
from rollover.trainer.tally import Tally, totals_of
from rollover.types import Sample


class Trainer:
    """Verbs: compute_logprobs, forward_backward, optim_step, publish, save_state; `train_step` strings them together.

    `loaded` holds the model in float32; its parameters are cast to `dtype` here, after the masters are taken.
    `team` computes: it is assembled in the training thread before every forward pass.
    `max_staleness`: how old the weights may be that proximal = "snapshot" asks for.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        *,
        dtype: torch.dtype,
        max_new_tokens: int,
        max_staleness: int = 0,
        lora: LoraConfig | None = None,
        team: Team | None = None,
    ) -> None:
        if max_staleness > 0 and not (algorithm.corrects or algorithm.allow_uncorrected):
            raise ValueError(
                f"max_staleness = {max_staleness}, and the loss does not hold the ratio to the policy that sampled: set"
                " algorithm.correction (algorithm.proximal) or allow_uncorrected"
            )
        if train.minibatches_per_step > 1 and not (algorithm.follows_updates or algorithm.allow_uncorrected):
            raise ValueError(
                f"minibatches_per_step = {train.minibatches_per_step}, and the loss does not hold the ratio to the"
                " policy at the start of the step, so far as is known: set algorithm.correction or allow_uncorrected"
            )
        self.config, self.algorithm = train, algorithm
        self.tokenizer = loaded.tokenizer
        self._base = str(Path(loaded.path).resolve()) if Path(loaded.path).is_dir() else loaded.path
        self.max_staleness = max_staleness
        self.objective = Objective(algorithm, max_new_tokens)
        self.policy_version = 0
        self.in_update = False  # from a step's first change of the weights to its end: no state to go on from
        self.lora = lora is not None and lora.rank > 0
        self.model = add_lora(loaded.model, lora) if self.lora and lora is not None else loaded.model
        self._plain = self.model.get_base_model() if self.lora else self.model
        total = train.num_steps * train.minibatches_per_step
        self.optimizer = Optimizer(self.model, train, total, dtype)
        compile_norms(self._plain)
        self.device = next(self.model.parameters()).device
        self.limits = Limits.of(self._plain)
        self._head, self._flops = TrainedHead(self._plain), ModelFlops.of(self._plain)
        self.flops = 0.0  # model FLOPs of all passes: what is computed again to save memory counts once
        self._published = False
        self.team = team or Team()
        # Of the step to come: rollout id -> sample, of those whose gradient is there.
        self._accumulated: dict[str, Sample] = {}
        self._accumulated_sums = Tally()
        self.snapshots = Snapshots({n: p for n, p in self.model.named_parameters() if p.requires_grad})
        self._keep_snapshots()
        width = self._plain.config.get_text_config().hidden_size
        self.critic = Critic(width, algorithm, self.device) if algorithm.needs_critic else None
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

    def _forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-probs [M], entropies [M], hidden states [M, E]) of the loss tokens under the current weights."""
        attention = packed_attention(packed.lengths, packed.prefixes, self.device)
        hidden_NE = hidden_states(self._plain, packed.input_ids_N, packed.position_ids_N, attention)
        hidden_ME = hidden_NE.index_select(0, packed.loss_positions_M)
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_ME, self._head.now(), packed.targets_M, packed.temperature_M, unit=packed.unit
        )
        self.flops += self._flops.forward(packed.lengths, packed.prefixes, len(hidden_ME))
        return logprobs_M, entropy_M, hidden_ME

    @torch.no_grad()
    def _evaluate(self, samples: list[Sample], what: Callable[[Packed], torch.Tensor]) -> Stream:
        """rollout_id -> `what` [loss tokens] under the current weights, without dropout.

        Packed as `train_step` packs a minibatch of them: the same bits at equal weights and threads.
        """
        self._train_mode(False)
        evaluated: list[Sample] = []
        values: list[torch.Tensor] = []
        for micro in micro_batches(samples, self.config.micro_batch_tokens):
            self.team.assemble()
            values.append(what(pack(micro, self.device, self.limits)))
            evaluated += micro
        if not values:
            return {}
        ends = np.cumsum([int(s.mask.sum()) for s in evaluated])
        parts = np.split(torch.cat(values).cpu().numpy(), ends[:-1])
        return {s.rollout_id: part for s, part in zip(evaluated, parts, strict=True)}

    def compute_logprobs(self, samples: list[Sample]) -> Stream:
        """rollout_id -> log-probs [loss tokens] under the current weights, without dropout."""
        return self._evaluate(samples, lambda packed: self._forward(packed)[0])

    def forward_backward(self, micro: list[Sample], counts: Counts, known: Mapping[str, Stream] | None = None) -> Sums:
        """Loss and gradient of one micro-batch of a minibatch with `counts`.

        `known`: streams computed before the step. Without "proximal" the current log-probs are the proximal ones: the
        current/proximal ratio is then exactly 1, and no extra forward pass is spent.
        """
        known = known or {}
        self._train_mode(True)
        packed = pack(micro, self.device, self.limits)
        logprobs_M, entropy_M, hidden_ME = self._forward(packed)

        def flat(stream: Stream) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([stream[s.rollout_id] for s in micro])).to(self.device)

        streams = Streams(
            logprobs_BT=packed.unpack(logprobs_M),
            entropy_BT=packed.unpack(entropy_M if self.algorithm.entropy_coef else entropy_M.detach()),
            proximal_BT=packed.unpack(flat(known["proximal"])) if "proximal" in known else None,
            behavior_BT=packed.behavior_logprobs_BT,
            reference_BT=packed.unpack(flat(known["reference"])) if "reference" in known else None,
            advantages_BT=packed.advantages_BT,
            mask_BT=packed.mask_BT,
            versions_BT=packed.versions_BT,
            staleness_BT=staleness(packed.versions_BT, self.policy_version),
            group_B=packed.group_B,
        )
        loss, sums = self.objective(streams, counts)
        loss.backward()
        self.flops += self._flops.backward(packed.lengths, packed.prefixes, len(packed.targets_M))
        if self.critic is not None:
            values_M, returns_M = flat(known["values"]), flat(known["returns"])
            sums |= self.critic.forward_backward(hidden_ME, values_M, returns_M, counts.tokens)
        return sums

    def accumulate(self, samples: list[Sample]) -> None:
        """Add the gradient of whole groups of the step to come, before the rest of it is known (`train_step`)."""
        assert self.config.minibatches_per_step == 1 and self.critic is None
        ((samples,), known) = self._reject([samples], {})
        counts = replace(Counts.of(samples), divided=False)
        known |= self._known([samples], known)
        self._add_gradient(samples, counts, _for_minibatch(0, known, self.algorithm), self._accumulated_sums)
        self._accumulated |= {s.rollout_id: s for s in samples}

    def forget_accumulated(self) -> None:
        """The step that `accumulate` was for is not trained now."""
        self.optimizer.forget_gradients()
        self._accumulated, self._accumulated_sums = {}, Tally()

    def _add_gradient(self, samples: list[Sample], counts: Counts, known: Mapping[str, Stream], sums: Tally) -> None:
        for micro in micro_batches(samples, self.config.micro_batch_tokens):
            with self.team.piece(row_tokens(micro)):
                sums.add(self.forward_backward(micro, counts, known))

    def _divide(self, counts: Counts, sums: Tally) -> None:
        """The gradient of a whole minibatch, of which `accumulate` had some, and its loss: by what it holds."""
        divisor = max(1.0, replace(counts, divided=True).divisor(self.algorithm.aggregation))
        self.optimizer.scale_gradients(1 / divisor)
        sums.divide("sum/loss", divisor)
        self._accumulated, self._accumulated_sums = {}, Tally()

    def _reject(
        self, minibatches: list[list[Sample]], known: dict[str, Stream]
    ) -> tuple[list[list[Sample]], dict[str, Stream]]:
        """Minibatches and streams without what algorithm.rejection leaves out, and the proximal stream it looked at.

        Needs the log-probs at the start of the step of all minibatches, the first one included.
        """
        if self.algorithm.rejection == "none":
            return minibatches, known
        fresh = [[s for s in part if s.rollout_id not in self._accumulated] for part in minibatches]
        policy = self.algorithm.proximal_policy
        start = self._sampling_logprobs(fresh) if policy == "snapshot" else self._logprobs(fresh)
        kept = rejections(self.objective, [s for part in fresh for s in part], start, self.policy_version)
        if policy in ("snapshot", "step_start"):
            known = known | {"proximal": start}
        left = [[self._accumulated.get(s.rollout_id) or rewritten(s, kept) for s in part] for part in minibatches]
        return left, {name: restricted(stream, kept) for name, stream in known.items()}

    def _known(self, minibatches: list[list[Sample]], known: Mapping[str, Stream]) -> dict[str, Stream]:
        """The streams of the whole step that are taken at the weights of its start, or at kept ones; not `known` ones.

        Computed minibatch by minibatch, to be packed as they will be in training.
        """
        found: dict[str, Stream] = {}
        if "proximal" not in known and self.algorithm.proximal_policy == "snapshot":
            found["proximal"] = self._sampling_logprobs(minibatches)
        elif "proximal" not in known and self.algorithm.proximal_policy == "step_start" and len(minibatches) > 1:
            found["proximal"] = self._logprobs(minibatches[1:])
        if self.algorithm.needs_reference:
            with self.snapshots.under(REFERENCE):
                found["reference"] = self._logprobs(minibatches)
        return found

    def _logprobs(self, minibatches: list[list[Sample]]) -> Stream:
        return {k: v for part in minibatches for k, v in self.compute_logprobs(part).items()}

    def _sampling_logprobs(self, minibatches: list[list[Sample]]) -> Stream:
        """Log-probs of every loss token under the trainer's weights of the version that sampled it."""
        out = {s.rollout_id: np.zeros(int(s.mask.sum()), np.float32) for part in minibatches for s in part}
        for part in minibatches:
            versions = {int(v) for s in part for v in np.unique(s.versions[s.mask])}
            for version in sorted(versions):
                current = version == self.policy_version
                with nullcontext() if current else self.snapshots.under(of_version(version)):
                    found = self.compute_logprobs(part)
                for s in part:
                    if s.mask.any():
                        own = s.versions[s.mask] == version
                        out[s.rollout_id][own] = found[s.rollout_id][own]
        return out

    def _estimate(self, samples: list[Sample]) -> tuple[list[Sample], dict[str, Stream]]:
        """With a critic: the samples with its advantages, its values and the returns. Else the samples as they are."""
        critic = self.critic
        if critic is None:
            return samples, {}
        values = self._evaluate(samples, lambda packed: critic.values(self._forward(packed)[2]))
        samples, returns = critic.estimate(samples, values)
        return samples, {"values": values, "returns": returns}

    def optim_step(self, rate_scale: float = 1.0) -> dict[str, float]:
        """One optimizer step on the accumulated gradient, at `rate_scale` times the learning rate.

        Policy and critic step together: where the gradient of one is not finite, that of the other is skipped too.
        """
        if self.critic is None:
            return self.optimizer.step(rate_scale)
        norm = self.critic.gradient_norm()
        update = self.optimizer.step(rate_scale, usable=math.isfinite(norm))
        self.critic.step(norm, self.config.max_grad_norm, skip=bool(update["train/skipped_steps"]))
        return update | {"critic/grad_norm": norm}

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One training step: every minibatch once, in order. Raises policy_version by one.

        Samples whose advantages are all 0 (a group that agrees) add nothing to the gradient: they count in the
        denominators and are not computed, unless `train.skip_zero_advantage` is off or the algorithm needs them.
        ValueError, before anything changes, where algorithm.rejection leaves no token.
        """
        assert batch.samples, "a training step needs at least one sample"
        samples, known = self._estimate(batch.samples)
        minibatches = split_groups(samples, self.config.minibatches_per_step)
        minibatches, known = self._reject(minibatches, known)
        counts = [Counts.of(part) for part in minibatches]
        rejected = batch.num_loss_tokens - sum(c.tokens for c in counts)
        if rejected and rejected == batch.num_loss_tokens:
            why = why_none_is_left(self.algorithm, rejected)
            raise ValueError(f"step {self.policy_version + 1} has no token in its loss: {why}")
        if self.config.skip_zero_advantage and not self.algorithm.needs_every_token:
            minibatches = [[s for s in part if s.advantages[s.mask].any()] for part in minibatches]
        skipped_tokens = sum(c.tokens for c in counts) - sum(Counts.of(part).tokens for part in minibatches)
        if self._accumulated:
            now = {s.rollout_id: s.advantages for s in samples}
            assert all(np.array_equal(now[i], s.advantages) for i, s in self._accumulated.items())
            minibatches = [[s for s in minibatches[0] if s.rollout_id not in self._accumulated]]
            counts = [replace(counts[0], divided=False)]
        known |= self._known(minibatches, known)
        tallies: list[Tally] = []
        updates: list[dict[str, float]] = []
        for index, (part, count) in enumerate(zip(minibatches, counts, strict=True)):
            sums = Tally() if count.divided else self._accumulated_sums
            self._add_gradient(part, count, _for_minibatch(index, known, self.algorithm), sums)
            if not count.divided:
                self._divide(count, sums)
            elif count.tokens and not part:
                self.optimizer.set_zero_gradients()
            self.in_update = True
            known_now = sums.totals() if self.algorithm.ess_step_scaling else {}
            updates.append(self.optim_step(self.objective.rate_scale(known_now)))
            tallies.append(sums)
        self._train_mode(False)
        self.policy_version += 1
        self._keep_snapshots()
        self.in_update = False
        metrics = step_metrics(totals_of(tallies), updates)
        metrics["train/zero_advantage_tokens"] = float(skipped_tokens)
        if self.algorithm.rejection != "none":
            metrics["off_policy/rejected_share"] = rejected / max(1, batch.num_loss_tokens)
        return metrics

    def _keep_snapshots(self) -> None:
        """The reference from version 0 on; for proximal = "snapshot" every version that a batch may still hold."""
        if self.algorithm.needs_reference and self.policy_version == 0:
            self.snapshots.keep(REFERENCE)
        if self.algorithm.proximal == "snapshot":
            self.snapshots.keep(of_version(self.policy_version))
            oldest = self.policy_version - self.max_staleness
            self.snapshots.keep_only({REFERENCE, *map(of_version, range(oldest, self.policy_version + 1))})

    async def publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights for an engine, by the plain model's parameter names, tied ones once. Views: copy them at once.

        With LoRA the weights once, and every time the adapters (models/adapters.py): merged they would be rounded away.
        """
        return self._weights()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.lora:
            yield from ((name, parameter.detach()) for name, parameter in self._plain.named_parameters())
            return
        if not self._published:
            yield from base_weights(self._plain)
        yield from adapter_weights(self._plain)
        self._published = True

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, JSON-able rest) from which `load_state` continues exactly."""
        tensors, meta = self.optimizer.state()
        tensors["random/cpu"] = torch.get_rng_state()  # LoRA's dropout draws from it
        tensors |= devices.random_state(self.device)
        rest = {"policy_version": self.policy_version, "optimizer": meta}
        if self.critic is not None:
            of_critic, rest["critic"] = self.critic.state()
            tensors |= of_critic
        return tensors | self.snapshots.state(), rest

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.optimizer.load_state(tensors, meta["optimizer"])
        self.snapshots.load_state(tensors)
        self.policy_version = meta["policy_version"]
        self._check_kept()
        if self.critic is not None:
            if "critic" not in meta:
                raise ValueError('the checkpoint has no critic: algorithm.advantage was not "gae". Set it back')
            self.critic.load_state(tensors, meta["critic"])
        if "random/cpu" in tensors:
            torch.set_rng_state(tensors["random/cpu"])
        devices.set_random_state(self.device, tensors)

    def _check_kept(self) -> None:
        """After a restart: ValueError where the checkpoint was written without weights that this config needs."""
        needed = {"algorithm.kl_coef > 0": REFERENCE} if self.algorithm.needs_reference else {}
        if self.algorithm.proximal == "snapshot":
            needed['algorithm.proximal = "snapshot"'] = of_version(self.policy_version)
        for setting, name in needed.items():
            if name not in self.snapshots:
                raise ValueError(
                    f"--resume with {setting}: the checkpoint holds no such weights; start with it instead"
                )

    def save_model(self, folder: Path) -> None:
        """A folder that transformers' from_pretrained loads: compute dtype, adapters merged, tokenizer included.

        The adapters themselves are in float32 beside it, for peft: merged, small updates are rounded away.
        """
        model = self._plain
        tensors = dict(merged_weights(model)) if self.lora else model.state_dict()
        model.save_pretrained(folder, state_dict=tensors)
        self.tokenizer.save_pretrained(folder)
        if self.lora:
            save_adapter(self.model, self.optimizer.weights(), folder / ADAPTER, self._base)
        for weights in folder.rglob("*.safetensors"):
            give_usual_mode(weights)


def _for_minibatch(index: int, known: Mapping[str, Stream], algorithm: AlgorithmConfig) -> Mapping[str, Stream]:
    """The first minibatch meets the weights of the step's start: its current log-probs are the proximal ones."""
    first = index == 0 and algorithm.proximal_policy == "step_start"
    return {name: stream for name, stream in known.items() if not (first and name == "proximal")}
