"""The engine in a process of its own passes the engine contract, and does not outlive or outlast its parent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from contract import engine_contract
from contract.engine_contract import tokens_of
from contract.full_disk import full_above
from heard import hear
from rollover.config import Config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.process.engine import EngineDied, ProcessEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import load_model
from rollover.types import SamplingParams, StopReason

PROMPTS = [tuple(range(5, 15)), (7, 8, 9), (20,)]


def config(folder: Path) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
        "engine": {"kv_memory_gb": 0.05, "max_running": 8},
        "rollout": {"kv_on_resume": "keep", "interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1},
        # The preset's clip bounds have no effect on it: what was checked here is not refused by the engine's process.
        "algorithm": {"loss": "reinforce"},
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


def inline_engine(model: Path) -> EmbeddedEngine:
    """An engine in this process that rounds as the one in a process does: its weights are aligned in memory, too."""
    torch.set_num_threads(1)
    loaded = load_model(config(model).model)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.clone()
    return EmbeddedEngine.over(loaded.model, loaded, config(model))


class Reused(ProcessEngine):
    """One process for all checks: starting one takes seconds."""

    async def close(self) -> None:
        self.interrupt()

    def as_new(self) -> ProcessEngine:
        self.counted_before = super().stats()
        return self

    def stats(self) -> dict[str, float]:
        """Since it was new."""
        before = self.counted_before | {"kv/bytes": 0}
        return {key: value - before[key] for key, value in super().stats().items()}


SUBJECT = engine_contract.Subject(make_engine=lambda: None, prompts=PROMPTS)  # type: ignore[arg-type, return-value]


async def check_the_bits_are_those_of_the_embedded_engine(engine: ProcessEngine, model: Path) -> None:
    """Under the weights of the start, and under new ones."""
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]
    inline = inline_engine(model)
    requests = [SUBJECT.request(i, SamplingParams(), max_new_tokens=12) for i in range(3)]

    async def run(engine) -> list:
        # One at a time: who shares a batch depends on when requests arrive, and sums are rounded by the batch's size.
        before = [await engine.extend(r) for r in requests]
        await engine.load_weights(3, changed)
        after = [await engine.extend(r) for r in requests]
        return [segment for segments in [*before, *after] for segment in segments]

    for ours, theirs in zip(await run(engine), await run(inline), strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        assert ours.policy_version == theirs.policy_version and ours.stop_reason == theirs.stop_reason
    await inline.close()


async def check_a_cancelled_question_costs_nothing(engine: ProcessEngine, model: Path) -> None:
    extending = asyncio.ensure_future(engine.extend(SUBJECT.request(0, max_new_tokens=60)))
    await until_it_has_tokens(engine, SUBJECT.request(0).rollout_id)
    for _ in range(3):
        asking = asyncio.ensure_future(engine.progress([SUBJECT.request(0).rollout_id]))
        await asyncio.sleep(0)
        asking.cancel()
    assert sum(map(len, await extending)) == 60 and engine.stats()["engine/restarts"] == 0


async def check_errors_are_raised_here_and_it_goes_on(engine: ProcessEngine, model: Path) -> None:
    with pytest.raises(ValueError, match="Lower rollout.max_new_tokens"):
        await engine.extend(SUBJECT.request(0, max_new_tokens=10**7))
    with pytest.raises(RuntimeError, match="the engine process failed in load_weights: .*no such weight"):
        await engine.load_weights(1, [("no such weight", torch.zeros(3))])
    segments = await engine.extend(SUBJECT.request(0, max_new_tokens=3))
    assert sum(map(len, segments)) == 3 and segments[-1].stop_reason is StopReason.LENGTH


OF_A_PROCESS = (
    check_the_bits_are_those_of_the_embedded_engine,
    check_a_cancelled_question_costs_nothing,
    check_errors_are_raised_here_and_it_goes_on,
)


def test_contract_and_what_is_of_a_process(model: Path, made: list[ProcessEngine]) -> None:
    original = weights(model)
    engine = Reused(config(model), threads=1)
    made.append(engine)
    subject = engine_contract.Subject(
        make_engine=engine.as_new,
        prompts=PROMPTS,
        tensors=lambda: original,
        decode_text=tiny.tokenizer().decode,
        keeps_kv=True,
        processes_logits=True,
    )

    async def all_checks() -> None:
        of_a_process = [(check, (engine.as_new(), model)) for check in OF_A_PROCESS]
        # The comparison of bits is first: answers that an earlier check has just interrupted would share its batches.
        for check, arguments in [*of_a_process, *((check, (subject,)) for check in engine_contract.CHECKS)]:
            await engine.load_weights(0, original)
            try:
                await asyncio.wait_for(check(*arguments), 120)
            except BaseException as error:
                error.add_note(f"in {check.__name__}")
                raise
        await ProcessEngine.close(engine)

    asyncio.run(all_checks())


def uninterrupted(
    model: Path, tensors: Iterable[tuple[str, torch.Tensor]], *requests: ExtendRequest
) -> list[list[int]]:
    """Tokens of each request under these weights, generated in this process."""
    inline = inline_engine(model)

    async def run() -> list[list[int]]:
        await inline.load_weights(5, tensors)
        answers = await asyncio.gather(*map(inline.extend, requests))
        await inline.close()
        return [tokens_of(segments) for segments in answers]

    return asyncio.run(run())


async def until_it_has_tokens(engine: ProcessEngine, rollout_id: str) -> None:
    while not tokens_of((await engine.progress([rollout_id])).get(rollout_id, [])):
        await asyncio.sleep(0.01)


def test_a_process_that_dies_is_started_again_with_the_last_weights(model: Path, made: list[ProcessEngine]) -> None:
    """What it did is forgotten, also what it said of an earlier `extend` of the same rollout; what was interrupted
    returns; what was asked, before or meanwhile, is asked of the next process, once."""
    said: list[str] = hear([])
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]
    cut, interrupted, late = (SUBJECT.request(i, max_new_tokens=400) for i in range(3))

    async def run() -> list[list[int]]:
        engine = ProcessEngine(config(model), threads=1)
        made.append(engine)
        await engine.extend(SUBJECT.request(1, max_new_tokens=2))
        await engine.load_weights(5, changed)
        first = asyncio.ensure_future(engine.extend(cut))
        await until_it_has_tokens(engine, cut.rollout_id)
        assert await engine.queued([cut.rollout_id, "7-7"]) <= {cut.rollout_id}
        engine.interrupt()
        so_far = tokens_of(await first)
        rest = dataclasses.replace(cut, generated_ids=tuple(so_far), max_new_tokens=400 - len(so_far))
        extends = [asyncio.ensure_future(engine.extend(request)) for request in (rest, interrupted)]
        await asyncio.sleep(0)
        before = engine.stats()["engine/prefill_tokens"], engine.stats()["engine/reprefill_tokens"]
        os.kill(engine.pid, signal.SIGKILL)
        for rollout_id in (cut.rollout_id, "7-7"):
            assert await engine.progress([rollout_id]) == {} and await engine.queued([rollout_id]) == set()
        while not engine.num_restarts:
            await asyncio.sleep(0.001)
        assert await engine.progress([cut.rollout_id]) == {}
        engine.interrupt([interrupted.rollout_id])
        (nothing,) = await extends[1]
        assert (len(nothing), nothing.stop_reason, nothing.start) == (0, StopReason.PAUSED, 0)
        meanwhile = asyncio.ensure_future(engine.extend(late))
        answers = [await extends[0], await meanwhile]
        assert [s.policy_version for segments in answers for s in segments] == [5, 5]
        assert [segments[0].start for segments in answers] == [len(so_far), 0]
        stats = engine.stats()
        assert stats["engine/restarts"] == 1 and stats["engine/decode_steps"] > 0
        # The last token of what is prefilled is decoded.
        assert stats["engine/prefill_tokens"] - before[0] == len(late.prompt) - 1
        assert stats["engine/reprefill_tokens"] - before[1] == len(cut.prompt) + len(so_far) - 1
        await engine.close()
        return [so_far + tokens_of(answers[0]), tokens_of(answers[1])]

    assert asyncio.run(run()) == uninterrupted(model, changed, cut, late)
    assert len(said) == 1 and "exit code -9" in said[0] and "restarted, and 2 rollouts continue" in said[0]


def test_a_process_that_hangs_is_killed_and_started_again(model: Path, made: list[ProcessEngine]) -> None:
    """It is stopped, not dead: it answers nothing, and nothing tells its parent. It never reads the interruption.
    The next one may take longer than that to load its model, as the first one did. The event loop goes on while weights
    travel to one that hangs, and whoever asks for tokens meanwhile, and gives up, spoils nothing: the one after it has
    the weights."""
    said: list[str] = hear([])
    goes_on, interrupted = (SUBJECT.request(i, max_new_tokens=400) for i in range(2))
    request = SUBJECT.request(2, max_new_tokens=30)
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]
    limits = config(model).watchdog.model_copy(update={"rollout_timeout_s": 2.0})

    async def run() -> list[list[int]]:
        engine = ProcessEngine(config(model).model_copy(update={"watchdog": limits}), threads=1)
        made.append(engine)
        assert engine.max_tokens  # as a run asks at its start: it waits for the model
        extends = [asyncio.ensure_future(engine.extend(request)) for request in (goes_on, interrupted)]
        await until_it_has_tokens(engine, goes_on.rollout_id)
        os.kill(engine.pid, signal.SIGSTOP)
        engine.interrupt([interrupted.rollout_id])
        before = time.monotonic()
        assert await engine.progress([goes_on.rollout_id]) == {}  # as the watchdog asks
        assert 2 <= time.monotonic() - before < 60
        whole, (nothing,) = await asyncio.wait_for(asyncio.gather(*extends), 300)
        assert (len(nothing), nothing.stop_reason, nothing.start) == (0, StopReason.PAUSED, 0)
        return [tokens_of(whole), await loaded_while_it_hangs(engine)]

    async def loaded_while_it_hangs(engine: ProcessEngine) -> list[int]:
        os.kill(engine.pid, signal.SIGSTOP)
        extend = asyncio.ensure_future(engine.extend(request))
        load = asyncio.ensure_future(engine.load_weights(5, changed))
        turns, gave_up = 0, asyncio.ensure_future(engine.progress([request.rollout_id]))
        while not load.done():
            assert engine.oldest_version == 0, "it may still sample under the old weights"
            await asyncio.sleep(0.01)
            gave_up.cancel()
            turns += 1
        assert turns > 10 and engine.oldest_version == 5
        answer = await asyncio.wait_for(extend, 300)
        assert [s.policy_version for s in answer] == [5]
        await engine.close()
        return tokens_of(answer)

    assert asyncio.run(run()) == [*uninterrupted(model, (), goes_on), *uninterrupted(model, changed, request)]
    assert said[0] == "watchdog: the engine process has not answered for 2 s: it is killed"
    assert "exit code -9" in said[1] and "1 rollouts continue" in said[1]


def test_child_that_dies_at_its_start_is_restarted_once(model: Path, made: list[ProcessEngine]) -> None:
    async def run() -> None:
        engine = ProcessEngine(config(model), threads=1)
        made.append(engine)
        await engine.extend(SUBJECT.request(0, max_new_tokens=2))
        for num in (1, 2):
            os.kill(engine.pid, signal.SIGKILL)
            while engine.num_restarts < num:
                await asyncio.sleep(0.001)
        assert len(tokens_of(await engine.extend(SUBJECT.request(0, max_new_tokens=3)))) == 3
        work, seen = asyncio.ensure_future(engine.extend(SUBJECT.request(0, max_new_tokens=400))), set()
        while not work.done():
            if engine.pid not in seen:
                seen.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            await asyncio.sleep(0.001)
        for extend in (work, engine.extend(SUBJECT.request(1))):
            with pytest.raises(EngineDied, match="died 4 times in a row"):
                await extend
        assert len(seen) == 4
        await engine.close()

    asyncio.run(run())


def test_without_room_in_memory_weights_go_through_another_folder(
    model: Path, made: list[ProcessEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known, and said, before anything is trained; and the weights arrive."""
    full_above(monkeypatch, "/dev/shm", 10_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = hear([])
    changed = [(name, tensor * 1.05) for name, tensor in weights(model)]

    async def run(request: ExtendRequest) -> list[int]:
        engine = ProcessEngine(config(model), threads=1)
        made.append(engine)
        assert engine.max_tokens and len(said) == 1
        await engine.load_weights(1, changed)
        segments = await engine.extend(request)
        await engine.close()
        return tokens_of(segments)

    request = SUBJECT.request(0, max_new_tokens=30)
    assert [asyncio.run(run(request))] == uninterrupted(model, changed, request)
    assert len(said) == 1
    assert re.fullmatch(rf"/dev/shm has no room for the \S+ MB of weights: .* a file in {tmp_path}, .*", said[0])


def test_it_dies_with_a_parent_that_is_killed(model: Path) -> None:
    program = (
        "import sys, time\n"
        "from rollover.config import Config\n"
        "from rollover.engine.process.engine import ProcessEngine\n"
        "engine = ProcessEngine(Config.model_validate_json(sys.argv[1]), threads=1)\n"
        "print(engine.max_tokens and engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    source = Path(__file__).parents[2] / "src"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, config(model).model_dump_json(exclude_unset=True)],
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
