"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: their own tests, in an interpreter with both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Straight to the library, past the checks of kernels.py: a token id behind the last row of logits.
BEYOND = """
import torch
from rollover.models import kernels
function = kernels.load()._functions["logprobs", torch.float32]
logits, targets, ones = torch.zeros(2, 1000), torch.tensor([3, 1001]), torch.ones(4, 2)
function(*(x.data_ptr() for x in (logits, targets, *ones)), 2, 1000, 1)
print("not noticed")
"""
# A vector of floats read from where none may begin.
UNALIGNED = """
import torch
from rollover.models import kernels
function = kernels.load()._functions["silu_gate", torch.float32]
x = torch.zeros(100)
function(x.data_ptr() + 1, torch.zeros(100).data_ptr(), 1, 8, 1)
print("not noticed")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which kernels are compiled with both sanitizers, into a cache of their own."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("sanitized")
    # -O1, last, is the one that counts: with -O3 and both sanitizers the compiler takes minutes for each processor.
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1"
    wrapper = folder / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {flags}\n')
    wrapper.chmod(0o755)
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(Path(library).is_absolute() for library in found):
        pytest.skip("g++ has no libasan and libubsan")
    return os.environ | {
        "CXX": str(wrapper),
        "ROLLOVER_CACHE": str(folder),
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "2",  # two threads write side by side
    }


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=3000)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "message"), [(BEYOND, "heap-buffer-overflow"), (UNALIGNED, "misaligned address")])
def test_what_they_are_there_for_is_noticed(environment: dict[str, str], code: str, message: str) -> None:
    done = run(environment, "-c", code)
    assert done.returncode != 0 and message in done.stderr and "not noticed" not in done.stdout, done.stderr


@pytest.mark.slow
def test_the_kernels_own_tests_pass(environment: dict[str, str]) -> None:
    files = [str(TESTS / name) for name in ("test_kernels.py", "test_kernel_doors.py")]
    done = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " skipped" not in done.stdout, done.stdout[-500:]
