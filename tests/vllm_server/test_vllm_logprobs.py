"""vLLM's log-probs are the trainer's, within what the dtype allows: of first weights, and of trained ones."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from contract.engine_contract import logprobs_of, tokens_of
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, ModelConfig, TrainConfig
from rollover.engine.protocol import ExtendRequest
from rollover.engine.remote.engine import RemoteEngine
from rollover.models.load import LoadedModel, load_model
from rollover.trainer.trainer import Trainer
from rollover.types import Prompt, Sample, SamplingParams, Segment, rollout_seed
from vllm_server.engines import ARGS, engine
from vllm_server.serving import VllmServer

pytestmark = pytest.mark.vllm

NEW_TOKENS = 64
QUESTIONS = ["What is 3 + 4?", "Solve the following multiplication: 7 * 8.", "Count from 1 to 20."]


def requests_of(loaded: LoadedModel, version: int, temperature: float) -> list[ExtendRequest]:
    """Four rollouts of each question."""
    out = []
    for g, question in enumerate(QUESTIONS):
        prompt = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for s in range(4):
            seed = rollout_seed(version, question, 0, s)
            sampling = SamplingParams(temperature=temperature)
            out.append(ExtendRequest(f"{g}-{s}", Prompt.of(prompt), (), NEW_TOKENS, seed, sampling))
    return out


def sample(request: ExtendRequest, segments: list[Segment]) -> Sample:
    tokens = np.array(tokens_of(segments), dtype=np.int32)
    return Sample(
        rollout_id=request.rollout_id,
        group_id=int(request.rollout_id[0]),
        prompt_ids=np.asarray(request.prompt.ids, dtype=np.int32),
        token_ids=tokens,
        mask=np.ones(len(tokens), dtype=bool),
        streams={
            "behavior_logprobs": logprobs_of(segments),
            "versions": np.zeros(len(tokens), dtype=np.int32),
            "advantages": np.zeros(len(tokens), dtype=np.float32),
        },
        temperature=request.sampling.temperature,
    )


async def differences(
    made: RemoteEngine, trainer: Trainer, loaded: LoadedModel, version: int, temperature: float
) -> np.ndarray:
    """|log-prob of the engine - log-prob of the trainer| of each sampled token, in nats."""
    asked = requests_of(loaded, version, temperature)
    answers = await asyncio.gather(*map(made.extend, asked))
    samples = [sample(request, segments) for request, segments in zip(asked, answers, strict=True)]
    ours = trainer.backend.compute_logprobs(samples)
    assert {s.policy_version for segments in answers for s in segments} == {version}
    found = np.abs(np.concatenate([ours[s.rollout_id] - s.behavior_logprobs for s in samples]))
    assert len(found) == NEW_TOKENS * len(asked)
    print(f"version {version}: max {found.max():.2e}, mean {found.mean():.2e} nats over {len(found)} tokens")
    return found


def changed(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    """Move the trainer's weights by a twentieth of their spread; returns them."""
    model = tiny.local(trainer).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std().nan_to_num(0.0)
            parameter.add_((0.05 * noise).to(parameter.dtype))
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def check(
    made: RemoteEngine, loaded: LoadedModel, dtype: torch.dtype, most: float, mean: float, temperature: float
) -> None:
    trainer = local_trainer(loaded, TrainConfig(), AlgorithmConfig(), dtype=dtype, max_new_tokens=NEW_TOKENS)

    async def work() -> None:
        try:
            first = await differences(made, trainer, loaded, 0, temperature)
            assert first.max() < most and first.mean() < mean
            weights = changed(trainer)
            stale = await differences(made, trainer, loaded, 0, temperature)
            assert stale.mean() > 2 * mean, "that the weights are others is to be seen"
            await made.load_weights(1, weights)
            later = await differences(made, trainer, loaded, 1, temperature)
            assert later.max() < most and later.mean() < mean
        finally:
            await made.close()

    asyncio.run(asyncio.wait_for(work(), 550))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_float32(
    server: VllmServer, old: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)
    made = engine(old, model_folder, urls=[server.url])
    check(made, load_model(ModelConfig(path=str(model_folder))), torch.float32, 1e-4, 1e-5, temperature)


def test_in_bfloat16_of_a_real_model() -> None:
    """The one server with a real model."""
    loaded = load_model(ModelConfig(path="smollm2-135m"))
    options = {"dtype": "bfloat16", "num_servers": 1, "server": "vllm", "vllm_args": ARGS, "kv_memory_gb": 0.5}
    check(engine(loaded.model, "smollm2-135m", **options), loaded, torch.bfloat16, math.inf, 0.05, 1.0)
