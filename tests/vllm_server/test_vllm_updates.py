"""A real vLLM server gets new weights while it generates, and what goes wrong without each remedy (traps 6 to 8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_server.serving import Stream, VllmServer, resident_mb, wait_until, write_weights

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("restored")]

PROMPT = list(range(5, 25))
EXACT = 1e-4  # nats, in float32
WRONG = 0.05


def expected(model: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The log-prob of each token under a model, after the prompt and the tokens before it."""
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0].float(), -1)
    return logprobs[torch.arange(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]].numpy()


def error(stream: Stream, model: Any, prompt: list[int] = PROMPT, start: int = 0, end: int | None = None) -> float:
    """How far the log-probs of these tokens are from the model's, at most."""
    difference = np.array(stream.logprobs) - expected(model, prompt, stream.tokens)
    return float(np.abs(difference[start:end]).max())


def test_old_before_new_after(server: VllmServer, new: Any, old: Any, tmp_path: Path) -> None:
    before = server.label
    prompts = [[*PROMPT, i] for i in range(30, 38)]
    streams = [server.generate(prompt, max_tokens=400, seed=i) for i, prompt in enumerate(prompts)]
    for stream in streams:
        stream.wait(20)
    had: list[int] = []
    assert server.update(write_weights(new, tmp_path), "t/1", lambda: had.extend(len(s.tokens) for s in streams)) == 200
    assert server.label == "t/1"
    for stream, prompt, cut in zip(streams, prompts, had, strict=True):
        stream.wait()
        assert 20 <= cut < len(stream.tokens) == 400
        assert stream.spans == [
            {"version": before, "start": 0, "end": cut},
            {"version": "t/1", "start": cut, "end": 400},
        ]
        assert error(stream, old, prompt, 0, cut) < EXACT
        assert error(stream, new, prompt, cut) < EXACT
        assert error(stream, old, prompt, cut) > WRONG


def test_stale_kv_is_kept_only_if_wanted(server: VllmServer, new: Any, tmp_path: Path) -> None:
    """`clear_cache=false` goes on with the KV of the older weights: engine.kv_on_resume = keep wants that."""
    stream = server.generate(PROMPT, max_tokens=300).wait(10)
    cut: list[int] = []
    server.update(write_weights(new, tmp_path), "t/2", lambda: cut.append(len(stream.tokens)), clear=False)
    stream.wait()
    assert error(stream, new, start=cut[0]) > WRONG
    server.json("POST", "/reset_prefix_cache?reset_running_requests=true")


def test_twenty_updates_leave_neither_drift_nor_memory(server: VllmServer, old: Any, new: Any, tmp_path: Path) -> None:
    files = [write_weights(model, tmp_path) for model in (new, old)]
    first = server.generate(PROMPT, temperature=0.0, max_tokens=64).wait()
    for i in range(4):
        assert server.update(files[i % 2], f"t/{i}") == 200
    before = {name: resident_mb(pid) for name, pid in server.processes().items()}
    for i in range(20):
        assert server.update(files[i % 2], f"t/{i}") == 200
    after = {name: resident_mb(pid) for name, pid in server.processes().items()}
    assert server.label == "t/19"
    for name in before:
        assert after[name] < before[name] * 1.05 + 10, (before, after)
    last = server.generate(PROMPT, temperature=0.0, max_tokens=64).wait()
    assert last.tokens == first.tokens
    np.testing.assert_array_equal(last.logprobs, first.logprobs)
    assert error(last, old) < EXACT


def verified(server: VllmServer, path: str, sha256: str) -> str:
    """What the server has found out about the file; "" while it works."""
    said = server.call("rollover_verify", path, sha256)
    return "" if said == "verifying" else said


def test_a_file_is_verified_while_it_generates(server: VllmServer, new: Any, tmp_path: Path) -> None:
    file = write_weights(new, tmp_path)
    stream = server.generate(PROMPT, max_tokens=200)
    assert wait_until(lambda: verified(server, *file.values())) == "verified"
    # A refusal is returned once.
    refusal = wait_until(lambda: verified(server, str(tmp_path / "none"), "0" * 64))
    assert refusal.startswith("refused: ")
    assert server.update(file, "t/1") == 200
    assert error(server.generate(PROMPT).wait(), new) < EXACT
    stream.wait()


def test_many_prompts_with_seeds_come_at_once(server: VllmServer) -> None:
    """More tokens than a step prefills: a prompt with a seed that is prefilled in parts kills vLLM for the CPU."""
    prompts = [[5 + i, *range(5, 95)] for i in range(32)]
    for stream in [server.generate(prompt, seed=i) for i, prompt in enumerate(prompts)]:
        assert len(stream.wait().tokens) == 16


def damaged(new: Any, tmp_path: Path) -> dict[str, str]:
    file = write_weights(new, tmp_path)
    with open(file["path"], "r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\0\0\1\0")
    return file


def partial(new: Any, tmp_path: Path) -> dict[str, str]:
    return write_weights(new, tmp_path, lambda name: "q_proj" in name or "v_proj" in name)


def nowhere(new: Any, tmp_path: Path) -> dict[str, str]:
    return {"path": str(tmp_path / "none.safetensors"), "sha256": "0" * 64}


@pytest.mark.parametrize("bad", [damaged, partial, nowhere], ids=lambda bad: bad.__name__)
def test_traps_6_and_8_a_bad_file_is_refused(
    server: VllmServer, old: Any, new: Any, tmp_path: Path, bad: Callable[[Any, Path], dict[str, str]]
) -> None:
    before = server.label
    assert server.update(bad(new, tmp_path), "t/bad") == 500
    assert server.label == before
    assert error(server.generate(PROMPT).wait(), old) < EXACT
    assert server.update(write_weights(new, tmp_path), "t/good") == 200
    assert error(server.generate(PROMPT).wait(), new) < EXACT


def test_trap_7_a_tied_head_stays_old_without_its_remedy(server: VllmServer, new: Any, tmp_path: Path) -> None:
    file = write_weights(new, tmp_path)
    with server.without("tie_head"):
        assert server.update(file, "t/1") == 200
        assert error(server.generate(PROMPT, max_tokens=64).wait(), new) > WRONG
    assert server.update(file, "t/2") == 200
    assert error(server.generate(PROMPT, max_tokens=64).wait(), new) < EXACT


def test_trap_8_a_part_of_the_weights_makes_garbage_without_the_check(
    server: VllmServer, old: Any, tmp_path: Path
) -> None:
    """Two of three of a fused module, with the values that it has: vLLM takes them without a word."""
    with server.without("check"):
        assert server.update(partial(old, tmp_path), "t/1") == 200
        assert error(server.generate(PROMPT, max_tokens=64).wait(), old) > WRONG
    assert server.update(write_weights(old, tmp_path), "t/2") == 200
    assert error(server.generate(PROMPT, max_tokens=64).wait(), old) < EXACT
