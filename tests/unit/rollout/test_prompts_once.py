"""However many siblings share a prompt, it is kept, written, sent and packed once; those with others have their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from local_trainer import build_batch
from rollover.config import AlgorithmConfig, ReplayConfig
from rollover.config.rollout import RolloutConfig
from rollover.engine.process.engine import requests_from_json, requests_to_json
from rollover.rollout.cache import RolloutCache, groups_from_state, groups_to_state
from rollover.rollout.requests import Requests
from rollover.track.records import RolloutRecorder, read_records, read_rollouts
from rollover.track.tracker import RecordedGroup
from rollover.trainer.replay_buffer import KeptGroup, ReplayBuffer
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, StopReason, Task
from unit.rollout.world import make_segment, through_json

PROMPT = tuple(range(1, 30_001))
TASK = Task("t0", "s", "r", prompt="word " * len(PROMPT), columns={"answer": "word " * 1000})
PER_SIBLING = 3000  # bytes; the prompt has 120,000 in the tersest form


def cache_of(size: int) -> RolloutCache:
    """With one finished group."""
    cache = RolloutCache(max_new_tokens=8)
    for rollout in cache.admit(TASK, Prompt(PROMPT), size).rollouts:
        cache.start(rollout.rollout_id)
        cache.append(rollout.rollout_id, [make_segment(4, 0, StopReason.EOS)])
        cache.finish(rollout.rollout_id, StopReason.EOS)
        cache.set_reward(rollout.rollout_id, Reward(float(rollout.sibling)))
    return cache


def group_of(size: int) -> Group:
    return cache_of(size).groups[0]


def in_a_checkpoint(size: int, folder: Path) -> int:
    meta, arrays = cache_of(size).state_dict()
    return len(json.dumps(meta)) + sum(a.nbytes for a in arrays.values())


def in_the_replay_buffer(size: int, folder: Path) -> int:
    buffer = ReplayBuffer(ReplayConfig(size=1, max_staleness=3), seed=0)
    buffer.add(KeptGroup(group_of(size), 1.0))
    meta, arrays = buffer.state_dict()
    return len(json.dumps(meta)) + sum(a.nbytes for a in arrays.values())


def in_a_recording(size: int, folder: Path) -> int:
    recorded = RecordedGroup(group_of(size), ["answer"] * size, [0.5] * size)
    return RolloutRecorder(folder / str(size)).write(1, [recorded]).stat().st_size


def to_the_engine_process(size: int, folder: Path) -> int:
    group, requests = group_of(size), Requests(RolloutConfig(max_new_tokens=8), 0)
    calls = {i: requests.continuation(r) for i, r in enumerate(group.rollouts)}
    message = requests_to_json(calls)
    arrived = requests_from_json(through_json(message))
    assert arrived == calls, "and it arrives whole"
    assert len({id(request.prompt) for request in arrived.values()}) == 1
    return len(json.dumps(message))


def in_a_batch(size: int, folder: Path) -> int:
    samples = build_batch([group_of(size)], AlgorithmConfig()).samples
    assert all(np.array_equal(s.prompt_ids, PROMPT) for s in samples)
    return sum(a.nbytes for a in {id(s.prompt_ids): s.prompt_ids for s in samples}.values())


@pytest.mark.parametrize(
    "num_bytes",
    [in_a_checkpoint, in_the_replay_buffer, in_a_recording, to_the_engine_process, in_a_batch],
    ids=lambda function: function.__name__,
)
def test_63_more_siblings_cost_no_more_prompts(num_bytes: Callable[[int, Path], int], tmp_path: Path) -> None:
    alone, together = num_bytes(1, tmp_path), num_bytes(64, tmp_path)
    assert alone >= 4 * len(PROMPT), "it is there"
    assert together - alone < 63 * PER_SIBLING


def test_a_recorded_group_has_its_prompt_and_its_task_back(tmp_path: Path) -> None:
    in_a_recording(5, tmp_path)
    ((group,),) = read_rollouts(tmp_path / "5")
    assert group.prompt == Prompt(PROMPT) and group.task == TASK
    assert all(r.task is group.task for r in group.rollouts) and len(group.rollouts) == 5


def test_a_recording_of_the_earlier_form_has_them_in_every_line(tmp_path: Path) -> None:
    in_a_recording(3, tmp_path)
    (path,) = (tmp_path / "3").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    of_the_group = {name: lines[0][name] for name in ("messages", "prompt", "columns", "prompt_ids")}
    path.write_text("".join(json.dumps(line | of_the_group) + "\n" for line in lines))
    ((group,),) = read_rollouts(tmp_path / "3")
    assert group.prompt == Prompt(PROMPT) and group.task == TASK and len(group.rollouts) == 3


def group_of_episodes() -> Group:
    """Two episodes of a solver, with the group's prompt and a longer one, and a judge; then one as a plain run has."""
    task = Task("t1", "s", "r", prompt="x")

    def rollout(sibling: int, trajectory: int, context: int, role: str, ids: tuple[int, ...]) -> Rollout:
        place = {"role": role, "trajectory": trajectory, "context": context, "prompt": Prompt(ids)}
        segments = [make_segment(3, 0, StopReason.EOS)]
        return Rollout(5, sibling, task, segments, RolloutState.READY, StopReason.EOS, Reward(1.0), **place)

    rollouts = []
    for sibling in (0, 1):
        rollouts += [rollout(sibling, 0, 0, "solver", ()), rollout(sibling, 0, 1, "solver", (1, 2, 3))]
        rollouts += [rollout(sibling, 1, 0, "judge", (9, sibling))]
    return Group(5, task, Prompt((1, 2)), [*rollouts, Rollout(5, 2, task, [make_segment(1, 0)], RolloutState.PARKED)])


def places(group: Group) -> list[tuple]:
    return [(r.rollout_id, r.sibling, r.role, r.trajectory, r.context, r.prompt) for r in group.rollouts]


def test_own_prompts_survive_a_state() -> None:
    groups = [group_of_episodes(), group_of(2)]
    meta, arrays = groups_to_state(groups)
    assert len(arrays["prompt_offsets"]) - 1 == 5, "each of the distinct prompts is written once"
    restored = list(groups_from_state(through_json(meta), arrays))
    assert [places(g) for g in restored] == [places(g) for g in groups]
    assert [g.prompt for g in restored] == [g.prompt for g in groups]
    first, second = (next(r for r in restored[0].rollouts if r.rollout_id == i) for i in ("5-0.0.1", "5-1.0.1"))
    assert first.prompt is second.prompt, "siblings with equal prompts share one"
    assert meta[1]["rollouts"][0].keys().isdisjoint({"prompt"}), "a plain rollout has its group's"


def test_own_prompts_survive_a_recording(tmp_path: Path) -> None:
    group = group_of_episodes()
    group.rollouts.pop()  # only what stopped is recorded
    n = len(group.rollouts)
    path = RolloutRecorder(tmp_path).write(1, [RecordedGroup(group, ["answer"] * n, [0.5] * n)])
    ((restored,),) = read_rollouts(tmp_path)
    assert places(restored) == places(group) and restored.prompt == group.prompt
    assert [r["prompt_ids"] for r in read_records(tmp_path)] == [list(r.prompt.ids) for r in group.rollouts]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[3]["sibling"] == 1 and lines[3]["prompt_ids"] is None, "the prompt of the first line"


def test_own_prompts_are_sent_to_the_engine() -> None:
    group, requests = group_of_episodes(), Requests(RolloutConfig(max_new_tokens=8), 0)
    assert [requests.continuation(r).prompt for r in group.rollouts] == [r.prompt for r in group.rollouts]


def test_rollouts_with_prompts_of_their_own_are_trained_with_them() -> None:
    group = group_of_episodes()
    samples = build_batch([group], AlgorithmConfig()).samples
    assert [s.prompt_ids.tolist() for s in samples] == [list(r.prompt.ids) for r in group.rollouts]
