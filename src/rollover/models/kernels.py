"""kernels.cpp and its headers, compiled once for this machine: the decoder's small operations on a CPU.

Shapes: N tokens, E hidden size, I inner size of the MLP, H query heads, K key/value heads, D head size, V vocabulary.

A decode step of a small model is about a thousand torch operations of microseconds each; these are a few per layer, and
attention reads only the cached tokens of each sequence. Without a C++ compiler torch computes them, more slowly. The
library's name in Rollover's cache folder identifies source, compiler, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from rollover.models.locate import cache_root
from rollover.models.operations import Norm
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
    """The kernels cannot be built or loaded; the message says why."""


def _openmp_library() -> str:
    """Return the path of torch's OpenMP library.

    Each OpenMP library has its own threads, and two teams would compete for the cores.
    """
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # The linker's order for torch: global symbols of the process, then torch's dependencies.
        for library in (ctypes.CDLL(None), ctypes.CDLL(str(torch_cpu))):
            if hasattr(library, "omp_get_max_threads"):
                address = ctypes.cast(library.omp_get_max_threads, c_void_p).value
                return _file_at(address or 0)
    except OSError as error:
        raise KernelsUnavailable(f"torch's OpenMP library is unknown: {error}") from error
    raise KernelsUnavailable("torch has no OpenMP library")


def _file_at(address: int) -> str:
    """Return the file that is mapped at this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return path
    raise OSError(f"nothing is mapped at {address:#x}")


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return platform.machine() + "".join(sorted(features))


def _build(flags: tuple[str, ...]) -> Path:
    if sys.platform != "linux":
        raise KernelsUnavailable(f"they are built on Linux alone, and this is {platform.system()}")
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
    """Return the compiled operations; the first call on a machine takes seconds. Raises KernelsUnavailable."""
    path = _build(flags)
    try:
        return Kernels(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{path}: {error}; delete the file") from error


def unavailable_reason(device_type: str) -> str:
    """Return why a CPU has no kernels; "" if it has, or on another device type, which needs none."""
    if device_type != "cpu":
        return ""
    try:
        load()
    except KernelsUnavailable as error:
        return f"slower than it could be, without compiled kernels: {error}"
    return ""


@functools.cache
def for_device(device_type: str) -> Kernels | None:
    """Return the compiled operations for this device type ("cpu") or None; warns once if they are unavailable."""
    if device_type != "cpu":
        return None
    if reason := unavailable_reason(device_type):
        warnings.warn(reason, stacklevel=2)
        return None
    return load()


def _pointer(tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Return the address of a tensor. ValueError for another type or shape: a kernel checks nothing."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel needs contiguous {dtype} of the shape {list(shape)} on the CPU, not {tensor.dtype} of the shape"
            f" {list(tensor.shape)} and the strides {list(tensor.stride())} on {tensor.device}"
        )
    return tensor.data_ptr()


def _check_range(what: str, index_N: torch.Tensor, size: int | torch.Tensor) -> None:
    """Raise ValueError unless 0 <= index < size everywhere."""
    outside_N = (index_N < 0) | (index_N >= size)
    if outside_N.any():
        first = int(outside_N.nonzero()[0])
        limit = int(torch.as_tensor(size).expand(outside_N.shape)[first])
        raise ValueError(f"{what} {int(index_N[first])}, number {first} of a kernel's, is not within [0, {limit})")


class CachedRows:
    """Cache locations of the tokens of one forward pass, for all layers. Keeps those tensors alive.

    `buckets`: keys and values, [R, K, T, D] for each layer. Token n is at `positions_N[n]` of row `rows_N[n]` of bucket
    `bucket_N[n]` (all int64). ValueError if that is out of range.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        bucket_N: torch.Tensor,
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
    ) -> None:
        first = buckets[0][0][0]
        self.dtype, self.kv_heads, self.size = first.dtype, first.shape[1], first.shape[3]
        addresses, lengths = [], []
        for parts in buckets:
            num_rows, _, row_tokens, _ = parts[0][0].shape
            lengths.append((num_rows, row_tokens))
            shape = (num_rows, self.kv_heads, row_tokens, self.size)
            addresses.append([[_pointer(tensor, self.dtype, *shape) for tensor in part] for part in parts])
        self._buckets, self.num_tokens = buckets, len(positions_N)
        for index_N in (bucket_N, rows_N, positions_N):
            _pointer(index_N, torch.long, self.num_tokens)
        _check_range("bucket", bucket_N, len(buckets))
        num_rows_N, row_tokens_N = torch.tensor(lengths)[bucket_N].T
        _check_range("row", rows_N, num_rows_N)
        _check_range("position", positions_N, row_tokens_N)
        self.positions_N = positions_N
        self.head_strides_N = row_tokens_N * self.size
        row_bytes_N = self.head_strides_N * (self.kv_heads * self.dtype.itemsize)
        self.rows_2LN = torch.tensor(addresses).permute(1, 2, 0)[:, :, bucket_N] + rows_N * row_bytes_N


class Kernels:
    """Operations (models/operations.py), cached attention, the draw. Float32 or bfloat16, contiguous, on the CPU.

    All inputs and outputs are checked here: ValueError for another shape, dtype or layout, or an index out of range.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for function, arguments in _ARGUMENTS.items():
            for dtype, name in _NAMES.items():
                symbol = getattr(library, f"{function}_{name}")
                symbol.argtypes, symbol.restype = arguments, None
                self._functions[function, dtype] = symbol

    def _function(self, name: str, dtype: torch.dtype) -> Any:
        if dtype not in _NAMES:
            raise ValueError(f"there is no kernel for {dtype}")
        return self._functions[name, dtype]

    def add_norm(self, x_NE: torch.Tensor, y_NE: torch.Tensor | None, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
        num, size = x_NE.shape
        out_NE = torch.empty(num, size, dtype=dtype)
        kind = dtype if y_NE is None else y_NE.dtype
        if dtype not in (kind, torch.float32):
            raise ValueError(f"the norm of {kind} comes out in that dtype or in float32, not in {dtype}")
        self._function("add_norm" if dtype == kind else "last_norm", kind)(
            _pointer(x_NE, torch.float32, num, size), _pointer(y_NE, kind, num, size),
            _pointer(norm.weight, torch.float32, size), norm.eps, out_NE.data_ptr(), None, num, size,
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
        (num, size), dtype = cos_ND.shape, query_key_value.dtype
        if size % 2:
            raise ValueError(f"heads of {size} numbers have no two halves to rotate")
        query_NHD = query_key_value.new_empty(num, heads, size)
        key_NKD = query_key_value.new_empty(num, kv_heads, size)
        weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
        self._function("rotate", dtype)(
            _pointer(query_key_value, dtype, num, (heads + 2 * kv_heads) * size),
            *(_pointer(angles, torch.float32, num, size) for angles in (cos_ND, sin_ND)),
            *(_pointer(weight, torch.float32, size) for weight in weights),
            0.0 if norms is None else norms[0].eps, query_NHD.data_ptr(), key_NKD.data_ptr(),
            num, heads, kv_heads, size, torch.get_num_threads(),
        )  # fmt: skip
        return query_NHD, key_NKD

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        (num, both), dtype = gate_up.shape, gate_up.dtype
        inner = both // 2
        out_NI = gate_up.new_empty(num, inner)
        self._function("silu_gate", dtype)(
            _pointer(gate_up, dtype, num, 2 * inner), out_NI.data_ptr(), num, inner, torch.get_num_threads()
        )
        return out_NI

    def cached_attention(
        self,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        cached: CachedRows,
        layer: int,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write the tokens' keys and values to the cache, then attend with each up to itself; [N, H, D].

        `value_NKD` may be a part of a wider row.
        """
        num, heads, size = query_NHD.shape
        dtype, kv_heads = cached.dtype, cached.kv_heads
        if value_NKD.stride()[1:] != (size, 1):
            value_NKD = value_NKD.contiguous()
        if num != cached.num_tokens or size != cached.size or heads % kv_heads or (window is not None and window < 1):
            raise ValueError(
                f"queries of the shape {list(query_NHD.shape)} (window {window}) and {cached.num_tokens} tokens cached"
                f" as {kv_heads} heads of {cached.size} numbers do not fit together"
            )
        if value_NKD.shape != (num, kv_heads, size) or value_NKD.dtype != dtype or value_NKD.device.type != "cpu":
            raise ValueError(f"values of the shape {list(value_NKD.shape)} in {value_NKD.dtype} do not fit the cache")
        out_NHD = torch.empty(num, heads, size, dtype=dtype)
        self._function("cached_attention", dtype)(
            _pointer(query_NHD, dtype, num, heads, size), _pointer(key_NKD, dtype, num, kv_heads, size),
            value_NKD.data_ptr(), value_NKD.stride(0),
            *(_pointer(rows_LN[layer], torch.long, num) for rows_LN in cached.rows_2LN),
            cached.head_strides_N.data_ptr(), cached.positions_N.data_ptr(),
            window or 0, scale, out_NHD.data_ptr(), num, heads, kv_heads, size, torch.get_num_threads(),
        )  # fmt: skip
        return out_NHD

    def draw(
        self, logits_NV: torch.Tensor, params: Sequence[SamplingParams], uniforms_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row from its logits under its params; return tokens and log-probs."""
        (num, vocab), dtype = logits_NV.shape, logits_NV.dtype
        if len(params) != num or not vocab:
            raise ValueError(f"{len(params)} sampling parameters for logits of the shape {list(logits_NV.shape)}")
        numbers = [(1 / p.temperature if p.temperature > 0 else 0.0, p.top_p, p.min_p) for p in params]
        scales_N, top_p_N, min_p_N = torch.tensor(numbers, dtype=torch.float32).T.contiguous()
        top_k_N = torch.tensor([p.top_k for p in params], dtype=torch.long)
        tokens_N, logprobs_N = torch.empty(num, dtype=torch.long), torch.empty(num)
        self._function("draw", dtype)(
            _pointer(logits_NV, dtype, num, vocab),
            *(of_N.data_ptr() for of_N in (scales_N, top_k_N, top_p_N, min_p_N)),
            _pointer(uniforms_N, torch.float64, num), tokens_N.data_ptr(), logprobs_N.data_ptr(),
            num, vocab, torch.get_num_threads(),
        )  # fmt: skip
        return tokens_N, logprobs_N

    def logprobs(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor, scales_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (log-prob of the target, entropy, log Z) of softmax(logits * scale), float32 [C]."""
        (num, vocab), dtype = logits_CV.shape, logits_CV.dtype
        out_3C = torch.empty(3, num)
        _check_range("token id", targets_C, vocab)
        self._function("logprobs", dtype)(
            _pointer(logits_CV, dtype, num, vocab), _pointer(targets_C, torch.long, num),
            _pointer(scales_C, torch.float32, num), *(of_C.data_ptr() for of_C in out_3C),
            num, vocab, torch.get_num_threads(),
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
        """Replace logits by the gradient of sum(grads * log-probs) with respect to them."""
        (num, vocab), dtype = logits_CV.shape, logits_CV.dtype
        _check_range("token id", targets_C, vocab)
        self._function("logprobs_backward", dtype)(
            _pointer(logits_CV, dtype, num, vocab), _pointer(targets_C, torch.long, num),
            *(_pointer(of_C, torch.float32, num) for of_C in (scales_C, log_z_C, grads_C)),
            num, vocab, torch.get_num_threads(),
        )  # fmt: skip

    def norm(
        self, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMS norm of float32 x in `dtype` [N, E], 1 / rms [N])."""
        num, size = x_NE.shape
        out_NE, scales_N = torch.empty(num, size, dtype=dtype), torch.empty(num)
        self._function("add_norm", dtype)(
            _pointer(x_NE, torch.float32, num, size), None, _pointer(weight_E, torch.float32, size), eps,
            out_NE.data_ptr(), scales_N.data_ptr(), num, size, torch.get_num_threads(),
        )  # fmt: skip
        return out_NE, scales_N

    def norm_backward(
        self, grad_NE: torch.Tensor, x_NE: torch.Tensor, weight_E: torch.Tensor, scales_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients with respect to x and weight, float32."""
        (num, size), threads = x_NE.shape, torch.get_num_threads()
        grad_x_NE, partial = torch.empty(num, size), torch.zeros(threads, size)
        self._function("norm_backward", grad_NE.dtype)(
            _pointer(grad_NE, grad_NE.dtype, num, size), _pointer(x_NE, torch.float32, num, size),
            _pointer(weight_E, torch.float32, size), _pointer(scales_N, torch.float32, num), grad_x_NE.data_ptr(),
            partial.data_ptr(), num, size, threads,
        )  # fmt: skip
        return grad_x_NE, partial.sum(0)
