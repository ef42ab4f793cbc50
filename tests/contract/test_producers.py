"""What every producer of groups must do: the driver's, recorded rollouts, a class of the user's own."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_engine import FakeEngine
from rollover.config import Config
from rollover.run.pipeline import Pipeline
from rollover.run.producer import CustomProducer, Producer, RecordedRollouts, ready_group
from rollover.run.stop import Stop, signals_to
from rollover.staleness import group_staleness
from rollover.track.records import RolloutRecorder
from rollover.track.tracker import RecordedGroup
from rollover.types import Group, Prompt, Reward, RolloutState, SamplingParams, Segment, StopReason, Task
from unit.rollout.run import PARTIAL, Run

STEPS = 4
OWN = '''
from rollover.engine.protocol import ExtendRequest
from rollover.run.producer import ready_group
from rollover.types import Prompt, Reward, SamplingParams, Task

class Mine:
    """Two groups a step, for four steps, generated with the run's engine."""

    def __init__(self, config, tokenizer, engine):
        self.engine = engine

    async def produce(self, step, version):
        assert version == step - 1
        return [await self.group(2 * version + i) for i in (1, 0)] if step <= 4 else []

    async def group(self, group_id):
        def request(sibling):
            seed = 10 * group_id + sibling
            return ExtendRequest(f"{group_id}-{sibling}", Prompt((1, 2)), (), 6, seed, SamplingParams())
        segments = [await self.engine.extend(request(sibling)) for sibling in range(2)]
        task = Task(f"t{group_id}", "mine", "mine", prompt="go")
        return ready_group(group_id, task, (1, 2), segments, [Reward(float(len(s[-1]))) for s in segments])
'''


def short(seed: int) -> int:
    return 1 + seed % 9


def generation(folder: Path) -> tuple[Producer, FakeEngine]:
    run = Run(lengths=short, num_tasks=2 * STEPS, **PARTIAL)

    class Training(Pipeline):
        async def produce(self, step: int, version: int) -> list[Group] | None:
            run.driver.on_new_version(version)
            return await super().produce(step, version)

    parts: Any = SimpleNamespace(config=Config(), components=SimpleNamespace(driver=run.driver), hooks=None)
    unused: Any = None
    return Training(parts, unused, unused, syncs=True), run.engine


def recorded(folder: Path) -> tuple[Producer, FakeEngine]:
    run, recorder = Run(lengths=short), RolloutRecorder(folder)
    for step, groups in enumerate(run.steps(STEPS), start=1):
        recorder.write(step, [RecordedGroup(g, ["x"] * len(g.rollouts), [0.0] * len(g.rollouts)) for g in groups])
    return RecordedRollouts(folder), FakeEngine(short)


def own(folder: Path) -> tuple[Producer, FakeEngine]:
    engine = FakeEngine(short)
    return CustomProducer(config_for(folder, OWN), None, engine), engine


def config_for(folder: Path, source: str, max_staleness: int = 0) -> Config:
    (folder / "mine.py").write_text(source)
    values = {"tasks": {"producer": f"{folder / 'mine.py'}:Mine"}, "rollout": {"max_staleness": max_staleness}}
    return Config.model_validate(values)


@pytest.mark.parametrize("make", [generation, recorded, own])
def test_contract(tmp_path: Path, make: Callable[[Path], tuple[Producer, FakeEngine]]) -> None:
    producer, engine = make(tmp_path)
    seen: list[int] = []

    async def go() -> None:
        for step in range(1, STEPS + 1):
            version = step - 1
            await engine.load_weights(version, ())
            groups = await producer.produce(step, version)
            assert groups is not None and len(groups) == 2
            assert [g.group_id for g in groups] == sorted(g.group_id for g in groups)
            for group in groups:
                seen.append(group.group_id)
                assert 0 <= (group_staleness(group, version) or 0) <= 2
                for rollout in group.rollouts:
                    assert rollout.state in (RolloutState.READY, RolloutState.CONSUMED)
                    assert rollout.num_tokens > 0 and rollout.reward is not None and rollout.stop_reason is not None
        assert await producer.produce(STEPS + 1, STEPS) == []

    asyncio.run(go())
    assert sorted(seen) == list(range(2 * STEPS)), "no group twice, none lost"


def test_recorded_rollouts_go_on_at_the_step_they_are_asked_for(tmp_path: Path) -> None:
    whole, _ = recorded(tmp_path)
    resumed = RecordedRollouts(tmp_path)

    async def go() -> None:
        steps = [await whole.produce(step, step - 1) for step in range(1, STEPS + 1)]
        for step in (3, 4):
            groups = await resumed.produce(step, step - 1)
            assert [g.group_id for g in groups or []] == [g.group_id for g in steps[step - 1] or []]

    asyncio.run(go())


def test_recorded_rollouts_without_log_probs_are_refused(tmp_path: Path) -> None:
    """What was not finite was recorded as null."""
    recorded(tmp_path)
    file = tmp_path / "step-000001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["logprobs"][0] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=r"run.train_on_recorded = .*: group 0 cannot be trained: in rollout 0-1, its token 0"
    ):
        asyncio.run(RecordedRollouts(tmp_path).produce(1, 0))


def test_recorded_rollouts_of_a_model_with_more_tokens_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(ValueError, match=r"run.train_on_recorded = .*: group 0 cannot be trained: in .* are 0 to 9"):
        asyncio.run(RecordedRollouts(tmp_path, vocab_size=10).produce(1, 0))


def segment(num: int = 2, version: int = 0) -> Segment:
    ids, logprobs = np.zeros(num, np.int32), np.zeros(num, np.float32)
    return Segment(ids, logprobs, version, SamplingParams(), StopReason.EOS)


def group(group_id: int, version: int = 0) -> Group:
    task = Task(f"t{group_id}", "mine", "mine", prompt="go")
    return ready_group(group_id, task, (1,), [[segment(version=version)]] * 2, [Reward(1.0), Reward(0.0)])


def without_reward() -> Group:
    made = group(1)
    made.rollouts[0].reward = None
    return made


def with_logprob(wrong: float) -> Group:
    made = group(1, version=5)
    made.rollouts[1].segments[0] = replace(segment(version=5), logprobs=np.array([-1.0, wrong], np.float32))
    return made


def with_id(wrong: int) -> Group:
    made = group(1, version=5)
    made.rollouts[1].segments[0] = replace(segment(version=5), token_ids=np.array([3, wrong], np.int32))
    return made


def mine(folder: Path, produce: Callable, stop: Stop | None = None, max_staleness: int = 0) -> CustomProducer:
    """A producer of the user's own whose `produce` is this function."""
    source = "class Mine:\n    def __init__(self, config, tokenizer, engine):\n        self.produce = tokenizer"
    return CustomProducer(config_for(folder, source, max_staleness), produce, FakeEngine(short), stop, vocab_size=100)


def test_none_says_that_there_is_no_more(tmp_path: Path) -> None:
    assert asyncio.run(mine(tmp_path, lambda step, version: None).produce(1, 0)) == []


def test_a_stop_cancels_what_is_produced_and_nothing_of_it_is_trained(tmp_path: Path) -> None:
    ends = []

    async def produce(step: int, version: int) -> list[Group]:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append(step)
        return [group(0)]

    async def go() -> list[Group] | None:
        stop = Stop()
        stop.listen(lambda: None)
        with signals_to(stop.on_signal):
            producing = asyncio.ensure_future(mine(tmp_path, produce, stop).produce(1, 0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            signal.raise_signal(signal.SIGTERM)
            return await asyncio.wait_for(producing, 30)

    assert asyncio.run(go()) is None and ends == [1]


def test_ids_must_rise_over_restarts_too(tmp_path: Path) -> None:
    first = mine(tmp_path, lambda step, version: [group(4)])
    assert asyncio.run(first.produce(1, 0))
    resumed = mine(tmp_path, lambda step, version: [group(4)])
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="comes after group 4: ids must rise over the run, restarts included"):
        asyncio.run(resumed.produce(2, 1))


def test_an_answer_that_was_cut_off_is_no_answer() -> None:
    cut = replace(segment(), stop_reason=StopReason.PAUSED)
    with pytest.raises(ValueError, match="rollout 1 of group 0 was interrupted"):
        ready_group(0, group(0).task, (1,), [[segment()], [segment(), cut]], [Reward(1.0), Reward(0.0)])


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda: [group(0)], "comes after group 0: ids must rise"),
        (lambda: [without_reward()], "is not ready"),
        (lambda: [group(1, version=7)], "policy version above the trainer's, 5"),
        (lambda: [group(1, version=2)], "3 versions old, above rollout.max_staleness = 1"),
        (lambda: [with_logprob(float("nan"))], "group 1 of step 6 cannot be trained: in rollout 1-1, its token 1 has"),
        (
            lambda: [with_id(100)],
            "group 1 of step 6 cannot be trained: in rollout 1-1, its token 1 has the id 100, and",
        ),
        (
            lambda: [replace(group(1, version=5), prompt=Prompt((1, 70000)))],
            "in its prompt, its token 1 has the id 70000",
        ),
        (lambda: [3], "it must return a list of Groups"),
    ],
)
def test_what_an_own_producer_returns_is_checked(tmp_path: Path, returned: Callable, problem: str) -> None:
    answers = [[group(0, version=5)], returned()]
    producer = mine(tmp_path, lambda step, version: answers.pop(0), max_staleness=1)

    async def go() -> None:
        await producer.produce(6, 5)
        with pytest.raises(ValueError, match=problem):
            await producer.produce(6, 5)

    asyncio.run(go())


def test_the_engine_lets_go_of_what_was_produced(tmp_path: Path) -> None:
    """Or the cache of every rollout would stay for ever."""
    producer, engine = own(tmp_path)
    released: list[str] = []
    engine.release = released.extend  # type: ignore[method-assign]
    asyncio.run(producer.produce(1, 0))
    assert sorted(released) == ["0-0", "0-1", "1-0", "1-1"]


def test_groups_of_nothing_are_refused() -> None:
    task = Task("t", "mine", "mine", prompt="go")
    with pytest.raises(ValueError, match="1 rollouts and 2 rewards"):
        ready_group(0, task, (1,), [[segment()]], [Reward(1.0)] * 2)
    with pytest.raises(ValueError, match="rollout 0 of group 0 has no tokens"):
        ready_group(0, task, (1,), [[segment(0)]], [Reward(1.0)])
