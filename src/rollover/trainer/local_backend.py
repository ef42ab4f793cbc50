"""The backend of this process: one model on one device, and its optimizer. Also the part of one rank (ranks/rank.py).

Shapes: M loss positions. Owns weights, optimizer, critic, kept weights, a teacher's model and `policy_version`.
objective.py computes the loss that the configuration names; nothing here knows a formula.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollover.engine.protocol import Engine, ExtendRequest
from rollover.models import devices
from rollover.models.adapters import base_weights
from rollover.models.load import LoadedModel, stored_buffers
from rollover.models.norms import compile_norms
from rollover.models.save import give_usual_modes, write_folder
from rollover.models.vision import Vision
from rollover.trainer.auxiliary_models import load_critic, load_reference, load_teacher
from rollover.trainer.backend import TEACHER, BackendSetup, RunBackend, StoredTensors, Stream, TrainerBackend, Version
from rollover.trainer.critic import Critic
from rollover.trainer.kept_weights import KeptVersions, KeptWeights
from rollover.trainer.lora import ADAPTER, adapter_weights, add_lora, merged_weights, save_adapter
from rollover.trainer.objective import Counts, Objective, Sums, Tally
from rollover.trainer.optimizer import Optimizer
from rollover.trainer.passes import Passes, Sharded, row_tokens, set_training
from rollover.types import Sample, Segment


async def sample_with(
    backend: TrainerBackend, engine: Engine | None, requests: Sequence[ExtendRequest]
) -> list[list[Segment]]:
    """Sample with `engine`, after a weight sync if its version differs. ValueError without an engine.

    With rollout.overlap or train.publish_every above 1 a run syncs weights at times of its own: do not sample between.
    """
    if engine is None:
        raise ValueError("this backend was built without an engine, which is what samples: give it one")
    if engine.oldest_version != backend.policy_version:
        await engine.load_weights(backend.policy_version, await backend.publish())
    return list(await asyncio.gather(*(engine.extend(request) for request in requests)))


def make_local(setup: BackendSetup) -> TrainerBackend:
    """Make a backend in this process."""
    config = setup.config
    teacher = load_teacher(config, setup.loaded) if config.distill.model_path else None
    has_model = config.algorithm.needs_critic and config.critic.model
    critic_model = load_critic(config, setup.loaded) if has_model else None
    return LocalBackend(
        setup, teacher=teacher, reference=load_reference(config, setup.loaded), critic_model=critic_model
    )


class LocalBackend(RunBackend):
    """The `RunBackend` over a model of this process.

    The model in `setup` is in float32; its parameters are cast to model.dtype here, after the masters are taken.
    `setup.team` computes: it is assembled in the training thread before every forward pass. `setup.engine`: what
    `sample` uses, over the same model. `teacher`: the model of distill.model_path in model.dtype, never trained.
    `reference`: the weights of algorithm.reference_path, if those are another model's. `critic_model`: the model of
    critic.model in float32, trained here. `sharded`: the same model spread over ranks, which call every verb together;
    it computes in model.dtype, and its parameters are float32 masters.
    """

    def __init__(
        self,
        setup: BackendSetup,
        *,
        teacher: LoadedModel | None = None,
        reference: Mapping[str, torch.Tensor] | None = None,
        critic_model: LoadedModel | None = None,
        sharded: Sharded | None = None,
        sharded_teacher: Sharded | None = None,
    ) -> None:
        config, loaded, train = setup.config, setup.loaded, setup.config.train
        algorithm, lora, critic = config.algorithm, config.model.lora, config.critic
        dtype = devices.dtype_of(config)
        self.config, self.algorithm, self.engine = train, algorithm, setup.engine
        self._loaded = loaded
        self._base = str(Path(loaded.path).resolve()) if Path(loaded.path).is_dir() else loaded.path
        self.objective = Objective(algorithm, config.rollout.max_new_tokens, tells_tokens=config.tells_tokens)
        self._version = self._trained_tokens = 0
        self.lora = lora.rank > 0
        self.model = add_lora(loaded.model, lora) if self.lora else loaded.model
        self._plain = self.model.get_base_model() if self.lora else self.model
        self._critic_only_steps = critic.policy_waits_steps if algorithm.needs_critic else 0
        total = train.num_steps * train.updates_per_step
        of_policy = max(0, train.num_steps - self._critic_only_steps) * train.updates_per_step
        self.optimizer = Optimizer(self.model, train, of_policy, torch.float32 if sharded else dtype)
        compile_norms(self._plain, dtype)
        self.device = next(self.model.parameters()).device
        # Remote engines take whole weights, not adapters.
        self._merges_lora, self._published = config.engine.kind == "remote" or lora.dora, False
        self.team = setup.team
        vision = Vision.from_model(self._plain, loaded.processor)
        self._passes = Passes(self._plain, self.team, train.micro_batch_tokens, sharded, vision)
        self._teacher: Passes | None = None
        if teacher is not None:
            of_teacher = Vision.from_model(teacher.model, teacher.processor)
            self._teacher = Passes(teacher.model, self.team, train.micro_batch_tokens, sharded_teacher, of_teacher)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.kept = KeptWeights(trained, shards_of=dtype if sharded else None)
        is_base = self.lora and algorithm.needs_reference and bool(algorithm.reference_path)
        self._versions = KeptVersions(self.kept, config, self.model.disable_adapter if is_base else None)
        self._versions.begin(reference)
        self.critic: Critic | None = None
        if algorithm.needs_critic and critic_model is not None:
            self.critic = Critic.on_own_model(critic_model, critic, train, total, dtype, self.team)
        elif algorithm.needs_critic:
            width = self._plain.config.get_text_config().hidden_size
            self.critic = Critic(width, critic, train, total, self.device)
        if train.gradient_checkpointing:
            self._plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._training_mode = train.gradient_checkpointing or (self.lora and lora.dropout > 0)

    def _train_mode(self, on: bool) -> None:
        set_training(self.model, on and self._training_mode)

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def trained_tokens(self) -> int:
        return self._trained_tokens

    @property
    def flops(self) -> float:
        others = (self._teacher, self.critic)
        return self._passes.flops + sum(other.flops for other in others if other is not None)

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        if version == TEACHER and self._teacher is not None:
            return self._teacher.logprobs(samples)
        with self._versions.under(version, self.policy_version):
            self._train_mode(False)
            return self._passes.logprobs(samples)

    def compute_values(self, samples: list[Sample]) -> Stream:
        if self.critic is None:
            raise ValueError('there is no value head: set algorithm.advantage = "gae"')
        self._train_mode(False)
        return self.critic.evaluate(samples, self._passes)

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        self._train_mode(False)
        return self._passes.statistics(samples)

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        sums, any_loss = Tally(), False
        for micro in self._passes.micro_batches(samples):
            any_loss = True
            with self.team.piece(max(1, row_tokens(micro))):
                if micro:
                    sums.add(self._add_gradient(micro, counts), micro)
                    self._trained_tokens += sum(int(s.mask.sum()) for s in micro)
                else:
                    self._add_zero_gradient()
        if counts.tokens and not any_loss:
            self.optimizer.set_zero_gradients()
        return sums

    def _add_zero_gradient(self) -> None:
        """Compute a gradient of 0: the other ranks need this one's part of the weights."""
        self._train_mode(True)
        logprobs_M, _, _ = self._passes.forward(self._passes.pack([]))
        (0.0 * logprobs_M.sum()).backward()

    def _add_gradient(self, micro: list[Sample], counts: Counts) -> Sums:
        """Compute loss and gradient of one micro-batch, of policy and critic."""
        batch = self._passes.pack(micro)
        with torch.set_grad_enabled(not self._policy_waits):
            self._train_mode(True)
            logprobs_M, entropy_M, hidden_ME = self._passes.forward(batch)
            entropy_M = entropy_M if self.algorithm.entropy_coef else entropy_M.detach()
            batch = batch.with_streams(logprobs=batch.unpack(logprobs_M), entropy=batch.unpack(entropy_M))
            loss, sums = self.objective(batch, counts)
        if not self._policy_waits:
            loss.backward()
            self._passes.count_backward(batch)
        if self.critic is not None:
            sums |= self.critic.learn(batch, hidden_ME.detach(), counts.tokens)
        return sums

    @property
    def _policy_waits(self) -> bool:
        """Whether only the critic learns in this step."""
        return self.policy_version < self._critic_only_steps

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        if divisor != 1.0:
            assert self.critic is None, "the critic's gradient is divided by its own tokens"
            self.optimizer.scale_gradients(1 / divisor)
        if self._policy_waits:
            self.optimizer.forget_gradients()
            update = {"grad_norm": 0.0, "learning_rate": 0.0, "train/skipped_steps": 0.0}
        else:
            update = self.optimizer.step(rate_scale)
        if self.critic is not None:
            update |= self.critic.step()
        if ends_step:
            self._train_mode(False)
            self._version += 1
            self._versions.on_version(self._version)
        return update

    def forget_gradients(self) -> None:
        self.optimizer.forget_gradients()
        if self.critic is not None:
            self.critic.forget_gradients()

    async def publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._weights()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.lora:
            yield from ((name, parameter.detach()) for name, parameter in self._plain.named_parameters())
            return
        if self._merges_lora:
            yield from merged_weights(self._plain)
            return
        if not self._published:
            yield from base_weights(self._plain)
        yield from adapter_weights(self._plain)
        self._published = True

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        """Sample with the engine of the backend (`sample_with`)."""
        return await sample_with(self, self.engine, requests)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, meta = self.optimizer.state()
        tensors["random/cpu"] = torch.get_rng_state()  # LoRA's dropout draws from it
        tensors |= devices.random_state(self.device)
        rest = {"policy_version": self.policy_version, "optimizer": meta}
        if self.critic is not None:
            of_critic, rest["critic"] = self.critic.state()
            tensors |= of_critic
        return tensors | self.kept.state(), rest

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.optimizer.load_state(tensors, meta["optimizer"])
        self.kept.load_state(tensors)
        self._version = meta["policy_version"]
        self._versions.check(self.policy_version)
        if self.critic is not None:
            if "critic" not in meta:
                raise ValueError('the checkpoint has no critic: algorithm.advantage was not "gae". Set it back')
            self.critic.load_state(tensors, meta["critic"])
        if "random/cpu" in tensors:
            torch.set_rng_state(tensors["random/cpu"])
        devices.set_random_state(self.device, tensors)

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        self.load_state(stored, meta)

    def save_model(self, folder: Path) -> None:
        """Write a folder that from_pretrained loads: compute dtype, adapters merged, tokenizer included.

        The adapters are also saved beside it in float32, for peft: merging rounds small updates away.
        """
        model = self._plain
        tensors = dict(merged_weights(model)) | stored_buffers(model) if self.lora else model.state_dict()
        write_folder(folder, model, tensors, self._loaded, self._base)
        if self.lora:
            save_adapter(self.model, self.optimizer.weights(), folder / ADAPTER, self._base)
            give_usual_modes(folder)
