"""What every test gets: one torch thread, no network, deterministic hypothesis, and skips for missing hardware."""

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere: bit equality is claimed for fixed threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("hypothesis"):  # a GPU machine may have pytest alone
    from hypothesis import settings

    settings.register_profile("rollover", deadline=None, derandomize=True, database=None)
    settings.load_profile("rollover")


@pytest.fixture(autouse=True)
def _collected_messages() -> Iterator[None]:
    """Messages that a test collects (heard.py) are its own."""
    yield
    if "heard" in sys.modules:
        sys.modules["heard"].end()


def _missing(marker: str) -> str | None:
    """Why tests with `marker` cannot run here; None if they can."""
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    if marker == "vllm":
        from vllm_peer import python

        return None if python() else "`make vllm` was not run"
    if marker == "browser":
        import chromium

        return chromium.missing() or None
    return None if importlib.util.find_spec(marker) else f"{marker} is not installed"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("gpu", "vllm", "ray", "verifiers", "browser"):
        if item.get_closest_marker(marker) and (reason := _missing(marker)):
            pytest.skip(reason)
