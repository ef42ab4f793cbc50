from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from vllm_server.serving import SHAPE, VllmServer, alive, descendants, memory_files, wait_until, write_weights


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


@pytest.fixture
def restored(server: VllmServer, old: Any, tmp_path: Path) -> None:
    """The server has the weights that it started with, whatever the test before left."""
    if server.label not in ("default", "t/0"):
        assert server.update(write_weights(old, tmp_path), "t/0") == 200
