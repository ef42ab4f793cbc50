"""The CUDA paths: engine and trainer agree with each other and with the CPU."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import numpy as np
import pytest
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, EngineConfig, TrainConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import cast_parameters
from rollover.trainer.batch import Batch
from rollover.types import Prompt, Sample, SamplingParams, rollout_seed
from virtual_time import at_once

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_engine_and_trainer_agree_and_train(family: str, dtype: torch.dtype, limit: float) -> None:
    loaded = tiny.loaded(family)
    loaded = dataclasses.replace(loaded, model=loaded.model.to("cuda"))
    model = copy.deepcopy(loaded.model)
    cast_parameters(model, dtype)
    engine = EmbeddedEngine(model, EngineConfig())
    prompt = tuple(tiny.tokenizer()("count to 7")["input_ids"])
    requests = [
        ExtendRequest(f"0-{s}", Prompt(prompt), (), 30 + s, rollout_seed(0, "t", 0, s), SamplingParams())
        for s in range(4)
    ]

    async def go():
        return await asyncio.gather(*[engine.extend(r) for r in requests])

    samples = [
        Sample(
            rollout_id=r.rollout_id,
            group_id=0,
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            token_ids=segment.token_ids,
            mask=np.ones(len(segment), dtype=bool),
            streams={
                "behavior_logprobs": segment.logprobs,
                "versions": np.zeros(len(segment), dtype=np.int32),
                "advantages": np.full(len(segment), (-1.0) ** i, dtype=np.float32),
            },
            temperature=1.0,
        )
        for i, (r, (segment,)) in enumerate(zip(requests, asyncio.run(go()), strict=True))
    ]
    trainer = local_trainer(loaded, TrainConfig(learning_rate=1e-3), AlgorithmConfig(), dtype=dtype, max_new_tokens=64)
    logprobs = trainer.backend.compute_logprobs(samples)
    difference = np.abs(np.concatenate([logprobs[s.rollout_id] - s.behavior_logprobs for s in samples]))
    assert difference.mean() < limit
    metrics = trainer.train_step(Batch(samples))
    assert metrics["ratio/max"] == 1.0 and np.isfinite(metrics["grad_norm"])
    assert at_once(engine.load_weights(1, at_once(trainer.backend.publish()))).num_bytes > 0
