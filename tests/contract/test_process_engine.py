"""The engine in a process of its own passes the engine contract, and does not outlive or outlast its parent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from contract import engine_contract
from contract.engine_contract import tokens_of
from rollover.config import Config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.process import EngineDied, ProcessEngine
from rollover.models.load import load_model
from rollover.types import SamplingParams, StopReason

PROMPTS = [tuple(range(5, 15)), (7, 8, 9), (20,)]


def config(folder: Path) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
        "engine": {"kv_memory_gb": 0.05, "max_running": 8},
        "rollout": {"kv_on_resume": "keep"},
    }
    return Config.model_validate(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(model: Path) -> Iterator[list[ProcessEngine]]:
    """Engines of a test; their processes are ended."""
    engines: list[ProcessEngine] = []
    yield engines
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL)


def weights(model: Path) -> list[tuple[str, torch.Tensor]]:
    loaded = load_model(config(model).model)
    return [(name, p.detach()) for name, p in loaded.model.named_parameters()]


class Reused(ProcessEngine):
    """One process for all checks: starting one takes seconds."""

    async def close(self) -> None:
        self.interrupt()

    def as_new(self, tensors: list[tuple[str, torch.Tensor]]) -> ProcessEngine:
        self.load_weights(0, tensors)
        return self


def test_contract(model: Path, made: list[ProcessEngine]) -> None:
    original = weights(model)
    engine = Reused(config(model), threads=1)
    made.append(engine)
    subject = engine_contract.Subject(
        make_engine=lambda: engine.as_new(original),
        prompts=PROMPTS,
        tensors=lambda: original,
        decode_text=tiny.tokenizer().decode,
    )

    async def all_checks() -> None:
        for check in engine_contract.CHECKS:
            try:
                await asyncio.wait_for(check(subject), 120)
            except BaseException as error:
                error.add_note(f"in {check.__name__}")
                raise
        await ProcessEngine.close(engine)

    asyncio.run(all_checks())


SUBJECT = engine_contract.Subject(make_engine=lambda: None, prompts=PROMPTS)  # type: ignore[arg-type, return-value]


def test_it_samples_the_bits_that_the_embedded_engine_samples(model: Path, made: list[ProcessEngine]) -> None:
    """Same weights, new weights in flight too."""
    torch.set_num_threads(1)
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]
    loaded = load_model(config(model).model)
    inline = EmbeddedEngine.over(loaded.model, loaded.tokenizer, config(model))
    made.append(ProcessEngine(config(model), threads=1))
    requests = [SUBJECT.request(i, SamplingParams(), max_new_tokens=12) for i in range(3)]

    async def run(engine) -> list:
        before = await asyncio.gather(*(engine.extend(r) for r in requests))
        engine.load_weights(3, changed)
        after = await asyncio.gather(*(engine.extend(r) for r in requests))
        await engine.close()
        return [segment for segments in [*before, *after] for segment in segments]

    for ours, theirs in zip(asyncio.run(run(made[0])), asyncio.run(run(inline)), strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        assert ours.policy_version == theirs.policy_version and ours.stop_reason == theirs.stop_reason


def test_a_process_that_dies_is_started_again_with_the_last_weights(model: Path, made: list[ProcessEngine]) -> None:
    said: list[str] = []
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]
    request = SUBJECT.request(0, SamplingParams(), max_new_tokens=400)

    async def run(kill: bool) -> list:
        engine = ProcessEngine(config(model), threads=1, say=said.append)
        made.append(engine)
        await engine.extend(SUBJECT.request(1, max_new_tokens=2))
        engine.load_weights(5, changed)
        work = asyncio.ensure_future(engine.extend(request))
        if kill:
            while not any(map(len, engine.progress([request.rollout_id]).get(request.rollout_id, []))):
                await asyncio.sleep(0.01)
            os.kill(engine.pid, signal.SIGKILL)
        segments = await work
        assert engine.stats()["engine/restarts"] == kill and engine.stats()["engine/decode_steps"] > 0
        await engine.close()
        return segments

    (once,), (again,) = asyncio.run(run(False)), asyncio.run(run(True))
    np.testing.assert_array_equal(once.token_ids, again.token_ids)
    assert again.policy_version == 5 and len(said) == 1 and "started again, and 1 rollouts go on" in said[0]


def test_a_process_that_hangs_is_killed_and_started_again(model: Path, made: list[ProcessEngine]) -> None:
    """It is stopped, not dead: it answers nothing, and nothing tells its parent."""
    said: list[str] = []
    request = SUBJECT.request(0, SamplingParams(), max_new_tokens=400)
    limits = config(model).watchdog.model_copy(update={"rollout_timeout_s": 1.0})

    async def run(stop: bool) -> list:
        engine = ProcessEngine(config(model).model_copy(update={"watchdog": limits}), threads=1, say=said.append)
        made.append(engine)
        await engine.extend(SUBJECT.request(1, max_new_tokens=2))
        work = asyncio.ensure_future(engine.extend(request))
        if stop:
            while not any(map(len, engine.progress([request.rollout_id]).get(request.rollout_id, []))):
                await asyncio.sleep(0.01)
            os.kill(engine.pid, signal.SIGSTOP)
            before = time.monotonic()
            engine.progress([request.rollout_id])  # as the watchdog does
            assert 1 <= time.monotonic() - before < 10
        segments = await asyncio.wait_for(work, 120)
        assert engine.stats()["engine/restarts"] == stop
        await engine.close()
        return segments

    (once,), (again,) = asyncio.run(run(False)), asyncio.run(run(True))
    np.testing.assert_array_equal(once.token_ids, again.token_ids)
    assert len(said) == 2 and said[0] == "watchdog: the engine process has not answered for 1 s: it is killed"
    assert "exit code -9" in said[1] and "1 rollouts go on" in said[1]


def test_an_extend_made_while_it_is_started_again_waits_for_the_last_weights(model: Path, made: list) -> None:
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]
    requests = [SUBJECT.request(i, SamplingParams(), max_new_tokens=60) for i in range(2)]

    async def run() -> None:
        engine = ProcessEngine(config(model), threads=1, say=lambda text: None)
        made.append(engine)
        await engine.extend(SUBJECT.request(2, max_new_tokens=2))
        engine.load_weights(5, changed)
        before = engine.stats()["engine/prefill_tokens"]
        os.kill(engine.pid, signal.SIGKILL)
        while not engine.num_restarts:
            await asyncio.sleep(0.001)
        found = await asyncio.gather(*(engine.extend(request) for request in requests))
        assert [s.policy_version for segments in found for s in segments if len(s)] == [5, 5]
        num_prompt = sum(len(request.prompt_ids) - 1 for request in requests)
        assert engine.stats()["engine/prefill_tokens"] - before == num_prompt, "a call must reach the new process once"
        await engine.close()

    asyncio.run(run())


def test_an_engine_that_cannot_load_says_so(tmp_path: Path, made: list[ProcessEngine]) -> None:
    made.append(ProcessEngine(config(tmp_path / "none"), threads=1))
    with pytest.raises(EngineDied, match="while it was loading"):
        _ = made[0].max_tokens


def test_errors_of_a_request_are_raised_here(model: Path, made: list[ProcessEngine]) -> None:
    made.append(ProcessEngine(config(model), threads=1))

    async def run() -> None:
        with pytest.raises(ValueError, match="Lower rollout.max_new_tokens"):
            await made[0].extend(SUBJECT.request(0, max_new_tokens=10**7))
        segments = await made[0].extend(SUBJECT.request(0, max_new_tokens=3))
        assert sum(map(len, segments)) == 3 and segments[-1].stop_reason is StopReason.LENGTH
        await made[0].close()

    asyncio.run(run())


def test_an_error_of_the_process_is_raised_here_and_it_goes_on(model: Path, made: list[ProcessEngine]) -> None:
    made.append(ProcessEngine(config(model), threads=1))

    async def run() -> None:
        await made[0].extend(SUBJECT.request(0, max_new_tokens=3))
        with pytest.raises(RuntimeError, match="the engine process failed in load: .*no such weight"):
            made[0].load_weights(1, [("no such weight", torch.zeros(3))])
        assert len(tokens_of(await made[0].extend(SUBJECT.request(0, max_new_tokens=3)))) == 3
        await made[0].close()

    asyncio.run(run())


async def until_it_has_tokens(engine: ProcessEngine, rollout_id: str) -> None:
    while not tokens_of(engine.progress([rollout_id]).get(rollout_id, [])):
        await asyncio.sleep(0.01)


def test_nothing_is_known_of_what_a_process_does_that_is_gone(model: Path, made: list[ProcessEngine]) -> None:
    """Not what it said last: that was of an earlier extend of the rollout, or of other rollouts."""
    request = SUBJECT.request(0, max_new_tokens=400)

    async def run() -> None:
        engine = ProcessEngine(config(model), threads=1, say=lambda text: None)
        made.append(engine)
        first = asyncio.ensure_future(engine.extend(request))
        await until_it_has_tokens(engine, request.rollout_id)
        engine.queued([request.rollout_id])
        engine.interrupt()
        so_far = tuple(tokens_of(await first))
        rest = dataclasses.replace(request, generated_ids=so_far, max_new_tokens=400 - len(so_far))
        second = asyncio.ensure_future(engine.extend(rest))
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        while not second.done():
            for rollout_id in (request.rollout_id, "7-7"):
                for known, segments in engine.progress([rollout_id]).items():
                    assert known == rollout_id and all(s.start is not None and s.start >= len(so_far) for s in segments)
                assert engine.queued([rollout_id]) <= {rollout_id}
            await asyncio.sleep(0.02)
        assert engine.num_restarts == 1
        assert len(so_far) + len(tokens_of(second.result())) == 400
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["before it dies", "while the next one starts"])
def test_an_interruption_is_not_lost_with_its_process(model: Path, made: list[ProcessEngine], how: str) -> None:
    requests = [SUBJECT.request(i, max_new_tokens=400) for i in range(2)]
    limits = config(model).watchdog.model_copy(update={"rollout_timeout_s": 2.0})

    async def run() -> None:
        engine = ProcessEngine(config(model).model_copy(update={"watchdog": limits}), threads=1, say=lambda text: None)
        made.append(engine)
        extends = [asyncio.ensure_future(engine.extend(request)) for request in requests]
        await until_it_has_tokens(engine, requests[0].rollout_id)
        if how == "before it dies":
            os.kill(engine.pid, signal.SIGSTOP)  # it hangs: the interruption is sent, and never read
            engine.interrupt([requests[0].rollout_id])
            engine.progress([requests[0].rollout_id])  # as the watchdog does
        else:
            os.kill(engine.pid, signal.SIGKILL)
            while not engine.num_restarts:
                await asyncio.sleep(0.001)
            engine.interrupt([requests[0].rollout_id])
        interrupted, other = await asyncio.wait_for(asyncio.gather(*extends), 120)
        assert [(len(s), s.stop_reason, s.start) for s in interrupted] == [(0, StopReason.PAUSED, 0)]
        assert len(tokens_of(other)) == 400 and other[-1].stop_reason is StopReason.LENGTH
        await engine.close()

    asyncio.run(run())


def test_one_that_dies_while_it_is_started_again_is_started_once_more(model: Path, made: list[ProcessEngine]) -> None:
    async def run() -> None:
        engine = ProcessEngine(config(model), threads=1, say=lambda text: None)
        made.append(engine)
        await engine.extend(SUBJECT.request(0, max_new_tokens=2))
        for num in (1, 2):
            os.kill(engine.pid, signal.SIGKILL)
            while engine.num_restarts < num:
                await asyncio.sleep(0.001)
        assert len(tokens_of(await engine.extend(SUBJECT.request(0, max_new_tokens=3)))) == 3
        await engine.close()

    asyncio.run(run())


def test_one_that_dies_again_and_again_ends_the_run(model: Path, made: list[ProcessEngine]) -> None:
    async def run() -> None:
        engine = ProcessEngine(config(model), threads=1, say=lambda text: None)
        made.append(engine)
        await engine.extend(SUBJECT.request(0, max_new_tokens=2))
        work = asyncio.ensure_future(engine.extend(SUBJECT.request(0, max_new_tokens=400)))
        seen = set()
        while not work.done():
            if engine.pid not in seen:
                seen.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            await asyncio.sleep(0.001)
        for extend in (work, engine.extend(SUBJECT.request(1))):
            with pytest.raises(EngineDied, match="died 4 times in a row"):
                await extend
        await engine.close()

    asyncio.run(run())


def test_without_room_in_memory_weights_go_through_another_folder(
    model: Path, made: list[ProcessEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known, and said, before anything is trained; and the weights arrive."""
    full_above(monkeypatch, "/dev/shm", 10_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]

    async def run(engine: ProcessEngine) -> list[int]:
        made.append(engine)
        _ = engine.max_tokens
        assert not said or len(said) == 1
        engine.load_weights(1, changed)
        segments = await engine.extend(SUBJECT.request(0, max_new_tokens=30))
        await engine.close()
        return tokens_of(segments)

    found = asyncio.run(run(ProcessEngine(config(model), threads=1, say=said.append)))
    assert len(said) == 1
    assert re.fullmatch(rf"/dev/shm has no room for the \S+ MB of weights: .* a file in {tmp_path}, .*", said[0])
    monkeypatch.undo()
    assert found == asyncio.run(run(ProcessEngine(config(model), threads=1, say=said.append))) and len(said) == 1


def test_without_room_anywhere_it_says_what_to_do(
    model: Path, made: list[ProcessEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full_above(monkeypatch, "/", 10_000)
    made.append(ProcessEngine(config(model), threads=1))
    with pytest.raises(ValueError, match=r"room for \S+ MB of weights in /dev/shm or .*TMPDIR.*engine.process = false"):
        _ = made[0].max_tokens


def full_above(monkeypatch: pytest.MonkeyPatch, folder: str, num_bytes: int) -> None:
    """No file in `folder` may become larger."""

    def checked(function: Callable, size: Callable[..., int]) -> Callable:
        def call(file: int, *rest: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{file}").startswith(folder) and size(*rest) > num_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(file, *rest)

        return call

    monkeypatch.setattr(os, "posix_fallocate", checked(os.posix_fallocate, lambda offset, length: offset + length))
    monkeypatch.setattr(os, "pwrite", checked(os.pwrite, lambda data, offset: offset + len(data)))


def test_it_dies_with_a_parent_that_is_killed(model: Path) -> None:
    program = (
        "import sys, time\n"
        "from rollover.config import Config\n"
        "from rollover.engine.process import ProcessEngine\n"
        "engine = ProcessEngine(Config.model_validate_json(sys.argv[1]), threads=1)\n"
        "print(engine.max_tokens and engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    source = Path(__file__).parents[2] / "src"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, config(model).model_dump_json()],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the engine process outlived its parent")
