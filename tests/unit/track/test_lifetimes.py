"""What only a rollout's history tells: its times add up to its life, over restarts too; length bias and waiting."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from rollover.rollout.lifecycle import Event, EventKind, RunClock
from rollover.staleness import staleness
from rollover.track.lifetimes import STATES, LengthBias, Lifetimes, wait_by_quarter
from rollover.track.statistics import censored_mean
from rollover.types import Group, Prompt, RolloutState
from samples import group, rollout, segment
from unit.track.traced import MODES, TracedRun, traced

every_mode = pytest.mark.parametrize("mode", MODES)


def lives_from_the_trace(run: TracedRun) -> list[dict[str, float]]:
    """Per step: means over its rollouts, from the trace alone."""
    admitted, ready, running, first_start = {}, {}, defaultdict(float), {}
    started: dict[tuple, float] = {}
    steps, rollouts = [], []
    for e in run.trace:
        key = (e.group, e.sibling)
        if e.kind == "admit":
            admitted[e.group] = e.seconds
        elif e.kind == "ready":
            ready[e.group] = e.seconds
        elif e.kind in ("start", "resume"):
            started[key] = e.seconds
            first_start.setdefault(key, e.seconds)
        elif e.kind in ("park", "finish"):
            running[key] += e.seconds - started[key]
        elif e.kind == "consume":
            for sibling in range(run.config.group_size):
                rollouts.append((e.seconds - admitted[e.group], running[e.group, sibling], e.seconds - ready[e.group]))
        elif e.kind == "publish":
            whole, run_s, ready_s = np.mean(rollouts, axis=0)
            steps.append({"whole": whole, "running": run_s, "ready": ready_s})
            rollouts = []
    return steps


@every_mode
def test_times_in_states_add_up_to_a_rollouts_life(mode: str) -> None:
    run = traced(mode, 10)
    expected = lives_from_the_trace(run)
    assert len(run.rows) == len(expected) == 10
    for row, life in zip(run.rows, expected, strict=True):
        times = {s.value: row.get(f"state/{s.value}_s", 0.0) for s in STATES}
        assert sum(times.values()) == pytest.approx(life["whole"])
        assert times["running"] == pytest.approx(life["running"]) and times["ready"] == pytest.approx(life["ready"])
        assert all(t >= 0 for t in times.values())
    parked = sum(row["state/parked_s"] for row in run.rows)
    assert (parked > 0) == (MODES[mode].get("interrupt", "never") != "never")


def test_trace_and_lifetimes_share_transition_times() -> None:
    run, readings = TracedRun(**MODES["partial"]), itertools.accumulate(itertools.cycle([1, 10, 100]))
    clock = RunClock(lambda: float(next(readings)))  # no two readings are the same
    run.lifecycle.clock = run.tracing.clock = clock
    run.steps(5)
    for row, life in zip(run.rows, lives_from_the_trace(run), strict=True):
        assert sum(row.get(f"state/{s.value}_s", 0.0) for s in STATES) == pytest.approx(life["whole"], abs=1e-9)
        assert row["state/running_s"] == pytest.approx(life["running"], abs=1e-9)
        assert row["state/ready_s"] == pytest.approx(life["ready"], abs=1e-9)


@pytest.mark.parametrize("mode", ["partial", "slots", "drop", "budget"])
def test_a_restart_changes_no_metric(mode: str) -> None:
    straight = traced(mode, 9)
    first = traced(mode, 4)
    saved = first.save()
    first.steps(3)  # lost
    second = TracedRun(**MODES[mode])
    second.load(saved)
    second.steps(5)
    assert [*first.rows[:4], *second.rows] == straight.rows


def test_what_ran_in_a_snapshot_is_parked_after_it() -> None:
    run = TracedRun(**MODES["slots"])
    group = run.lifecycle.admit(run.next_task()[0], Prompt.of([1, 2]), 0)  # type: ignore[index]
    run.lifecycle.start(0)
    run.now = 10
    saved = run.save()
    assert {r.state for r in group.rollouts} == {RolloutState.RUNNING}
    again = TracedRun(**MODES["slots"])
    again.load(saved)
    (held,) = again.lifetimes.state_dict()["groups"].values()
    assert [state for state, *_ in held["lives"]] == [RolloutState.WAITING.value] * 2
    assert [seconds["running"] for *_, seconds in held["lives"]] == [9.0, 8.0]


def test_a_checkpoint_without_history_begins_one() -> None:
    run = traced("partial", 3)
    mine, (seconds, num_bytes, _) = run.save()
    again = TracedRun(**MODES["partial"])
    again.load((mine, (seconds, num_bytes, {})))
    again.steps(4)
    assert all(math.isfinite(row["bias/trained_vs_dispatched_length"]) for row in again.rows)
    assert all(row["state/running_s"] >= 0 for row in again.rows)


@every_mode
def test_in_flight_and_in_queue_are_the_staleness(mode: str) -> None:
    """Of every token: versions until its group is READY, and from then to its step."""
    run, seen = TracedRun(**MODES[mode]), set()
    for version in range(10):
        (groups,) = run.steps(1)
        assert run.ready_versions.keys() == {g.group_id for g in groups}
        for of in groups:
            for v in versions_of(of):
                in_flight = staleness(v, run.ready_versions[of.group_id])
                in_queue = staleness(run.ready_versions[of.group_id], version)
                assert in_flight >= 0 and in_queue >= 0 and in_flight + in_queue == staleness(v, version)
                seen.add((in_flight > 0, in_queue > 0))
    expected = {"sync": {(False, False)}, "ahead": {(False, False), (False, True)}}
    assert seen == expected.get(mode, seen) and (mode in expected or (True, False) in seen)


def versions_of(group: Group) -> set[int]:
    return {v for r in group.rollouts for v in r.versions}


# Length bias


@every_mode
def test_the_ratio_is_that_of_all_rollouts_since_the_start(mode: str) -> None:
    run = traced(mode, 12)
    groups = {e.group.group_id: e.group for e in run.events}.values()
    rollouts = [r for g in groups for r in g.rollouts if r.num_tokens]
    known = Counter(r.num_tokens for r in rollouts if r.stop_reason is not None)
    cut = Counter(r.num_tokens for r in rollouts if r.stop_reason is None)
    if mode == "drop":
        assert any(r.stop_reason is None and r.state is RolloutState.DROPPED for r in rollouts)
    trained = [r.num_tokens for r in rollouts if r.state is RolloutState.CONSUMED]
    # The last row is of after the last publication: nothing has happened since.
    ratio = np.mean(trained) / censored_mean(known, cut)
    assert run.rows[-1]["bias/trained_vs_dispatched_length"] == pytest.approx(ratio)


def test_ratio_of_known_lengths() -> None:
    bias = LengthBias()
    assert math.isnan(bias.ratio([]))
    bias.finished.update([2, 4, 9])
    bias.trained_rollouts, bias.trained_tokens = 2, 6
    assert bias.ratio([]) == pytest.approx(3 / 5)
    assert bias.ratio([0, 0]) == pytest.approx(3 / 5), "not dispatched yet"
    # At 2 one of 4 ends, at 4 one of 3; the fourth is longer than 7: of those two, one ends at 9, the largest seen.
    assert bias.ratio([7]) == pytest.approx(3 / (2 + 0.75 * 2 + 0.5 * 5))
    bias.unfinished[7] = 1
    assert bias.ratio([]) == pytest.approx(3 / (2 + 0.75 * 2 + 0.5 * 5)), "dropped unfinished counts alike"


def test_wait_by_quarter_of_length() -> None:
    lengths, waits = [50, 1, 40, 2, 30, 3, 20, 4], [9, 0, 8, 1, 5, 0, 4, 2]
    assert list(wait_by_quarter(lengths, waits).values()) == [0.5, 1.0, 4.5, 8.5]
    few = wait_by_quarter([3, 1], [7, 5])
    assert [few["bias/wait_steps_q1"], few["bias/wait_steps_q2"]] == [5.0, 7.0]
    assert math.isnan(few["bias/wait_steps_q3"]) and math.isnan(few["bias/wait_steps_q4"])


def test_waits_of_a_run_are_versions_from_admission_to_step() -> None:
    run = traced("partial", 8)
    admitted = {e.group: e.version for e in run.trace if e.kind == "admit"}
    consumed = defaultdict(list)
    for e in run.trace:
        if e.kind == "consume":
            consumed[e.version].append(e.version - admitted[e.group])
    for version, row in enumerate(run.rows):  # two groups of two: one rollout a quarter
        assert np.mean([row[f"bias/wait_steps_q{i}"] for i in (1, 2, 3, 4)]) == np.mean(consumed[version])
    assert sum(map(sum, consumed.values())) > 0


def test_a_baseline_that_is_compared_with_is_no_trained_rollout() -> None:
    """Its time and its length are in no mean."""
    lifetimes = Lifetimes()
    of = group(0, [rollout(0, i, 1.0, [segment([1] * length)]) for i, length in enumerate((3, 9, 6))])
    of.rollouts[1].greedy = True
    for member in of.rollouts:
        member.state = RolloutState.WAITING
    lifetimes.on_event(Event(EventKind.ADMIT, of))
    for end, member in zip((2.0, 100.0, 4.0), of.rollouts, strict=True):
        member.state = RolloutState.RUNNING
        lifetimes.on_event(Event(EventKind.START, of, member))
        member.state = RolloutState.SCORING
        lifetimes.on_event(Event(EventKind.FINISH, of, member, seconds=end))
    lifetimes.on_event(Event(EventKind.CONSUME, of, seconds=100.0, trainer_version=3))
    found = lifetimes.step_metrics()
    assert found["state/running_s"] == 3.0 and found["state/scoring_s"] == 97.0
    assert found["bias/wait_steps_q1"] == 3 and math.isnan(found["bias/wait_steps_q3"]), "two rollouts"
