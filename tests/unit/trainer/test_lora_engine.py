"""The engine computes adapters beside the frozen weights: it samples from what the trainer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, Config, EngineConfig, LoraConfig, ModelConfig, RunConfig, TrainConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.adapters import names
from rollover.models.load import cast_parameters, load_model
from rollover.run.setup import EvalComponents
from rollover.trainer.batch import Batch
from rollover.trainer.trainer import Trainer
from rollover.types import Prompt, Sample, SamplingParams
from samples import random_samples
from virtual_time import at_once

# Of these, query_key_value has an adapter in two of its three parts, and gate_up in one of two.
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
# Packed weights; weights as the modules have them (biases too); the modules themselves.
FAMILIES = ("llama", "qwen2", "gemma3_text")


def trained(
    family: str, dtype: torch.dtype, *, alpha: float = 8.0, steps: int = 20, base: Path | None = None
) -> Trainer:
    torch.manual_seed(3)
    trainer = local_trainer(
        tiny.loaded(family) if base is None else load_model(ModelConfig(path=str(base))),
        TrainConfig(learning_rate=1e-5, num_steps=steps),
        AlgorithmConfig(),
        dtype=dtype,
        max_new_tokens=16,
        lora=LoraConfig(rank=4, alpha=alpha, target_modules=TARGETS),
    )
    for _ in range(steps):
        trainer.train_step(Batch(random_samples(1)))
    return trainer


def make_engine(family: str, dtype: torch.dtype) -> EmbeddedEngine:
    model = tiny.model(family)
    cast_parameters(model, dtype)
    return EmbeddedEngine(model.requires_grad_(False), EngineConfig(kv_memory_gb=0.1))


def sampled(engine: EmbeddedEngine) -> list[Sample]:
    """16 rollouts of 24 tokens."""
    requests = [
        ExtendRequest(str(i), Prompt.of(range(3 + i, 20 + i)), (), 24, i, SamplingParams(temperature=1.0))
        for i in range(16)
    ]

    async def all_of_them() -> list[Sample]:
        out = []
        for request, segments in zip(
            requests, await asyncio.gather(*(engine.extend(r) for r in requests)), strict=True
        ):
            (segment,) = segments
            zeros = np.zeros(len(segment))
            prompt_ids = np.array(request.prompt.ids, dtype=np.int32)
            out.append(
                Sample(
                    request.rollout_id,
                    int(request.rollout_id),
                    prompt_ids,
                    segment.token_ids,
                    zeros == 0,
                    {
                        "behavior_logprobs": segment.logprobs,
                        "versions": zeros.astype(np.int32),
                        "advantages": zeros.astype(np.float32),
                    },
                    1.0,
                )
            )
        return out

    return asyncio.run(all_of_them())


def difference(trainer: Trainer, family: str, dtype: torch.dtype, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
    """Mean difference between the log-probs of an engine with these weights, of what it samples, and the trainer's."""
    engine = make_engine(family, dtype)
    at_once(engine.load_weights(1, tensors))
    samples = sampled(engine)
    ours = trainer.backend.compute_logprobs(samples)
    return float(np.mean([np.abs(ours[s.rollout_id] - s.behavior_logprobs).mean() for s in samples]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_trainer_agree_after_training(family: str, dtype: torch.dtype) -> None:
    """In bfloat16 as well as before any update. Weights merged and rounded to bfloat16 are 0.001 nats off."""
    trainer = trained(family, dtype)
    before = difference(trained(family, dtype, steps=0), family, dtype, [])
    tensors = dict(at_once(trainer.backend.publish()))
    assert difference(trainer, family, dtype, tensors.items()) < max(1.2 * before, 1e-4)
    moved = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    assert difference(trainer, family, dtype, moved.items()) > 2e-4, "the training is not to be seen"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_scale_that_bfloat16_has_not_agrees_too(family: str) -> None:
    trainer = trained(family, torch.bfloat16, alpha=5.3)
    assert difference(trainer, family, torch.bfloat16, at_once(trainer.backend.publish())) < 1e-4


def test_what_a_run_saved_is_evaluated_as_it_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapters beside the base model's weights; where that is gone, the merged weights, and it is said."""
    base, saved = tiny.save(tmp_path / "base"), tmp_path / "run" / "model"
    trainer = trained("llama", torch.bfloat16, base=base)
    trainer.backend.save_model(saved)
    config = Config(
        model=ModelConfig(dtype="bfloat16"),
        engine=EngineConfig(kv_memory_gb=0.1),
        run=RunConfig(threads=torch.get_num_threads()),
    )

    def apart() -> float:
        samples = sampled(at_once(EvalComponents.build(config, str(saved), with_rewards=False)).engine)
        ours = trainer.backend.compute_logprobs(samples)
        return float(np.mean([np.abs(ours[s.rollout_id] - s.behavior_logprobs).mean() for s in samples]))

    assert apart() < 1e-4
    assert f"{saved}: its adapters are used over {base}: merged, small updates" in capsys.readouterr().err
    base.rename(tmp_path / "elsewhere")
    assert apart() > 2e-4
    assert "the merged weights are used, in which small updates are rounded away" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_later_hand_overs_hold_adapters_alone_and_suffice(family: str) -> None:
    trainer = trained(family, torch.bfloat16, steps=1)
    engine = make_engine(family, torch.bfloat16)
    first = list(at_once(trainer.backend.publish()))
    at_once(engine.load_weights(1, first))
    for _ in range(3):
        trainer.train_step(Batch(random_samples(1)))
    second = {name: tensor.clone() for name, tensor in at_once(trainer.backend.publish())}
    layers = {name.removesuffix(".weight") for name, _ in first if any(f".{t}.weight" in name for t in TARGETS)}
    assert second.keys() == {part for layer in layers for part in names(layer)}
    cost = at_once(engine.load_weights(2, second.items()))
    assert cost.num_bytes == sum(t.numel() * t.element_size() for t in second.values())
    whole = make_engine(family, torch.bfloat16)
    at_once(whole.load_weights(2, [*first, *second.items()]))
    for a, b in zip(sampled(engine), sampled(whole), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.behavior_logprobs, b.behavior_logprobs)


def test_the_engine_keeps_a_copy() -> None:
    """What is handed over are views of what is trained on."""
    trainer = trained("llama", torch.float32, steps=1)
    engine = make_engine("llama", torch.float32)
    at_once(engine.load_weights(1, at_once(trainer.backend.publish())))
    before = sampled(engine)
    for _ in range(5):
        trainer.train_step(Batch(random_samples(1)))
    for a, b in zip(before, sampled(engine), strict=True):
        assert np.array_equal(a.behavior_logprobs, b.behavior_logprobs)
