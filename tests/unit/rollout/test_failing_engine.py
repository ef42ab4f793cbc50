"""An engine whose `extend` raises: the rollout is tried again, then its group is dropped; an engine that is down ends
the run, as too many failures in a row do. The seconds are those of a virtual loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virtual_time
from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.config.rollout import RolloutConfig
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.lifecycle import EventKind, Lifecycle
from rollover.rollout.watchdog import Watchdog
from rollover.types import DropReason, Reward, RolloutState, Segment
from unit.rollout.hanging import assert_said, short
from unit.rollout.run import PARTIAL, Run, assert_same_groups, ids, uninterrupted_tokens


def full(text: str = "out of memory") -> Exception:
    return RuntimeError(text)


class Failing(FakeEngine):
    """`fails(request, how often it was asked for this rollout before)`: the error of this call, or None."""

    def __init__(
        self, fails: Callable[[ExtendRequest, int], Exception | None], lengths: Callable[[int], int] = short
    ) -> None:
        super().__init__(lengths)
        self.lengths = lengths
        self.fails = fails
        self.asked: dict[str, list[float]] = {}  # when

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        times = self.asked.setdefault(request.rollout_id, [])
        times.append(asyncio.get_running_loop().time())
        error = self.fails(request, len(times) - 1)
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return await super().extend(request)


def of(rollout_id: str, times: float) -> Callable[[ExtendRequest, int], Exception | None]:
    """The first `times` calls of one rollout fail."""
    return lambda request, before: full() if request.rollout_id == rollout_id and before < times else None


def run_of(engine: FakeEngine, *, max_failures: int = 4, retry_s: float = 0.5, **config: Any) -> Run:
    limits = WatchdogConfig(max_failures=max_failures, retry_s=retry_s, rollout_timeout_s=0, reward_timeout_s=0)
    return Run(engine=engine, watchdog=Watchdog(limits), **config)


def steps(run: Run, num: int) -> list:
    async def go() -> list:
        async with asyncio.timeout(3600):
            return [await run.step() for _ in range(num)]

    return virtual_time.run(go())


def failures(run: Run) -> float:
    return run.driver.retrying_engine.stats()["engine/failed_extends"]


def test_failed_extend_is_retried_with_backoff() -> None:
    """It was interrupted before, so that it has some."""

    def fails(request: ExtendRequest, before: int) -> Exception | None:
        tried = len(engine.asked[request.rollout_id]) - len(engine.asked_before.get(request.rollout_id, []))
        return full() if request.generated_ids and tried <= 3 else None

    engine = Failing(fails, lengths=lambda seed: 500 if seed % 3 == 0 else 4)
    engine.asked_before = {}  # type: ignore[attr-defined]
    run = run_of(engine, **PARTIAL)
    steps(run, 1)
    parked = [r for g in run.cache.groups.values() for r in g.rollouts if r.state is RolloutState.PARKED]
    engine.asked_before = {i: list(times) for i, times in engine.asked.items()}  # type: ignore[attr-defined]
    before = {r.rollout_id: r.token_ids() for r in parked}
    batches = steps(run, 4)
    again = [r for batch in batches for g in batch for r in g.rollouts if r.rollout_id in before]
    assert again and failures(run) >= 3
    for rollout in again:
        tokens = rollout.token_ids()
        assert tokens == uninterrupted_tokens(rollout, 40, engine.lengths) and before[rollout.rollout_id]
        assert tokens[: len(before[rollout.rollout_id])] == before[rollout.rollout_id]
    assert run.ledger.metrics(run.cache)["groups/dropped"] == 0
    assert len([line for line in run.said if "the engine failed at rollout" in line]) >= 1


def test_pauses_double_up_to_half_a_minute_and_are_counted() -> None:
    engine = Failing(of("1-0", times=9))
    run = run_of(engine, max_failures=12)
    assert ids(steps(run, 1)) == [[0, 1]]
    times = engine.asked["1-0"]
    pauses = [round(b - a, 6) for a, b in zip(times, times[1:], strict=False)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert failures(run) == 9
    assert_said(run, *[r"the engine failed at rollout 1-0 \(RuntimeError: out of memory\): retry in \S+ s"] * 2)


def test_after_max_failures_the_group_is_dropped_and_replaced() -> None:
    engine = Failing(of("1-0", times=99))
    run = run_of(engine)
    assert ids(steps(run, 2)) == [[0, 2], [3, 4]]
    (drop,) = [e for e in run.events if e.kind is EventKind.DROP]
    assert drop.group.group_id == 1 and drop.reason is DropReason.FAILED
    metrics = run.ledger.metrics(run.cache)
    assert metrics["dropped/failed/groups"] == 1 and metrics["dropped/stalled/groups"] == 0
    assert metrics["dropped/failed/tokens"] == sum(r.num_tokens for r in drop.group.rollouts) > 0
    assert failures(run) == 4 == len(engine.asked["1-0"])
    assert "the engine failed 4 times in a row at rollout 1-0 (RuntimeError: out of memory): its group is dropped" in (
        "\n".join(run.said)
    )


def test_siblings_that_fail_together_are_dropped_with_one_line() -> None:
    """The prompt is at fault."""
    engine = Failing(lambda request, before: full("too long") if request.rollout_id.startswith("0-") else None)
    run = run_of(engine, group_size=4)
    assert ids(steps(run, 1)) == [[1, 2]]
    assert sum("its group is dropped (failed)" in line for line in run.said) == 1


def test_single_failing_rollout_does_not_end_the_run() -> None:
    """Nothing else runs by then, so nothing is answered in between."""
    engine = Failing(lambda request, before: full() if request.rollout_id.startswith(("0-", "1-")) else None)
    run = run_of(engine, groups_per_step=4)
    assert ids(steps(run, 1)) == [[2, 3, 4, 5]]
    assert run.ledger.dropped[DropReason.FAILED].groups == 2


def test_failures_count_over_interruptions_which_end_pauses() -> None:
    """Other groups complete the step while 0-0 fails: it is parked each time, within no time, and asked again."""
    engine = Failing(of("0-0", times=99), lengths=lambda seed: 3)
    run = run_of(engine, retry_s=1000, max_failures=3, interrupt="when_enough", in_flight_groups=4, max_staleness=9)

    async def go() -> float:
        for _ in range(2):
            assert await run.step()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(go()) < 1
    assert run.cache.rollout("0-0").state is RolloutState.WAITING and len(engine.asked["0-0"]) == 2
    steps(run, 1)
    assert run.ledger.dropped[DropReason.FAILED].groups == 1


@pytest.mark.parametrize(
    "config",
    [{}, {"groups_per_step": 1}, {"group_size": 1}, PARTIAL, {"groups_per_step": 6, "max_running": 4}],
    ids=["sync", "one group", "one rollout", "partial", "few slots"],
)
def test_an_engine_that_is_down_ends_the_run_and_no_task_is_lost(config: dict[str, Any]) -> None:
    engine = Failing(lambda request, before: ConnectionError("connection refused"))
    run = run_of(engine, max_failures=8, **config)
    with pytest.raises(
        ValueError, match=r"failed \d+ times in a row.* ConnectionError: connection refused. .*--resume"
    ):
        steps(run, 1)
    run.check()
    in_one_group = run.config.groups_per_step == 1
    assert run.ledger.metrics(run.cache)["groups/dropped"] <= in_one_group
    at_once = len(run.cache.groups) * run.config.group_size
    assert failures(run) <= 7 * max(at_once, 2 * run.config.group_size) + at_once
    assert len(run.said) <= 2


def test_an_engine_that_comes_back_loses_nothing() -> None:
    """Down for twenty seconds, in the middle of everything."""

    def fails(request: ExtendRequest, before: int) -> Exception | None:
        return ConnectionError("down") if 0 < asyncio.get_running_loop().time() < 20 or not before else None

    run, undisturbed = run_of(Failing(fails), max_failures=8, **PARTIAL), Run(short, **PARTIAL)
    ours, theirs = steps(run, 4), steps(undisturbed, 4)
    groups = [{g.group_id: g for batch in batches for g in batch} for batches in (ours, theirs)]
    both = sorted(groups[0].keys() & groups[1].keys())
    assert len(both) > 4
    for i in both:
        assert [r.token_ids() for r in groups[0][i].rollouts] == [r.token_ids() for r in groups[1][i].rollouts]
    assert run.ledger.metrics(run.cache)["groups/dropped"] == 0


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from([f"{g}-{s}" for g in range(4) for s in range(2)]), st.integers(0, 3)))
def test_failures_below_the_limit_change_nothing(times: dict[str, int]) -> None:
    engine = Failing(lambda request, before: full() if before < times.get(request.rollout_id, 0) else None)
    run = run_of(engine)
    for ours, theirs in zip(steps(run, 2), steps(Run(short), 2), strict=True):
        assert_same_groups(ours, theirs)
    assert failures(run) == sum(times.values())


@pytest.mark.parametrize("error", [AssertionError("we are wrong"), EngineDied("it ended for good")], ids=str)
def test_internal_errors_and_engine_death_end_the_run(error: Exception) -> None:
    engine = Failing(lambda request, before: error if request.rollout_id == "1-1" else None)
    run = run_of(engine)
    with pytest.raises(type(error), match=str(error)):
        steps(run, 1)
    assert len(engine.asked["1-1"]) == 1 and not run.said
    run.check()


TOO_MANY = 12  # four steps of three groups


def failure_limit() -> FailureLimit:
    return FailureLimit(Lifecycle(RolloutConfig(groups_per_step=3)))


def test_complete_group_resets_the_stall_count() -> None:
    told = failure_limit()
    for _ in range(3):
        for _ in range(TOO_MANY - 1):
            told.on_group_failed()
        told.on_complete()


def test_ready_group_resets_the_failure_count() -> None:
    told, failed = failure_limit(), [Reward(None, error="down")]
    for _ in range(3):
        for _ in range(2):  # of the three that end a run at its beginning
            told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)
        told.on_dropped(DropReason.STALE, [Reward(1.0)])
    told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)
    told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)
    with pytest.raises(ValueError, match="none of the first 3 groups"):
        told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)


def test_missing_reward_causes_are_sorted_by_frequency() -> None:
    told = failure_limit()
    of = [
        [Reward(None, error=f"no page {i}"), Reward(None, error=f"timed out after {i} s"), Reward(1.0)]
        for i in range(3)
    ]
    for rewards in (of[0], [*of[1], *of[1][1:]]):
        told.on_dropped(DropReason.TOO_FEW_REWARDS, rewards)
    with pytest.raises(ValueError) as raised:
        told.on_dropped(DropReason.TOO_FEW_REWARDS, of[2])
    assert "; 7 are missing: timed out after 2 s (4 times); no page 2 (3 times). Fix that, and resume" in str(
        raised.value
    )


def test_too_rare_roles_are_reported() -> None:
    told = failure_limit()
    with pytest.raises(ValueError, match="no reward is missing, so no role has so many trajectories in a group"):
        for _ in range(3):
            told.on_dropped(DropReason.TOO_FEW_REWARDS, [Reward(1.0), Reward(0.0)])
