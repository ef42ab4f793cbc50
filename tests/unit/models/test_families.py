"""docs/models.md: a family that runs agrees with transformers' eager attention, any other is refused as it says."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models_table
import tiny
from models_table import FAMILIES, VOCABULARY
from rollover.config import EngineConfig, ModelConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.attention import PackedAttention, check_model, hidden_states
from rollover.models.load import cast_parameters, load_model
from rollover.models.logprobs import Head, chunked_logprobs
from rollover.types import Prompt, SamplingParams, Segment
from virtual_time import at_once

DOCUMENTED = models_table.read_table(models_table.DOC.read_text())
RUN = [family for family in FAMILIES if not DOCUMENTED[family].startswith("refused")]
NATS = 1e-4
# The first two share a prompt, which is longer than the windows of families that have one.
PROMPTS = [tuple(range(5, 25)), tuple(range(5, 25)), (7, 90, 3), (11,)]
NEW_TOKENS = 6


def test_the_page_has_every_family_once() -> None:
    assert list(DOCUMENTED) == sorted(FAMILIES, key=lambda family: DOCUMENTED[family].startswith("refused"))
    assert len(RUN) >= 50


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in RUN])
def test_is_refused_as_the_page_says(family: str) -> None:
    assert models_table.verdict(family) == DOCUMENTED[family]


@torch.no_grad()
def eager_logprobs(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> np.ndarray:
    """Log-probs of the tokens after the prompt, by one plain forward pass of transformers alone."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@torch.no_grad()
def trainer_logprobs(model: Any, rows: list[tuple[tuple[int, ...], list[int]]]) -> list[np.ndarray]:
    """The same of all rows packed into one, as the trainer computes them."""
    lengths = [len(prompt) + len(tokens) for prompt, tokens in rows]
    ids = torch.tensor([i for prompt, tokens in rows for i in (*prompt, *tokens)])
    hidden = hidden_states(model, ids, torch.cat([torch.arange(n) for n in lengths]), PackedAttention(lengths))
    logprobs, _ = chunked_logprobs(hidden, Head.from_model(model), ids.roll(-1), torch.ones(len(ids)))
    parts = logprobs.split(lengths)
    return [part[len(prompt) - 1 : -1].numpy() for part, (prompt, _) in zip(parts, rows, strict=True)]


@pytest.mark.parametrize(("family", "sizes"), [("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2}), ("phi", {})])
def test_layer_norms_accept_float32_in_bfloat16_model(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny.save(tmp_path, family, **sizes)), device="cpu")
    ids = torch.arange(5, 25)
    hidden = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(config).model
        cast_parameters(model, dtype)
        hidden[dtype] = hidden_states(model, ids, torch.arange(20), PackedAttention([20]))
        hidden[dtype].sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    exact, rounded = (states.detach() for states in hidden.values())
    assert rounded.dtype == torch.float32 and 0 < float((rounded - exact).norm() / exact.norm()) < 0.05


def sampled(engine: EmbeddedEngine) -> list[Segment]:
    requests = [
        ExtendRequest(str(i), Prompt(prompt), (), NEW_TOKENS, i, SamplingParams(temperature=1.0))
        for i, prompt in enumerate(PROMPTS)
    ]

    async def go() -> list[Segment]:
        return [segment for (segment,) in await asyncio.gather(*(engine.extend(r) for r in requests))]

    return asyncio.run(go())


@pytest.mark.parametrize("family", RUN)
def test_agrees_with_eager_attention(family: str) -> None:
    """Trainer and engine, before a weight update and after it."""
    model, new = models_table.build(family), models_table.build(family, seed=1)
    assert models_table.verdict_of(model) == DOCUMENTED[family]
    check_model(new)
    engine = EmbeddedEngine(copy.deepcopy(model).requires_grad_(False), EngineConfig(kv_memory_gb=0.05))
    assert engine.max_tokens >= 64
    eager = models_table.build(family, attention="eager")
    seen = []
    for version, weights in enumerate((model, new)):
        eager.load_state_dict(weights.state_dict())
        at_once(engine.load_weights(version, ((n, p.detach()) for n, p in weights.named_parameters())))
        segments = sampled(engine)
        seen.append([s.logprobs.tolist() for s in segments])
        rows = [(prompt, s.token_ids.tolist()) for prompt, s in zip(PROMPTS, segments, strict=True)]
        assert all(0 <= token < VOCABULARY for _, tokens in rows for token in tokens)
        for (prompt, tokens), segment, ours in zip(rows, segments, trainer_logprobs(weights, rows), strict=True):
            expected = eager_logprobs(eager, prompt, tokens)
            np.testing.assert_allclose(segment.logprobs, expected, atol=NATS, rtol=0)
            np.testing.assert_allclose(ours, expected, atol=NATS, rtol=0)
    assert seen[0] != seen[1], "the update is not to be seen"
