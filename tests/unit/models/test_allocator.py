"""What a process keeps of the shapes that it computed with is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rollover.models.packed import PackedWeight

# Matmuls over ever new numbers of tokens, as prefills have them. Prints the bytes that are in use after each hundred.
PREFILLS = """
import ctypes, sys
import torch
from rollover.config import Config
from rollover.models.threads import prepare_process

class Info(ctypes.Structure):  # malloc.h
    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(7)] + [("in_use", ctypes.c_size_t)] + [
        (f"_{i}", ctypes.c_size_t) for i in range(8, 10)
    ]

libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info
prepare_process(Config())
torch.set_num_threads(1)
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for tokens in range(1, 401):
    torch.nn.functional.linear(torch.ones(tokens, 64, dtype=torch.bfloat16), weight)
    if tokens % 100 == 0:
        print(libc.mallinfo2().in_use)
"""
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def in_use(**variables: str) -> list[int]:
    environment = {name: value for name, value in os.environ.items() if name not in CAPACITIES} | variables
    done = subprocess.run([sys.executable, "-c", PREFILLS], env=environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_prefills_of_ever_new_lengths_do_not_let_memory_grow() -> None:
    """Where the user allows more, it does: 200 shapes of a matmul take far more than a few megabytes."""
    if not sys.platform.startswith("linux") or not PackedWeight.supported(torch.device("cpu"), torch.bfloat16):
        pytest.skip("bfloat16 is not computed by oneDNN here, or memory is not glibc's")
    _, after_200, _, after_400 = in_use()
    assert after_400 - after_200 < 5e6
    _, after_200, _, after_400 = in_use(**dict.fromkeys(CAPACITIES, "1024"))
    assert after_400 - after_200 > 50e6
