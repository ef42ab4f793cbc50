from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from vllm_server.serving import VllmServer, alive, descendants, memory_files, wait_until

# vLLM's attention for the CPU knows no smaller heads.
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def reference(seed: int) -> Any:
    """A model that computes by transformers' own attention."""
    model = tiny.model(seed=seed, **SHAPE)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="session")
def old() -> Any:
    """The model that the server starts with."""
    return reference(0)


@pytest.fixture(scope="session")
def new() -> Any:
    """Another one of its shape, far from it."""
    return reference(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), seed=0, **SHAPE)


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One for the whole session, which its tests leave running. At last it gets SIGTERM, and leaves nothing behind."""
    torch.set_num_threads(1)
    running = VllmServer(model_folder, tmp_path_factory.mktemp("server"), token="secret")
    yield running
    everyone = {*descendants(running.process.pid), running.process.pid}
    files = memory_files(everyone)
    assert files
    running.process.terminate()
    wait_until(lambda: running.process.poll() is not None)
    code = running.process.returncode
    try:
        wait_until(lambda: not alive(everyone))
        wait_until(lambda: not any(file.exists() for file in files))
        assert code == 0
    finally:
        running.close()
