"""kernels.cpp and its headers, compiled once for this machine: the decoder's small operations on a CPU.

Shapes: N tokens, E hidden size, I inner size of the MLP, H query heads, K key/value heads, D head size, V vocabulary.

A decode step of a small model is about a thousand torch operations of microseconds each; these are a few per layer, and
attention reads what is cached of each sequence and no more. Without a C++ compiler torch does it all, more slowly.
The library lies in Rollover's cache folder under a name that tells source, compiler, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from rollover.models.operations import Norm
from rollover.models.smollm2 import cache_root
from rollover.types import SamplingParams

_SOURCE = Path(__file__).with_suffix(".cpp")
_HEADERS = sorted(_SOURCE.parent.glob("kernels_*.h"))
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ARGUMENTS = {
    "add_norm": (*(c_void_p,) * 3, c_float, *(c_void_p,) * 2, *(c_int64,) * 2, c_int),
    "last_norm": (*(c_void_p,) * 3, c_float, *(c_void_p,) * 2, *(c_int64,) * 2, c_int),
    "rotate": (*(c_void_p,) * 5, c_float, *(c_void_p,) * 2, *(c_int64,) * 4, c_int),
    "silu_gate": (*(c_void_p,) * 2, *(c_int64,) * 2, c_int),
    "cached_attention": (
        *(c_void_p,) * 3, c_int64, *(c_void_p,) * 4, c_int64, c_float, c_void_p, *(c_int64,) * 4, c_int,
    ),
    "draw": (*(c_void_p,) * 8, *(c_int64,) * 2, c_int),
    "logprobs": (*(c_void_p,) * 6, *(c_int64,) * 2, c_int),
    "logprobs_backward": (*(c_void_p,) * 5, *(c_int64,) * 2, c_int),
    "norm_backward": (*(c_void_p,) * 6, *(c_int64,) * 2, c_int),
}  # fmt: skip


class KernelsUnavailable(Exception):
    """They cannot be had here; the message says why."""


def _openmp_library() -> str:
    """The OpenMP library that torch has loaded: a second one would have threads of its own, in each other's way."""
    try:
        paths = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)\S*\.so\S*", Path("/proc/self/maps").read_text()))
    except OSError:
        paths = set()
    if len(paths) != 1:
        raise KernelsUnavailable(f"{len(paths)} OpenMP libraries are loaded, and one is needed")
    return paths.pop()


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return platform.machine() + "".join(sorted(features))


def _build(flags: tuple[str, ...]) -> Path:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise KernelsUnavailable("there is no C++ compiler (c++, g++ or clang++, or the one named by $CXX)")
    openmp = _openmp_library()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        sources = [path.read_bytes() for path in (_SOURCE, *_HEADERS)]
        identity = [*sources, version, " ".join(flags).encode(), openmp.encode(), _processor().encode()]
        name = hashlib.blake2b(b"\0".join(identity), digest_size=16).hexdigest()
        folder = cache_root() / "kernels"
        target = folder / f"{name}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            compiled, linked = f"{work}/kernels.o", f"{work}/kernels.so"
            for command in (
                [compiler, *flags, "-c", str(_SOURCE), "-o", compiled],
                [compiler, "-shared", compiled, openmp, "-o", linked],
            ):
                subprocess.run(command, capture_output=True, check=True, timeout=300)
            os.replace(linked, target)  # several processes may build it at once
        return target
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()
        raise KernelsUnavailable(f"{compiler} failed: {reason[-1] if reason else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(str(error)) from error


@functools.cache
def load(flags: tuple[str, ...] = _FLAGS) -> Kernels:
    """The compiled operations; the first call on a machine takes seconds. KernelsUnavailable where that fails."""
    path = _build(flags)
    try:
        return Kernels(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{path}: {error}; delete the file") from error


@functools.cache
def on(device_type: str) -> Kernels | None:
    """The compiled operations if they can be had for this kind of device ("cpu"); warns once if not."""
    if device_type != "cpu":
        return None
    try:
        return load()
    except KernelsUnavailable as error:
        warnings.warn(f"slower than it could be, without compiled kernels: {error}", stacklevel=2)
        return None


def _pointer(tensor: torch.Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


class Kernels:
    """Operations (models/operations.py), cached attention, the draw. Float32 or bfloat16, contiguous, on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for function, arguments in _ARGUMENTS.items():
            for dtype, name in _NAMES.items():
                symbol = getattr(library, f"{function}_{name}")
                symbol.argtypes, symbol.restype = arguments, None
                self._functions[function, dtype] = symbol

    def add_norm(self, x_NE: torch.Tensor, y_NE: torch.Tensor | None, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
        out_NE = torch.empty(x_NE.shape, dtype=dtype)
        kind = dtype if y_NE is None else y_NE.dtype
        function = self._functions["add_norm" if dtype == kind else "last_norm", kind]
        assert dtype in (kind, torch.float32) and x_NE.dtype == torch.float32
        function(
            _pointer(x_NE), _pointer(y_NE), _pointer(norm.weight), norm.eps, _pointer(out_NE), None, *x_NE.shape,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_NE

    def rotate(
        self,
        query_key_value: torch.Tensor,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
        norms: tuple[Norm, Norm] | None,
        heads: int,
        kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num, size = cos_ND.shape
        assert query_key_value.shape == (num, (heads + 2 * kv_heads) * size)
        assert cos_ND.dtype == sin_ND.dtype == torch.float32
        query_NHD = query_key_value.new_empty(num, heads, size)
        key_NKD = query_key_value.new_empty(num, kv_heads, size)
        weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
        self._functions["rotate", query_key_value.dtype](
            _pointer(query_key_value), _pointer(cos_ND), _pointer(sin_ND), *map(_pointer, weights),
            0.0 if norms is None else norms[0].eps, _pointer(query_NHD), _pointer(key_NKD),
            num, heads, kv_heads, size, torch.get_num_threads(),
        )  # fmt: skip
        return query_NHD, key_NKD

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        num, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out_NI = gate_up.new_empty(num, inner)
        self._functions["silu_gate", gate_up.dtype](
            _pointer(gate_up), _pointer(out_NI), num, inner, torch.get_num_threads()
        )
        return out_NI

    def cached_attention(
        self,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        key_rows_N: torch.Tensor,
        value_rows_N: torch.Tensor,
        head_strides_N: torch.Tensor,
        positions_N: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Writes the tokens' keys and values to the cache, then each attends to it up to itself; [N, H, D].

        key_rows, value_rows: addresses of the [K, row length, D] of each token's sequence; head_strides: numbers from
        one head of it to the next; positions: where the token goes (all int64). `value_NKD` may be a part of a wider
        row.
        """
        num, heads, size = query_NHD.shape
        kv_heads = key_NKD.shape[1]
        if value_NKD.stride()[1:] != (size, 1):
            value_NKD = value_NKD.contiguous()
        assert query_NHD.dtype == key_NKD.dtype == value_NKD.dtype
        out_NHD = torch.empty_like(query_NHD)
        self._functions["cached_attention", query_NHD.dtype](
            _pointer(query_NHD), _pointer(key_NKD), value_NKD.data_ptr(), value_NKD.stride(0),
            _pointer(key_rows_N), _pointer(value_rows_N), _pointer(head_strides_N), _pointer(positions_N),
            window or 0, scale, _pointer(out_NHD), num, heads, kv_heads, size, torch.get_num_threads(),
        )  # fmt: skip
        return out_NHD

    def draw(
        self, logits_NV: torch.Tensor, params: Sequence[SamplingParams], uniforms_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row, of the distribution that its params make of its logits, and its log-prob."""
        num, vocab = logits_NV.shape
        assert uniforms_N.dtype == torch.float64 and len(params) == num
        numbers = [(1 / p.temperature if p.temperature > 0 else 0.0, p.top_p, p.min_p) for p in params]
        scales_N, top_p_N, min_p_N = torch.tensor(numbers, dtype=torch.float32).T.contiguous()
        top_k_N = torch.tensor([p.top_k for p in params], dtype=torch.long)
        tokens_N, logprobs_N = torch.empty(num, dtype=torch.long), torch.empty(num)
        self._functions["draw", logits_NV.dtype](
            *map(_pointer, (logits_NV, scales_N, top_k_N, top_p_N, min_p_N, uniforms_N, tokens_N, logprobs_N)),
            num, vocab, torch.get_num_threads(),
        )  # fmt: skip
        return tokens_N, logprobs_N

    def logprobs(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor, scales_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-prob of the target, entropy, log Z) of softmax(logits * scale), float32 [C]."""
        out_3C = torch.empty(3, len(logits_CV))
        self._functions["logprobs", logits_CV.dtype](
            _pointer(logits_CV), _pointer(targets_C), _pointer(scales_C), *map(_pointer, out_3C),
            *logits_CV.shape, torch.get_num_threads(),
        )  # fmt: skip
        return out_3C[0], out_3C[1], out_3C[2]

    def logprobs_backward(
        self,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        scales_C: torch.Tensor,
        log_z_C: torch.Tensor,
        grads_C: torch.Tensor,
    ) -> None:
        """logits <- gradient of sum(grads * log-probs) with respect to the logits, in place."""
        self._functions["logprobs_backward", logits_CV.dtype](
            _pointer(logits_CV), _pointer(targets_C), _pointer(scales_C), _pointer(log_z_C), _pointer(grads_C),
            *logits_CV.shape, torch.get_num_threads(),
        )  # fmt: skip

    def norm(
        self, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(RMS norm of float32 x in `dtype` [N, E], 1 / rms [N])."""
        out_NE, scales_N = torch.empty(x_NE.shape, dtype=dtype), torch.empty(len(x_NE))
        self._functions["add_norm", dtype](
            _pointer(x_NE), None, _pointer(weight_E), eps, _pointer(out_NE), _pointer(scales_N), *x_NE.shape,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_NE, scales_N

    def norm_backward(
        self, grad_NE: torch.Tensor, x_NE: torch.Tensor, weight_E: torch.Tensor, scales_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients with respect to x and weight, float32."""
        threads = torch.get_num_threads()
        grad_x_NE, partial = torch.empty_like(x_NE), torch.zeros(threads, x_NE.shape[1])
        self._functions["norm_backward", grad_NE.dtype](
            _pointer(grad_NE), _pointer(x_NE), _pointer(weight_E), _pointer(scales_N), _pointer(grad_x_NE),
            _pointer(partial), *x_NE.shape, threads,
        )  # fmt: skip
        return grad_x_NE, partial.sum(0)
