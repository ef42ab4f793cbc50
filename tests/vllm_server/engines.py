"""Engines over vLLM's servers, and the trainer that they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from contract import engine_contract
from rollover.config import Config
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup

ARGS = ["--enforce-eager", "--max-model-len", "1024"]


def config(folder: Path | str, *, dtype: str = "float32", grace_s: float = 30.0, **engine: Any) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": dtype},
        "engine": {"kind": "remote", "max_running": 8, **engine},
        "rollout": {"interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1},
        "watchdog": {"grace_s": grace_s},
        "algorithm": {"loss": "reinforce"},
    }
    return Config.model_validate(values)


def engine(model: Any, folder: Path | str, **options: Any) -> RemoteEngine:
    """Over the servers of `options`, which get the weights of `model`."""
    setup = RemoteSetup(config(folder, **options), lambda: list(model.named_parameters()), tiny.tokenizer().decode)
    return RemoteEngine(setup)


def subject(make: Any, model: Any) -> engine_contract.Subject:
    return engine_contract.Subject(
        make_engine=make,
        prompts=[tuple(range(5, 15)), (7, 8, 9), (20,)],
        tensors=lambda: list(model.named_parameters()),
        decode_text=tiny.tokenizer().decode,
        resumes_exactly=False,
        processes_logits=True,
    )
