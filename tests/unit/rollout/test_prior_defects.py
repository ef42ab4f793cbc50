"""What other systems' partial rollouts get wrong, as tests that fail with the same defect here.

LightRFT: pull request 29, eight defects. APR (verl-recipe, pull request 58): four defects, a priority that the code
does not have (5) and a silent drop (6). The comment above each test says what the original does.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import tiny
import virtual_time
from rollover.algorithms.correction import importance_weights
from rollover.config import AlgorithmConfig, EngineConfig, RewardsConfig, TasksConfig
from rollover.config.rollout import RolloutConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.fake import FakeEngine
from rollover.engine.protocol import ExtendRequest
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle
from rollover.run.batch_metrics import rollout_metrics, staleness_metrics
from rollover.tasks.prompts import PromptSource, encoder
from rollover.tasks.stream import TaskStream
from rollover.trainer.batch import Batch, build_batch
from rollover.trainer.packing import split_groups
from rollover.types import (
    DropReason,
    Group,
    Prompt,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    rollout_seed,
)
from unit.rollout.run import EOS, PARTIAL, PROMPT, Run, assert_same_groups, long_tail, uninterrupted_tokens
from unit.rollout.world import make_segment, make_task, same_rollout, through_json
from virtual_time import at_once

BUDGET = 40  # Run's max_new_tokens


class RecordingEngine(FakeEngine):
    """Remembers what it was asked for, what it gave, and who was released."""

    def __init__(self, vocab_size: int = 1000) -> None:
        super().__init__(long_tail, vocab_size=vocab_size)
        self.calls: list[tuple[ExtendRequest, list[Segment]]] = []
        self.released: list[str] = []

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        segments = await super().extend(request)
        self.calls.append((request, segments))
        return segments

    def release(self, rollout_ids) -> None:
        self.released += rollout_ids


def continuations(engine: RecordingEngine) -> list[tuple[ExtendRequest, list[Segment]]]:
    found = [(request, segments) for request, segments in engine.calls if request.generated_ids]
    assert found, "nothing was continued"
    return found


def rollouts_of(batches: list[list[Group]]) -> list[Rollout]:
    return [r for batch in batches for g in batch for r in g.rollouts]


def continued(batches: list[list[Group]]) -> list[Rollout]:
    found = [r for r in rollouts_of(batches) if len(r.versions) > 1]
    assert found, "nothing was continued"
    return found


def alone(rollout: Rollout, version: int) -> Segment:
    """What an uninterrupted run of this rollout samples under `version`."""
    seed = rollout_seed(3, rollout.task.task_id, rollout.task.attempt, rollout.sibling)
    request = ExtendRequest("x", PROMPT, (), BUDGET, seed, SamplingParams(), frozenset({EOS}))
    (segment,) = asyncio.run(FakeEngine(long_tail, policy_version=version).extend(request))
    return segment


# LightRFT


# The output of the second pass replaces that of the first, beside the original prompt.
def test_lightrft_1_the_first_segment_is_kept_and_trained() -> None:
    run = Run(**PARTIAL)
    batches = run.steps(8)
    samples = {s.rollout_id: s for batch in batches for s in build_batch(batch, AlgorithmConfig()).samples}
    for rollout in continued(batches):
        sample = samples[rollout.rollout_id]
        assert sample.token_ids.tolist() == uninterrupted_tokens(rollout, BUDGET)
        assert sample.mask.all(), "a token of an earlier segment is not in the loss"
        assert sample.prompt_ids.tolist() == [1, 2, 3]


# The partial output is decoded, put behind the prompt, tokenised again and cut to the longest prompt.
def test_lightrft_2_a_continuation_goes_on_from_the_very_token_ids() -> None:
    tokenizer = tiny.tokenizer()
    engine = RecordingEngine(vocab_size=len(tokenizer))
    Run(engine=engine, group_size=4, **PARTIAL).steps(12)
    so_far: dict[str, tuple[int, ...]] = {}
    lossy = 0
    for request, segments in engine.calls:
        before = so_far.get(request.rollout_id, ())
        assert request.prompt == PROMPT and request.generated_ids == before
        text = tokenizer.decode(list(before), skip_special_tokens=True)
        lossy += tuple(tokenizer(text)["input_ids"]) != before
        so_far[request.rollout_id] = before + tuple(int(t) for s in segments for t in s.token_ids)
    assert lossy, "this run does not see the difference between ids and text"


# The second pass gets the whole budget again.
def test_lightrft_3_a_continuation_gets_what_is_left_of_the_budget() -> None:
    engine = RecordingEngine()
    batches = Run(engine=engine, **PARTIAL).steps(8)
    for request, _ in continuations(engine):
        assert request.max_new_tokens == BUDGET - len(request.generated_ids)
    cut = [r for r in continued(batches) if r.stop_reason is StopReason.LENGTH]
    assert cut and all(r.num_tokens == BUDGET for r in cut)
    assert max(r.num_tokens for r in rollouts_of(batches)) == BUDGET


# The path without images uses a name that is not defined. (ruff's F821 refuses such a name here.)
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_lightrft_4_text_only_tasks_are_interrupted_and_continued(tmp_path: Path, chat: bool) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"count to {i}", "answer": str(i)}) + "\n" for i in range(60)))
    tasks = TasksConfig.model_validate({"sources": [{"kind": "dataset", "path": str(path)}], "chat": chat})
    stream = TaskStream(tasks, seed=0, split="train", rewards=RewardsConfig())
    engine = RecordingEngine()
    run = Run(engine=engine, **PARTIAL)
    run.driver.next_task = PromptSource(stream, encoder(tiny.tokenizer(), None), 64)
    batches = run.steps(6)
    assert {r.task.messages is not None for r in continued(batches)} == {chat}
    tokenizer = tiny.tokenizer()
    for request, _ in continuations(engine):
        assert "count to " in tokenizer.decode(list(request.prompt.ids))


# Samples are counted and drawn, not groups: siblings end up in different batches, each with a baseline of its own.
@pytest.mark.parametrize("complete_by", ["group", "rollout"])
def test_lightrft_5_groups_are_trained_whole_with_one_baseline(complete_by: str) -> None:
    run = Run(group_size=3, groups_per_step=4, interrupt="when_enough", in_flight_groups=9, max_staleness=2,
              complete_by=complete_by)  # fmt: skip
    batches = run.steps(8)
    continued(batches)
    times = Counter(r.rollout_id for r in rollouts_of(batches))
    assert set(times.values()) == {1}
    for batch in batches:
        built = build_batch(batch, AlgorithmConfig(advantage="dr_grpo"))
        assert Counter(s.group_id for s in built.samples) == {g.group_id: 3 for g in batch}
        baseline = {g.group_id: np.mean([r.reward.score for r in g.rollouts if r.reward]) for g in batch}
        scores = {r.rollout_id: r.reward.score for r in rollouts_of([batch]) if r.reward}
        for sample in built.samples:
            expected = scores[sample.rollout_id] - baseline[sample.group_id]
            assert sample.advantages == pytest.approx(expected, rel=1e-4, abs=1e-2)
        for parts in (2, 3):
            ids = [{s.group_id for s in part} for part in split_groups(built.samples, parts)]
            assert sum(map(len, ids)) == len(set().union(*ids)), "a group is in two minibatches"


# No log-probs of the segments, no versions, no importance weights, no staleness.
def test_lightrft_6_every_token_has_its_own_version_log_prob_and_weight() -> None:
    run = Run(**PARTIAL)
    batches = run.steps(8)
    num_weighted = 0
    for version, batch in enumerate(batches):
        by_id = {r.rollout_id: r for g in batch for r in g.rollouts}
        built = build_batch(batch, AlgorithmConfig())
        for sample in built.samples:
            rollout = by_id[sample.rollout_id]
            sampled = {v: alone(rollout, v).logprobs for v in {*rollout.versions, version}}
            expected = np.array([sampled[v][i] for i, v in enumerate(sample.versions.tolist())])
            assert np.array_equal(sample.behavior_logprobs, expected)
            proximal = sampled[version][: len(expected)]
            ratio = np.exp(np.clip(proximal - expected, -20, 20))
            assert (ratio[sample.versions == version] == 1).all()
            weights = importance_weights(
                torch.tensor(proximal)[None], torch.from_numpy(sample.behavior_logprobs)[None],
                torch.from_numpy(sample.mask)[None], mode="token_truncate", cap=2.0,
            )  # fmt: skip
            assert weights[0].numpy() == pytest.approx(np.minimum(ratio, 2.0), rel=1e-5)
            num_weighted += int((ratio != 1).sum())
        oldest = min(s.policy_version for r in by_id.values() for s in r.segments)
        assert staleness_metrics(built, version)["staleness/max"] == version - oldest <= run.config.max_staleness
    assert num_weighted > 0


# The buffers are not in the checkpoint.
def test_lightrft_7_unfinished_rollouts_are_in_the_checkpoint(tmp_path: Path) -> None:
    run = Run(**PARTIAL)
    while not any(r.state is RolloutState.PARKED for g in run.cache.groups.values() for r in g.rollouts):
        run.steps(1)
    state, arrays = run.lifecycle.state_dict()
    safetensors.numpy.save_file(arrays, tmp_path / "rollouts.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(state))

    other = Run(**PARTIAL)
    loaded = json.loads((tmp_path / "state.json").read_text())
    other.lifecycle.load_state_dict(loaded, safetensors.numpy.load_file(tmp_path / "rollouts.safetensors"))
    other.cursor, other.version = run.cursor, run.version
    at_once(other.engine.load_weights(other.version, ()))
    held = [r for g in run.cache.groups.values() for r in g.rollouts]
    restored = [r for g in other.cache.groups.values() for r in g.rollouts]
    assert len(restored) == len(held) and all(map(same_rollout, restored, held))
    for ours, theirs in zip(other.steps(5), run.steps(5), strict=True):
        assert_same_groups(ours, theirs)


# No metrics of partial rollouts.
def test_lightrft_8_partial_rollouts_have_metrics() -> None:
    run = Run(**PARTIAL)
    batches = run.steps(8)
    shares, most = [], 0.0
    for version, batch in enumerate(batches):
        metrics = rollout_metrics(batch) | staleness_metrics(build_batch(batch, AlgorithmConfig()), version)
        mixed = [r for r in rollouts_of([batch]) if len(r.versions) > 1]
        assert metrics["rollouts/partial_share"] == pytest.approx(len(mixed) / len(rollouts_of([batch])))
        shares.append(metrics["rollouts/partial_share"])
        most = max(most, metrics["staleness/max"])
    assert max(shares) > 0 and most > 0
    assert run.lifecycle.metrics()["rollouts/resumed"] == run.count(EventKind.RESUME) > 0


# Its reviewers also miss a staleness threshold that drops or prioritises.
@pytest.mark.parametrize("on_stale", ["drop", "finish_first", "mask"])
def test_lightrft_8_there_is_a_staleness_threshold(on_stale: str) -> None:
    bound = 0 if on_stale == "mask" else 1
    flight = 4 if on_stale == "finish_first" else 10
    run = Run(interrupt="when_enough", in_flight_groups=flight, max_staleness=bound, on_stale=on_stale, max_running=6)
    batches = run.steps(12)
    for version, batch in enumerate(batches):
        oldest = version - bound if on_stale == "mask" else 0
        built: Batch = build_batch(batch, AlgorithmConfig(), max(0, oldest))
        assert staleness_metrics(built, version)["staleness/max"] <= bound
    metrics = run.lifecycle.metrics()
    assert (metrics["dropped/stale/groups"] > 0) == (on_stale != "finish_first")
    assert (metrics["dropped/masked/tokens"] > 0) == (on_stale == "mask")


# And a reuse of the prefix cache, by a stable session id.
def test_lightrft_8_the_engine_may_keep_the_cache_of_an_interrupted_rollout() -> None:
    class Kept(RecordingEngine):
        async def extend(self, request: ExtendRequest) -> list[Segment]:
            assert request.rollout_id not in self.released, "its cache was given up while it was unfinished"
            return await super().extend(request)

    engine = Kept()
    run = Run(engine=engine, **PARTIAL)
    run.steps(8)
    continuations(engine)
    left = {e.group.group_id for e in run.events if e.kind in (EventKind.CONSUME, EventKind.DROP)}
    assert {int(name.split("-")[0]) for name in engine.released} == left


# APR


# The version of a resumed prompt is not refreshed: every span is 0, and nothing that depends on it ever happens.
@pytest.mark.parametrize("kind", ["fake", "embedded"])
def test_apr_1_a_continuation_has_the_version_that_samples_it(kind: str) -> None:
    embedded = EmbeddedEngine(tiny.model(), EngineConfig(kv_memory_gb=0.05)) if kind == "embedded" else None
    run = Run(engine=embedded, interrupt="when_enough", in_flight_groups=10, max_staleness=1, on_stale="drop",
              max_running=6)  # type: ignore[arg-type]  # fmt: skip
    began: dict[str, list[int]] = {}

    def note(event: Event) -> None:
        run.events.append(event)
        if event.rollout is not None and event.kind in (EventKind.START, EventKind.RESUME):
            began.setdefault(event.rollout.rollout_id, []).append(run.version)

    run.lifecycle.on_event = note
    batches = run.steps(12)
    for rollout in continued(batches):
        # One segment for each time that it ran, unless it was interrupted before its first token.
        assert set(rollout.versions) <= set(began[rollout.rollout_id])
        assert rollout.versions[-1] == began[rollout.rollout_id][-1]
    assert run.count(EventKind.DROP) > 0, "the drop for old age never happens"


# Once the data loader is exhausted nothing is pulled any more, not even the partials: the end of an epoch hangs.
def test_apr_2_the_last_partials_are_finished_after_the_last_task() -> None:
    run = Run(num_tasks=9, **PARTIAL)
    held_at_the_end: list[int] = []

    async def to_the_end() -> list[list[Group]]:
        batches = []
        while batch := await asyncio.wait_for(run.step(), timeout=20):
            batches.append(batch)
            if run.lifecycle.stream_ended:
                held = [r.state for g in run.cache.groups.values() for r in g.rollouts]
                held_at_the_end.append(sum(state is RolloutState.PARKED for state in held))
        return batches

    batches = asyncio.run(to_the_end())
    assert max(held_at_the_end) > 0, "the stream ended without partials: this run shows nothing"
    assert sorted(g.group_id for batch in batches for g in batch) == list(range(9))
    assert not run.cache.groups


# It polls every 10 ms.
def test_apr_3_waiting_costs_nothing() -> None:
    class Slow(FakeEngine):
        async def extend(self, request: ExtendRequest) -> list[Segment]:
            await asyncio.sleep(0.5)
            return await super().extend(request)

    run = Run(engine=Slow(lambda seed: 3))
    asked = 0
    to_consume = run.scheduler.to_consume

    def counted(version: int, stream_ended: bool = False) -> list[int] | None:
        nonlocal asked
        asked += 1
        return to_consume(version, stream_ended)

    run.scheduler.to_consume = counted  # type: ignore[method-assign]
    assert virtual_time.run(run.step())
    # Four rollouts and two scores arrive; at 10 ms it would be 50 times more.
    assert asked <= 16


def two_parked(**changes: object) -> Lifecycle:
    """Group 1, begun at version 2, was parked before group 0, begun at version 0. One slot is free."""
    config = {"groups_per_step": 1, "group_size": 1, "in_flight_groups": 3, "max_staleness": 2, **changes}
    life = Lifecycle(RolloutConfig.model_validate({"interrupt": "when_enough", **config}), 2, 1)
    old = life.admit(make_task(0), Prompt((1, 2, 3)), 0).rollouts[0]
    life.start(0)
    life.append(old, [make_segment(9, 0)])
    young = life.admit(make_task(1), Prompt((1, 2, 3)), 2).rollouts[0]
    life.start(2)
    life.append(young, [make_segment(4, 2)])
    life.append(old, [make_segment(1, 2)])
    life.scheduler.max_running = 1
    return life


# The prompt manager is not in the checkpoint: neither its queues nor its counters.
def test_apr_4_the_order_of_resumption_and_the_counters_are_in_the_checkpoint() -> None:
    life = two_parked(order="fifo", on_stale="drop")
    meta, arrays = life.state_dict()
    other = Lifecycle(life.config, max_running=1, min_valid_rewards=1)
    other.load_state_dict(through_json(meta), arrays)
    assert other.metrics() == life.metrics()
    assert [r.rollout_id for r in other.start(2)] == [r.rollout_id for r in life.start(2)] == ["1-0"]


# A priority is documented; the code is first in, first out, with the interrupted put in front.
def test_apr_5_priority_and_order_decide_who_is_resumed() -> None:
    def first(**changes: object) -> int:
        (rollout,) = two_parked(**changes).start(2)
        return rollout.group_id

    assert first(order="fifo", on_stale="drop") == 1, "first in, first out, where that is asked for"
    assert first(order="fifo") == 0, "the step at version 2 is the last that may train group 0"
    for order in ("longest_first", "shortest_remaining", "oldest_first"):
        assert first(order=order, on_stale="drop") == 0


# Prompts that span ten versions are dropped without a word.
def test_apr_6_a_drop_has_a_reason_a_counter_and_an_event() -> None:
    run = Run(interrupt="when_enough", in_flight_groups=10, max_staleness=1, on_stale="drop", max_running=6)
    batches = run.steps(12)
    drops = [e for e in run.events if e.kind is EventKind.DROP]
    assert drops and {e.reason for e in drops} == {DropReason.STALE}
    metrics = run.lifecycle.metrics()
    assert metrics["dropped/stale/groups"] == len(drops)
    assert metrics["dropped/stale/tokens"] == sum(r.num_tokens for e in drops for r in e.group.rollouts)
    gone = [e.group.group_id for e in drops] + [g.group_id for b in batches for g in b]
    assert sorted([*gone, *run.cache.groups]) == list(range(run.cache.num_admitted))
