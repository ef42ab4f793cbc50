"""The embedded engine under the contract: every KV policy, and a KV memory that is short."""

from __future__ import annotations

import asyncio

import pytest

import tiny
from contract import engine_contract
from rollover.config import EngineConfig
from rollover.engine.embedded.engine import EmbeddedEngine

PROMPTS = [(5, 6, 7, 8), (9, 10), (5, 6, 7, 8, 9, 10, 11)]


def subject(family: str, kv_on_resume, keeps_kv: bool = True, **config: float) -> engine_contract.Subject:
    def model():
        return tiny.model(family, head_dim=32)  # which the compiled kernel prefills

    def make_engine() -> EmbeddedEngine:
        engine_config = EngineConfig.model_validate(config)
        return EmbeddedEngine(model(), engine_config, kv_on_resume=kv_on_resume, tokenizer=tiny.tokenizer())

    def tensors():
        return model().named_parameters()

    return engine_contract.Subject(
        make_engine=make_engine,
        prompts=PROMPTS,
        tensors=tensors,
        stop_token_ids=frozenset({3, 4}),
        decode_text=tiny.tokenizer().decode,
        keeps_kv=keeps_kv,
        processes_logits=True,
    )


SUBJECTS = {
    "recompute": subject("llama", "recompute"),
    "keep": subject("llama", "keep"),
    "salt": subject("qwen3", "salt"),
    "modules": subject("gemma3_text", "recompute"),
    "short of memory": subject("llama", "recompute", False, kv_memory_gb=0.00024, prefill_chunk_tokens=4),
}


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_embedded_engine(check, name: str) -> None:
    asyncio.run(check(SUBJECTS[name]))
