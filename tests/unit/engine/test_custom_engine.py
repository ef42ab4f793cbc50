"""An engine of one's own behind the contract: which of its faults fail a rollout, and which end the run."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.engine.protocol import EngineDied, ExtendRequest, InvalidAnswer, WeightLoad
from rollover.engine.validate import CustomEngine
from rollover.functions import FunctionError
from rollover.rollout.requests import RetryingEngine
from rollover.types import Prompt, SamplingParams, Segment
from unit.rollout.hanging import short, steps, watchdog
from unit.rollout.run import Run, ids

REQUEST = ExtendRequest("0-0", Prompt((1, 2, 3)), (), 20, 7, SamplingParams())
VOCABULARY = 1000


def own(engine: FakeEngine | None = None, /, **methods: Any) -> CustomEngine:
    engine = engine or FakeEngine(lambda seed: 5)
    for name, method in methods.items():
        setattr(engine, name, method)
    return CustomEngine(engine, "mine.py:make", lambda: VOCABULARY)


def with_ids(segment: Segment, *ids: float, dtype: type = np.int32) -> Segment:
    return dataclasses.replace(segment, token_ids=np.array([*ids, *segment.token_ids[len(ids) :]], dtype=dtype))


def versioned(segment: Segment, version: Any) -> Segment:
    return dataclasses.replace(segment, policy_version=version)


ANSWERS: dict[str, tuple[Callable[[Segment], Any], str]] = {
    "outside": (lambda s: [with_ids(s, 3, 1000)], "its token 1 has the id 1000, and those of the model are 0 to 999"),
    "negative": (lambda s: [with_ids(s, -5)], "its token 0 has the id -5, and those of the model are 0 to 999"),
    "floats": (lambda s: [with_ids(s, dtype=np.float32)], "its token ids are float32, not integers"),
    "text": (lambda s: "an answer", "it is 'an answer' (str), not a list of Segment"),
    "texts": (lambda s: ["an answer"], "it is ['an answer'] (list), not a list of Segment"),
    "none": (lambda s: None, "it is None, not a list of Segment"),
    "nothing": (lambda s: [], "it has no segment"),
    "above": (
        lambda s: [versioned(s, 99)],
        "it has tokens of policy version 99, and the newest weights that it got are of 0",
    ),
    "no version": (lambda s: [versioned(s, None)], "its policy_version is None, not an int"),
    "NumPy's version": (
        lambda s: [versioned(s, np.int64(0))],
        "its policy_version is np.int64(0), not an int",
    ),
    "NumPy's start": (
        lambda s: [dataclasses.replace(s, start=np.int64(0))],
        "its start is np.int64(0), not an int",
    ),
    "log-probs": (
        lambda s: [dataclasses.replace(s, logprobs=s.logprobs.astype(np.int64))],
        "its log-probs are int64, not floating-point numbers",
    ),
    "stop": (
        lambda s: [dataclasses.replace(s, stop_reason="eos")],
        "its stop_reason is 'eos' (str), not a StopReason",
    ),
}


def answering(answer: Callable[[Segment], Any], only: str = "") -> FakeEngine:
    """Its first answer for the rollout `only` (empty: every answer of every one) is made of what it would be."""
    engine = FakeEngine(short)
    right, wrong = engine.extend, {only}

    async def extend(request: ExtendRequest) -> Any:
        segments = await right(request)
        if only and request.rollout_id not in wrong:
            return segments
        wrong.discard(request.rollout_id)
        return answer(segments[0])

    engine.extend = extend
    return engine


@pytest.mark.parametrize(("answer", "why"), ANSWERS.values(), ids=ANSWERS)
def test_invalid_answer_of_a_custom_engine_is_refused(answer: Callable, why: str) -> None:
    with pytest.raises(InvalidAnswer) as error:
        asyncio.run(own(answering(answer)).extend(REQUEST))
    assert str(error.value) == f"engine.kind = 'mine.py:make': the answer of its extend is refused, as {why}"


@pytest.mark.parametrize(("answer", "why"), [ANSWERS["outside"], ANSWERS["text"]])
def test_it_fails_its_rollout_which_is_asked_for_again(answer: Callable, why: str) -> None:
    run = Run(engine=own(answering(answer, only="0-1")), watchdog=watchdog())  # type: ignore[arg-type]
    assert ids(steps(run, 1)) == [[0, 1]]
    assert len(run.said) == 1
    assert run.said[0].startswith("the engine failed at rollout 0-1 (engine.kind = 'mine.py:make': the answer of its")
    assert f"is refused, as {why}): retry in" in run.said[0]
    asked = run.driver.retrying_engine.stats()
    assert asked["watchdog/refused_answers"] == 1 and asked["engine/failed_extends"] == 0
    run.check()


def test_only_invalid_answers_end_the_run_untrained() -> None:
    run = Run(engine=own(answering(ANSWERS["above"][0])), watchdog=watchdog())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the engine failed \d+ times in a row.*mine.py:make.* policy version 99"):
        steps(run, 1)
    assert run.ledger.generated_tokens == 0


def test_tokens_of_weights_still_loading_are_valid() -> None:
    engine = own()

    async def load() -> None:
        segments = await engine.extend(REQUEST)
        assert [s.policy_version for s in segments] == [0]
        await engine.load_weights(4, ())
        assert engine.oldest_version == 4
        again = dataclasses.replace(REQUEST, rollout_id="0-1")
        assert [s.policy_version for s in await engine.extend(again)] == [4]

    asyncio.run(load())


def test_what_it_says_of_its_progress_is_looked_at_too() -> None:
    async def progress(rollout_ids: Any) -> Any:
        (segment,) = await FakeEngine(lambda seed: 5).extend(REQUEST)
        return {"0-0": [with_ids(segment, 70000)]}

    with pytest.raises(InvalidAnswer, match="the answer of its progress is refused, as its token 0 has the id 70000"):
        asyncio.run(own(progress=progress).progress(["0-0"]))


def test_what_it_says_wrongly_of_one_rollout_hides_no_other() -> None:
    """What the watchdog does not hear of looks to it as if it stood still."""

    async def progress(rollout_ids: Any) -> Any:
        (segment,) = await FakeEngine(lambda seed: 5).extend(REQUEST)
        return {"0-0": [segment], "0-1": [with_ids(segment, 70000)], "0-2": "nothing"}

    asker = RetryingEngine(own(progress=progress), WatchdogConfig())
    found = asyncio.run(asker.progress(["0-0", "0-1", "0-2"]))
    assert found.keys() == {"0-0"} and len(found["0-0"][0]) == 5


def failing(*args: Any) -> Any:
    raise KeyError("gpu")


async def failing_later(*args: Any) -> Any:
    raise KeyError("gpu")


async def nothing(*args: Any) -> None:
    return None


CALLS: dict[str, Callable[[CustomEngine], Any]] = {
    "interrupt": lambda engine: engine.interrupt(),
    "release": lambda engine: engine.release(["0-0"]),
    "use_threads": lambda engine: engine.use_threads(1),
    "stats": lambda engine: engine.stats(),
    "load_weights": lambda engine: asyncio.run(engine.load_weights(1, ())),
    "progress": lambda engine: asyncio.run(engine.progress(["0-0"])),
    "queued": lambda engine: asyncio.run(engine.queued(["0-0"])),
    "close": lambda engine: asyncio.run(engine.close()),
}
AWAITED = ("load_weights", "progress", "queued", "close")


@pytest.mark.parametrize("name", CALLS)
def test_a_method_that_raises_is_named_with_what_it_must_do(name: str) -> None:
    engine = own(**{name: failing_later if name in AWAITED else failing})
    with pytest.raises(FunctionError) as error:
        CALLS[name](engine)
    text = str(error.value)
    assert text.startswith(f"engine.kind = 'mine.py:make': its {name} failed: KeyError: 'gpu' (") and "\n" not in text
    assert "Fix it: it must" in text


@pytest.mark.parametrize(
    ("name", "returns"),
    [("stats", lambda: None), ("stats", lambda: [1.0]), ("load_weights", nothing), ("queued", nothing),
     ("progress", nothing)],
)  # fmt: skip
def test_invalid_return_value_names_method_and_contract(name: str, returns: Any) -> None:
    with pytest.raises(FunctionError, match=f"its {name} gave .*Fix it: it must .*return"):
        CALLS[name](own(**{name: returns}))


@pytest.mark.parametrize("value", ["many", None, 4.5, lambda: 100], ids=["text", "none", "float", "method"])
def test_a_longest_rollout_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(FunctionError, match="its max_tokens gave .*it must be a property with .* an integer"):
        _ = own(max_tokens=value).max_tokens


def test_its_numbers_may_be_of_numpy() -> None:
    engine = own(FakeEngine(lambda seed: 5, policy_version=np.int64(0)), max_tokens=np.int64(40))  # type: ignore
    numbers = engine.max_tokens, engine.oldest_version
    assert numbers == (40, 0) and [type(number) for number in numbers] == [int, int]


def test_the_bytes_of_a_load_may_be_a_float() -> None:
    async def load(version: int, tensors: Any) -> WeightLoad:
        return WeightLoad(num_bytes=1.5e9, seconds=0.0)  # type: ignore[arg-type]

    assert asyncio.run(own(load_weights=load).load_weights(1, ())).num_bytes == 1.5e9


def test_without_trainer_any_version_is_valid() -> None:
    """A server that goes on after a run has the version of its last weights, and `rollover eval` asks it."""
    engine = CustomEngine(FakeEngine(lambda seed: 5, policy_version=57), "mine.py:make", lambda: VOCABULARY, math.inf)
    assert engine.oldest_version == 57
    assert [s.policy_version for s in asyncio.run(engine.extend(REQUEST))] == [57]


def test_an_oldest_version_that_it_never_got_is_named() -> None:
    with pytest.raises(FunctionError, match="its oldest_version gave 7, and the newest that it got is 0"):
        _ = own(FakeEngine(lambda seed: 5, policy_version=7)).oldest_version


@pytest.mark.parametrize("name", [*AWAITED, "stats"])
def test_engines_own_cancellation_is_an_error(name: str) -> None:
    def cancelled(*args: Any) -> Any:
        raise asyncio.CancelledError("the server went away")

    with pytest.raises(FunctionError, match=f"its {name} failed: CancelledError: the server went away"):
        CALLS[name](own(**{name: cancelled}))


def test_it_fails_a_rollout_and_not_the_run() -> None:
    engine, wrong = FakeEngine(short), {"0-1"}
    right = engine.extend

    async def extend(request: ExtendRequest) -> list[Segment]:
        if request.rollout_id in wrong:
            wrong.discard(request.rollout_id)
            raise asyncio.CancelledError("the server went away")
        return await right(request)

    run = Run(engine=own(engine, extend=extend), watchdog=watchdog())  # type: ignore[arg-type]
    assert ids(steps(run, 1)) == [[0, 1]]
    assert len(run.said) == 1 and "RuntimeError: CancelledError: the server went away" in run.said[0]
    run.check()


@pytest.mark.parametrize("name", ["extend", *AWAITED])
def test_whoever_cancels_what_waits_for_it_does(name: str) -> None:
    async def endless(*args: Any) -> Any:
        await asyncio.Event().wait()

    async def cancel() -> None:
        engine = own(**{name: endless})
        arguments = {"extend": (REQUEST,), "load_weights": (1, ()), "close": ()}.get(name, (["0-0"],))
        task = asyncio.ensure_future(getattr(engine, name)(*arguments))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(cancel())


ENDS = [EngineDied("it ended for good"), AssertionError("it ended for good")]


def raising(error: BaseException) -> Callable[..., Any]:
    async def later(*args: Any) -> Any:
        raise error

    return later


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("name", AWAITED)
def test_what_ends_a_run_at_once_is_not_taken_for_a_fault(name: str, error: Exception) -> None:
    """A question without an answer does not end a run: such an error would be lost there."""
    with pytest.raises(type(error), match="^it ended for good$"):
        CALLS[name](own(**{name: raising(error)}))


@pytest.mark.parametrize("error", [KeyError("gpu"), *ENDS], ids=repr)
def test_what_fails_at_the_close_hides_no_error(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    async def run() -> None:
        engine = own(close=raising(error))
        try:
            raise ValueError("the error that matters")
        finally:
            await engine.close()

    with pytest.raises(ValueError, match="the error that matters"):
        asyncio.run(run())
    said = f"rollover: engine.kind = 'mine.py:make': its close failed: {type(error).__name__}: {error} ("
    assert said in capsys.readouterr().err


def test_close_error_within_an_except_is_raised() -> None:
    async def run() -> None:
        engine = own(close=raising(KeyError("gpu")))
        await engine.close()

    try:
        raise ValueError("something earlier")
    except ValueError:
        with pytest.raises(FunctionError, match="its close failed: KeyError: 'gpu'"):
            asyncio.run(run())


def test_what_it_has_beside_the_contract_can_be_read() -> None:
    assert own(queue_length=3).queue_length == 3


def test_error_of_the_weights_is_not_blamed_on_the_engine() -> None:
    async def load_weights(version: int, tensors: Any) -> WeightLoad:
        return WeightLoad(len(list(tensors)), 0.0)

    def weights() -> Any:
        yield "first", None
        raise ConnectionError("rank 1 has ended")

    engine = own(load_weights=load_weights)
    with pytest.raises(ConnectionError, match="^rank 1 has ended$"):
        asyncio.run(engine.load_weights(1, weights()))
    assert asyncio.run(engine.load_weights(1, [("first", None)])).num_bytes == 1  # type: ignore[list-item]
