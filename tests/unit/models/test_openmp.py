"""Compiled kernels where another OpenMP library is loaded beside torch's, as scikit-learn or conda's MKL bring one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from heard import hear
from rollover.config import Config
from rollover.models import kernels
from rollover.run.setup import Components

PROGRAM = """
import ctypes, os, shutil, sys, warnings
warnings.simplefilter("error")
import torch
torch.set_num_threads(3)
torch.randn(512, 512) @ torch.randn(512, 512)
torch.randn(3_000_000).exp()

def loaded():
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}

(own,) = loaded()
ctypes.CDLL(shutil.copy(own, sys.argv[1] + "/libgomp-of-another.so"))
assert len(loaded()) == 2, loaded()
from rollover.models import kernels
compiled = kernels.for_device("cpu")
assert kernels.unavailable_reason("cpu") == ""
team = len(os.listdir("/proc/self/task"))
gates = torch.randn(2000, 512)
gate, up = gates.chunk(2, -1)
assert torch.allclose(compiled.silu_gate(gates), torch.nn.functional.silu(gate) * up, atol=1e-6)
assert len(os.listdir("/proc/self/task")) == team, "a second team of threads"
"""


def test_second_openmp_library_does_not_affect_kernels(tmp_path: Path) -> None:
    tiny.compiled_kernels()
    if not any("libgomp" in line for line in Path("/proc/self/maps").read_text().splitlines()):
        pytest.skip("torch has another OpenMP library than libgomp here")
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_why_there_are_none_is_said_without_asking_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise kernels.KernelsUnavailable("there is no C++ compiler")

    assert kernels.unavailable_reason("cuda") == "", "none are needed"
    monkeypatch.setattr(kernels, "load", unavailable)
    assert (
        kernels.unavailable_reason("cpu")
        == "slower than it could be, without compiled kernels: there is no C++ compiler"
    )


def test_a_run_says_that_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its start is shown, and in a metric of every step."""
    said: list[str] = hear([])
    reason = "slower than it could be, without compiled kernels: it is Monday"
    monkeypatch.setattr(kernels, "unavailable_reason", lambda kind: reason if kind == "cpu" else "")
    monkeypatch.setattr(kernels, "for_device", lambda kind: None)
    config = Config.model_validate(
        {
            "model": {"path": str(tiny.save(tmp_path)), "device": "cpu"},
            "tasks": {"sources": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
            "run": {"threads": 1},
        }
    )
    components = asyncio.run(Components.build(config))
    assert said == [reason]
    assert components.engine.stats()["engine/kernels"] == 0.0
    monkeypatch.undo()
    tiny.compiled_kernels()
    assert asyncio.run(Components.build(config)).engine.stats()["engine/kernels"] == 1.0 and said == [reason]
