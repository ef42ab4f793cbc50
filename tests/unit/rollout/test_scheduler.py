from __future__ import annotations

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.cache import RolloutCache
from rollover.rollout.scheduler import Scheduler
from rollover.types import Group, Reward, StopReason
from unit.rollout.world import make_segment, make_task, through_json


class Bench:
    """A scheduler and a cache whose groups are put into the states that a test needs."""

    def __init__(self, max_running: int | None = None, **config: object) -> None:
        self.config = RolloutConfig.model_validate({"group_size": 1, "max_new_tokens": 20, **config})
        self.scheduler = Scheduler(self.config, max_running)
        self.cache = RolloutCache(self.config.max_new_tokens)

    def admit(self, num: int, version: int = 0) -> list[Group]:
        groups = [self.cache.admit(make_task(i), (1,), self.config.group_size) for i in range(num)]
        for group in groups:
            self.scheduler.on_admit(group, version)
        return groups

    def run(self, rollout_id: str, num_tokens: int, version: int = 0) -> None:
        self.cache.start(rollout_id)
        self.cache.append(rollout_id, [make_segment(num_tokens, version)])

    def park(self, rollout_id: str, num_tokens: int, version: int = 0) -> None:
        self.run(rollout_id, num_tokens, version)
        self.cache.park(rollout_id)
        self.scheduler.on_park(self.cache.rollout(rollout_id))

    def ready(self, rollout_id: str, version: int = 0, num_tokens: int = 1) -> None:
        self.run(rollout_id, num_tokens, version)
        self.cache.finish(rollout_id, StopReason.EOS)
        self.cache.set_reward(rollout_id, Reward(1.0))

    def to_start(self, version: int = 0) -> list[str]:
        return self.scheduler.to_start(self.cache.groups, version)

    def to_consume(self, version: int = 0, stream_ended: bool = False) -> list[int] | None:
        return self.scheduler.to_consume(self.cache.groups, version, stream_ended)


def test_admits_up_to_in_flight_and_counts_ready_groups() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=5, max_staleness=2)
    assert bench.scheduler.num_to_admit(bench.cache.groups) == 5
    bench.admit(4)
    bench.ready("0-0")
    assert bench.scheduler.num_to_admit(bench.cache.groups) == 1


def test_in_flight_of_zero_is_groups_per_step() -> None:
    assert Bench(groups_per_step=3).scheduler.num_to_admit({}) == 3


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"groups_per_step": 4, "in_flight_groups": 3}, "rollout.in_flight_groups"),
        ({"groups_per_step": 4, "in_flight_groups": 9, "max_staleness": 1}, "rollout.max_staleness"),
    ],
)
def test_refuses_a_config_that_would_wait_for_ever(config, field) -> None:
    with pytest.raises(ValueError, match=field):
        Bench(**config)


def test_refuses_no_slots() -> None:
    with pytest.raises(ValueError, match="max_running"):
        Bench(max_running=0)


def test_drop_allows_any_number_in_flight() -> None:
    assert Bench(groups_per_step=4, in_flight_groups=99, on_stale="drop").scheduler.num_to_admit({}) == 99


def test_parked_resume_before_waiting_start_in_group_order() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=4, max_staleness=1, interrupt="when_enough", group_size=2)
    bench.admit(4)
    bench.park("2-1", 3)
    bench.park("1-0", 3)
    assert bench.to_start() == ["1-0", "2-1", "0-0", "0-1", "1-1", "2-0", "3-0", "3-1"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("oldest_first", ["0-0", "1-0", "2-0"]),
        ("longest_first", ["1-0", "2-0", "0-0"]),
        ("shortest_remaining", ["1-0", "2-0", "0-0"]),
        ("fifo", ["2-0", "0-0", "1-0"]),
    ],
)
def test_order_of_resumption(order: str, expected: list[str]) -> None:
    bench = Bench(groups_per_step=3, in_flight_groups=3, order=order, on_stale="drop", max_staleness=1)
    bench.admit(3)
    bench.park("2-0", 4)
    bench.park("0-0", 2)
    bench.park("1-0", 9)
    assert bench.to_start() == expected


def test_slots_are_refilled_one_by_one() -> None:
    bench = Bench(max_running=2, groups_per_step=4)
    bench.admit(4)
    assert bench.to_start() == ["0-0", "1-0"]
    bench.cache.start("0-0")
    assert bench.to_start() == ["1-0"]
    bench.cache.start("1-0")
    assert bench.to_start() == []
    bench.cache.finish("1-0", StopReason.EOS)
    assert bench.to_start() == ["2-0"]


def test_urgent_groups_resume_first_even_their_waiting_siblings() -> None:
    bench = Bench(
        groups_per_step=1,
        in_flight_groups=3,
        max_staleness=2,
        interrupt="when_enough",
        order="longest_first",
        group_size=2,
    )
    bench.admit(3)
    bench.park("1-1", 1, version=0)  # deadline 2
    bench.park("0-0", 9, version=2)  # deadline 4
    assert bench.to_start(version=2) == ["1-1", "1-0", "0-0", "0-1", "2-0", "2-1"]
    # With time to spare the order function alone decides.
    assert bench.to_start(version=0)[:2] == ["0-0", "1-1"]


def test_never_waits_for_all_when_enough_does_not() -> None:
    for interrupt, expected in (("never", None), ("when_enough", [1, 2])):
        bench = Bench(groups_per_step=2, in_flight_groups=4, max_staleness=1, interrupt=interrupt)
        bench.admit(4)
        bench.ready("2-0")
        assert bench.to_consume() is None
        bench.ready("1-0")
        bench.run("0-0", 2)
        assert bench.to_consume() == expected
        running = bench.scheduler.to_interrupt(bench.cache.groups, 0)
        assert running == ([] if expected is None else ["0-0"])


def test_a_group_is_ready_only_with_all_siblings() -> None:
    bench = Bench(groups_per_step=1, group_size=2)
    bench.admit(1)
    bench.ready("0-0")
    assert bench.to_consume() is None
    bench.ready("0-1")
    assert bench.to_consume() == [0]


def test_consumes_the_earliest_deadline_first() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=6, max_staleness=2, interrupt="when_enough")
    bench.admit(6)
    for group_id, version in ((0, 3), (1, 2), (2, 3), (4, 1), (5, 2)):
        bench.ready(f"{group_id}-0", version)
    assert bench.to_consume(version=3) == [4, 1]


def test_finish_first_waits_for_a_group_that_would_pass_the_bound() -> None:
    bench = Bench(groups_per_step=1, in_flight_groups=3, max_staleness=2, interrupt="when_enough")
    bench.admit(3)
    bench.park("0-0", 3, version=0)
    bench.ready("1-0", version=2)
    assert bench.to_consume(version=1) == [1]
    assert bench.to_consume(version=2) is None
    assert bench.scheduler.to_interrupt(bench.cache.groups, 2) == []
    bench.ready("0-0", version=2)
    assert bench.to_consume(version=2) == [0]


def test_finish_first_looks_further_than_one_step() -> None:
    """Two groups are due by version 3: one of them must be in the step at 2, though neither is due there."""
    bench = Bench(groups_per_step=1, in_flight_groups=4, max_staleness=3, interrupt="when_enough")
    bench.admit(3)
    bench.park("0-0", 3, version=0)
    bench.park("1-0", 3, version=0)
    bench.ready("2-0", version=2)
    assert bench.to_consume(version=2) is None
    assert bench.to_consume(version=1) == [2]


def test_drop_takes_what_is_ready_and_drops_the_stale() -> None:
    bench = Bench(groups_per_step=1, in_flight_groups=4, max_staleness=1, interrupt="when_enough", on_stale="drop")
    bench.admit(4)
    bench.park("0-0", 3, version=0)
    bench.ready("1-0", version=1)
    bench.ready("2-0", version=0)
    assert bench.to_consume(version=1) == [2]
    assert bench.scheduler.to_drop(bench.cache.groups, 1) == []
    assert bench.scheduler.to_drop(bench.cache.groups, 2) == [0, 2]


def test_end_of_stream_takes_what_is_left_once_it_is_finished() -> None:
    bench = Bench(groups_per_step=3, interrupt="when_enough")
    bench.admit(2)
    bench.ready("1-0")
    assert bench.to_consume(stream_ended=True) is None
    bench.ready("0-0")
    assert bench.to_consume() is None
    assert bench.to_consume(stream_ended=True) == [0, 1]
    assert Bench(groups_per_step=3).to_consume(stream_ended=True) == []


def test_state_round_trip_keeps_ages_and_the_order_of_parking() -> None:
    bench = Bench(groups_per_step=3, order="fifo", on_stale="drop")
    bench.admit(3, version=4)
    for name in ("2-0", "0-0", "1-0"):
        bench.park(name, 2)
    restored = Scheduler(bench.config)
    restored.load_state_dict(through_json(bench.scheduler.state_dict()))
    assert restored.to_start(bench.cache.groups, 4) == ["2-0", "0-0", "1-0"]
    # What was parked before the restart stays ahead of what is parked after it.
    bench.cache.start("2-0")
    bench.cache.append("2-0", [make_segment(1, 4)])
    bench.cache.park("2-0")
    restored.on_park(bench.cache.rollout("2-0"))
    assert restored.to_start(bench.cache.groups, 4) == ["0-0", "1-0", "2-0"]
    assert restored.state_dict()["admitted_at"] == {"0": 4, "1": 4, "2": 4}


def test_forgets_groups_that_left() -> None:
    bench = Bench(groups_per_step=1)
    (group,) = bench.admit(1)
    bench.park("0-0", 2)
    bench.scheduler.on_leave(group)
    state = bench.scheduler.state_dict()
    assert not state["admitted_at"] and not state["parked_since"]


def test_groups_that_another_config_left_behind() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=6, max_staleness=2, interrupt="when_enough")
    bench.admit(6)
    for i in range(4):
        bench.park(f"{i}-0", 1, version=0)
    bench.scheduler.check_held(bench.cache.groups, 1)
    narrower = Scheduler(
        RolloutConfig.model_validate({"groups_per_step": 2, "in_flight_groups": 4, "max_staleness": 1})
    )
    with pytest.raises(ValueError, match="6 groups.*rollout.max_staleness = 1"):
        narrower.check_held(bench.cache.groups, 1)
    losing = Scheduler(
        RolloutConfig.model_validate(
            {"groups_per_step": 2, "in_flight_groups": 4, "max_staleness": 1, "on_stale": "drop"}
        )
    )
    losing.check_held(bench.cache.groups, 1)
    with pytest.raises(ValueError, match="cannot all be trained"):
        # Due by version 2, two in a step: at version 2 it is too late for four.
        bench.scheduler.check_held(bench.cache.groups, 2)
