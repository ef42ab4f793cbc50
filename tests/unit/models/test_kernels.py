"""The compiled kernels against plain torch, beside another OpenMP library, and where they cannot be had."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from heard import hear
from rollover.config import Config
from rollover.engine.embedded.batch import Sequence
from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.runner import DecodeAttention, KernelAttention, PrefillAttention, Runner, SequenceChunk
from rollover.engine.embedded.sampling import sample, uniforms
from rollover.engine.protocol import ExtendRequest
from rollover.models import kernels
from rollover.models.attention import Attention
from rollover.models.operations import Norm, TorchOperations
from rollover.run.setup import Components
from rollover.types import Prompt, SamplingParams

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest number; bfloat16 has steps of 2^-8
DTYPES = list(TOLERANCE)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((got.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max())


class _Module:
    def __init__(self, size: int) -> None:
        self.weight = torch.rand(size) + 0.5
        self.variance_epsilon = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [1, 7, 200])
def test_operations_equal_torch(dtype: torch.dtype, num: int) -> None:
    torch.manual_seed(num)
    plain, compiled, tolerance = TorchOperations(), kernels.load(), TOLERANCE[dtype]
    x, y, norm = torch.randn(num, 576) * 30, torch.randn(num, 576).to(dtype), Norm(_Module(576))
    ours = x.clone()
    for added in (None, y):
        for out_dtype in (dtype, torch.float32):
            got = compiled.add_norm(ours, added, norm, out_dtype)
            assert got.dtype == out_dtype
            assert close(got, plain.add_norm(x, added, norm, out_dtype), tolerance)
            assert torch.equal(ours, x)
    gates = torch.randn(num, 2 * 96).to(dtype) * 20
    assert close(compiled.silu_gate(gates), plain.silu_gate(gates.clone()), tolerance)
    angles = torch.rand(num, 32).repeat(1, 2) * 6
    rows = torch.randn(num, (9 + 2 * 3) * 64).to(dtype)
    for norms in (None, (Norm(_Module(64)), Norm(_Module(64)))):
        expected = plain.rotate(rows, angles.cos(), angles.sin(), norms, 9, 3)
        got = compiled.rotate(rows, angles.cos(), angles.sin(), norms, 9, 3)
        assert all(close(g, e, tolerance) for g, e in zip(got, expected, strict=True))


def _two_caches(kv_heads: int, size: int, dtype: torch.dtype, lengths: list[int]) -> list[list[Sequence]]:
    """The same sequences of these many tokens twice, sorted by bucket, in caches filled with the same numbers.

    In the second cache nothing beyond the sequences is a number.
    """
    caches, orders = [], []
    for _ in range(2):
        cache = KVCache(1, kv_heads, size, dtype, torch.device("cpu"), 10**8)
        order = []
        for i, n in enumerate(lengths):
            seq = Sequence.start(ExtendRequest(str(i), Prompt((3,) * n), (), 8, i, SamplingParams()), None)
            assert cache.reserve(seq, n)
            order.append(seq)
        order.sort(key=lambda s: (s.bucket.row_tokens if s.bucket else 0, s.row))
        caches.append(cache)
        orders.append(order)
    for row_tokens, bucket in caches[0].buckets.items():
        for mine, theirs in zip((bucket.keys[0], bucket.values[0]), ("keys", "values"), strict=True):
            mine.copy_(torch.randn(mine.shape))
            getattr(caches[1].buckets[row_tokens], theirs)[0].fill_(torch.nan)
    for mine, theirs in zip(_cached(orders[0]), _cached(orders[1]), strict=True):
        theirs.copy_(mine)
    return orders


def _cached(order: list[Sequence]) -> list[torch.Tensor]:
    """Keys and values of each sequence's tokens."""
    out = []
    for seq in order:
        assert seq.bucket is not None
        out += [x[0][seq.row, :, : len(seq.tokens)] for x in (seq.bucket.keys, seq.bucket.values)]
    return out


def _assert_same_cache(orders: list[list[Sequence]]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(_cached(orders[0]), _cached(orders[1]), strict=True))


def _assert_kernel_equals(
    plain: Attention, chunks: list[SequenceChunk], compiled: kernels.Kernels, heads: int, window: int | None
) -> None:
    keys = chunks[0].bucket.keys[0]
    num, kv_heads, size = sum(c.end - c.start for c in chunks), keys.shape[1], keys.shape[3]
    query = torch.randn(num, heads, size).to(keys.dtype)
    key, value = torch.randn(2, num, kv_heads, size).to(keys.dtype)
    options = {"scale": 0.3, "window": window, "softcap": None}
    expected = plain.attend(0, query, key, value, **options)
    got = KernelAttention(chunks, compiled).attend(0, query, key, value, **options)
    # Plain torch rounds scores and probabilities to bfloat16, the kernel does not.
    assert close(got, expected, 3 * TOLERANCE[keys.dtype])


def _of_width(flags: tuple[str, ...]) -> kernels.Kernels:
    """The kernels for a processor without some of this one's vectors."""
    if flags and platform.machine() != "x86_64":
        pytest.skip("there are no such flags")
    tiny.compiled_kernels()  # skips where there is no compiler
    return kernels.load((*kernels._FLAGS, *flags))


WIDTHS = pytest.mark.parametrize("flags", [(), ("-mno-avx512f",), ("-mno-avx",)], ids=["native", "AVX2", "SSE"])
HEADS = pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 16), (5, 1, 128), (6, 2, 80)])


@pytest.mark.parametrize("dtype", DTYPES)
@HEADS
@WIDTHS
@pytest.mark.parametrize("window", [None, 5])
def test_decode_attention_equals_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, flags: tuple[str, ...], window: int | None
) -> None:
    """Ragged lengths in several buckets, one token and a full row among them; what is written is the same too."""
    lengths = [1, 64, 2, 65, 100, 33, 300]  # the new token included
    torch.manual_seed(0)
    orders = _two_caches(kv_heads, size, dtype, lengths)
    for seq in (*orders[0], *orders[1]):
        seq.kv_len = len(seq.tokens) - 1
    chunks = [SequenceChunk(s, s.kv_len, s.kv_len + 1) for s in orders[1]]
    _assert_kernel_equals(DecodeAttention(orders[0], torch.device("cpu")), chunks, _of_width(flags), heads, window)
    _assert_same_cache(orders)


@pytest.mark.parametrize("dtype", DTYPES)
@HEADS
@WIDTHS
@pytest.mark.parametrize("window", [None, 5])
def test_prefill_attention_equals_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, flags: tuple[str, ...], window: int | None
) -> None:
    """Chunks from the start of a sequence and from its middle, of one token and of many, beside one another."""
    spans = [(0, 1), (0, 64), (1, 2), (60, 65), (0, 100), (32, 33), (40, 300)]
    torch.manual_seed(0)
    orders = _two_caches(kv_heads, size, dtype, [end for _, end in spans])
    starts = {end: start for start, end in spans}
    chunks = [[SequenceChunk(s, starts[len(s.tokens)], len(s.tokens)) for s in order] for order in orders]
    plain = PrefillAttention(chunks[0], torch.device("cpu"))
    _assert_kernel_equals(plain, chunks[1], _of_width(flags), heads, window)
    _assert_same_cache(orders)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [100, 1000, 49152])
def test_draws_equal_the_sampler(dtype: torch.dtype, vocab: int) -> None:
    """The same tokens for the same uniform numbers, but where one falls onto a border; log-probs of what was drawn."""
    num = 300
    torch.manual_seed(vocab)
    logits = (torch.randn(num, vocab) * 4).to(dtype)
    logits[:, 3] = float("-inf")
    params = [SamplingParams(temperature=t) for t in (0.5, 1.0, 1.7)] * (num // 3)
    draws = uniforms(range(num), [0] * num)
    draws[:2] = 0.0, 1.0 - 2**-53
    tokens, logprobs = sample(logits, params, draws, tiny.compiled_kernels())
    expected, _ = sample(logits, params, draws)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 3
    scaled = logits.float() / torch.tensor([p.temperature for p in params])[:, None]
    exact = torch.log_softmax(scaled, -1).gather(1, torch.tensor(tokens)[:, None]).flatten()
    assert torch.allclose(torch.tensor(logprobs), exact, atol=3e-5)  # sums of 49,152, in an order of the machine's own
    assert 3 not in tokens


TRUNCATIONS = {
    "top_k": {"top_k": 7},
    "top_k of one": {"top_k": 1},
    "top_k of more than there are": {"top_k": 100_000},
    "top_p": {"top_p": 0.9},
    "top_p of nearly all": {"top_p": 0.9999},
    "top_p of nearly none": {"top_p": 1e-6},
    "min_p": {"min_p": 0.02},
    "min_p of little": {"min_p": 1e-9},
    "top_k, then top_p": {"top_k": 20, "top_p": 0.8},
    "all three": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.01, 4.0])
@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_truncated_draws_equal_the_sampler(dtype: torch.dtype, spread: float, truncation: dict) -> None:
    """Flat and steep distributions with many equal logits, beside rows that are greedy or not truncated."""
    num, vocab = 120, 1500
    torch.manual_seed(0)
    logits = (torch.randn(num, vocab) * spread).to(torch.bfloat16).to(dtype)
    logits[:, 3] = float("-inf")
    kinds = [{"temperature": 0.5, **truncation}, {"temperature": 1.3, **truncation}, {"temperature": 0.0}, {}]
    params = [SamplingParams(**kind) for kind in kinds] * (num // 4)
    draws = uniforms(range(num), [0] * num)
    draws[:4], draws[4:8] = 0.0, 1.0 - 2**-53
    tokens, logprobs = sample(logits, params, draws, tiny.compiled_kernels())
    expected, expected_logprobs = sample(logits, params, draws)
    same = [a == b for a, b in zip(tokens, expected, strict=True)]
    assert sum(same) >= num - 3
    for agrees, got, exact in zip(same, logprobs, expected_logprobs, strict=True):
        assert not agrees or got == pytest.approx(exact, abs=1e-4)
    assert 3 not in tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e-3, 1e-30])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_next_to_no_temperature_is_greedy(dtype: torch.dtype, temperature: float, truncation: dict) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(40, 300) * 8).clamp(max=20).to(dtype)
    logits[:, 100] = 27.375
    logits[:, 250] = logits[:, 20] = -float("inf")
    params = [SamplingParams(temperature=temperature, **truncation)] * 40
    tokens, logprobs = sample(logits, params, uniforms(range(40), [0] * 40), tiny.compiled_kernels())
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs == pytest.approx([0.0] * 40, abs=1e-6)


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_what_is_not_a_number_gives_a_token_of_the_vocabulary(kind: dict) -> None:
    logits = torch.randn(4, 300)
    logits[1], logits[2, ::2] = torch.nan, torch.nan
    logits[3] = -float("inf")
    tokens, _ = sample(logits, [SamplingParams(**kind)] * 4, uniforms(range(4), [0] * 4), tiny.compiled_kernels())
    assert all(0 <= token < 300 for token in tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_and_their_gradient_equal_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compiled = tiny.compiled_kernels()
    logits = (torch.randn(40, 700) * 5).to(dtype)
    targets, temperature = torch.randint(700, (40,)), torch.rand(40) + 0.5
    exact = logits.double().requires_grad_()
    scaled = torch.log_softmax(exact / temperature[:, None].double(), -1)
    expected = scaled.gather(1, targets[:, None]).flatten()
    grads = torch.randn(40)
    expected.backward(grads.double())
    got, entropy, log_z = compiled.logprobs(logits, targets, 1 / temperature)
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(scaled.exp() * scaled).sum(-1).float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_z, torch.logsumexp(exact / temperature[:, None], -1).float())
    compiled.logprobs_backward(logits, targets, 1 / temperature, log_z, grads)
    assert exact.grad is not None and close(logits, exact.grad, TOLERANCE[dtype])


def test_norm_and_its_gradient_equal_autograd() -> None:
    torch.manual_seed(0)
    compiled, x, weight, grad = (
        tiny.compiled_kernels(),
        torch.randn(50, 576) * 20,
        torch.rand(576),
        torch.randn(50, 576),
    )
    a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.nn.functional.rms_norm(a, (576,), w, 1e-5)
    expected.backward(grad)
    out, scales = compiled.norm(x, weight, 1e-5, torch.float32)
    grad_x, grad_weight = compiled.norm_backward(grad, x, weight, scales)
    for got, wanted in ((out, expected), (grad_x, a.grad), (grad_weight, w.grad)):
        assert wanted is not None
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_a_result_does_not_depend_on_who_shares_the_batch() -> None:
    rows, compiled = torch.randn(300, 2 * 96).bfloat16(), tiny.compiled_kernels()
    alone = torch.cat([compiled.silu_gate(row[None]) for row in rows])
    assert torch.equal(compiled.silu_gate(rows), alone)


def test_without_a_compiler_torch_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "load", kernels.load.__wrapped__)
    monkeypatch.setattr(kernels, "for_device", kernels.for_device.__wrapped__)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="without compiled kernels: .*no-such-compiler"):
        assert Runner(tiny.model(), 4).kernels is None
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\ntest $1 = --version && exit 0\necho 'error: it is Monday' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.warns(UserWarning, match="it is Monday"):
        assert Runner(tiny.model(), 4).kernels is None


def test_a_model_with_capped_logits_keeps_plain_attention() -> None:
    tiny.compiled_kernels()
    assert Runner(tiny.model("gemma2"), 4).kernels is None
    assert Runner(tiny.model("gemma3_text"), 4).kernels is not None


# As scikit-learn or conda's MKL bring one
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
