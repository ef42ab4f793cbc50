from __future__ import annotations

from pathlib import Path

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.order import ORDERS, RolloutView, load_order
from rollover.run.resume import check_restored
from rollover.types import DropReason, Group, Prompt, Reward, RolloutState, StopReason
from unit.rollout.world import make_segment, make_task, through_json


class Bench:
    """A scheduler and a cache whose groups are put into the states that a test needs."""

    def __init__(self, max_running: int | None = None, **config: object) -> None:
        self.config = RolloutConfig.model_validate({"group_size": 1, "max_new_tokens": 20, **config})
        self.lifecycle = Lifecycle(self.config, max_running, min_valid_rewards=1)
        self.scheduler, self.cache = self.lifecycle.scheduler, self.lifecycle.cache

    def admit(self, num: int, version: int = 0) -> list[Group]:
        return [self.lifecycle.admit(make_task(i), Prompt((1,)), version) for i in range(num)]

    def put(self, rollout_id: str, num_tokens: int, version: int, stop: StopReason) -> None:
        """The rollout ran, whatever the order: these tests choose states, not ways."""
        rollout = self.cache.rollout(rollout_id)
        if rollout.state is not RolloutState.RUNNING:
            self.run(rollout_id)
        complete = self.lifecycle.append(rollout, [make_segment(num_tokens, version, stop)])
        if complete is not None:
            self.lifecycle.set_rewards(complete, [Reward(1.0) for _ in complete.rollouts])

    def run(self, rollout_id: str) -> None:
        self.lifecycle.run(self.cache.rollout(rollout_id), self.scheduler.next_version)

    def park(self, rollout_id: str, num_tokens: int, version: int = 0) -> None:
        self.put(rollout_id, num_tokens, version, StopReason.PAUSED)

    def ready(self, rollout_id: str, version: int = 0, num_tokens: int = 1) -> None:
        self.put(rollout_id, num_tokens, version, StopReason.EOS)

    def restored(self) -> Lifecycle:
        """Another one, from a snapshot of this one."""
        state, arrays = self.lifecycle.state_dict()
        other = Lifecycle(self.config, self.scheduler.max_running, min_valid_rewards=1)
        other.load_state_dict(through_json(state), arrays)
        return other

    def start(self, version: int = 0) -> list[str]:
        return [r.rollout_id for r in self.lifecycle.start(version)]

    def to_consume(self, version: int = 0, stream_ended: bool = False) -> list[int] | None:
        return self.scheduler.to_consume(version, stream_ended)


def test_admits_up_to_in_flight_and_counts_ready_groups() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=5, max_staleness=2)
    assert bench.scheduler.num_to_admit() == 5
    bench.admit(4)
    bench.ready("0-0")
    assert bench.scheduler.num_to_admit() == 1


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


def test_nobody_gets_another_token_budget_while_somebody_runs() -> None:
    bench = Bench(groups_per_step=1, in_flight_groups=2, max_staleness=1, interrupt="token_budget", token_budget=2)
    bench.admit(2)
    assert bench.start() == ["0-0", "1-0"]
    bench.park("0-0", 2)
    assert bench.start() == []
    bench.park("1-0", 2)
    assert bench.start() == ["0-0", "1-0"]


def test_nobody_gets_another_token_budget_while_somebody_waits_for_a_slot() -> None:
    bench = Bench(1, groups_per_step=1, in_flight_groups=2, max_staleness=1, interrupt="token_budget", token_budget=2)
    bench.admit(2)
    assert bench.start() == ["0-0"]
    bench.park("0-0", 2)
    assert bench.start() == ["1-0"]


def test_nobody_waits_for_the_scores_of_a_group_that_was_dropped() -> None:
    bench = Bench(groups_per_step=1, in_flight_groups=2, max_staleness=1, interrupt="token_budget", token_budget=2)
    (first, _) = bench.admit(2)
    bench.start()
    bench.lifecycle.append(first.rollouts[0], [make_segment(1, 0, StopReason.EOS)])
    bench.lifecycle.drop(0, DropReason.STALLED)
    bench.ready("1-0")
    assert bench.to_consume() == [1]


def test_a_step_may_reserve_all_its_places_at_once() -> None:
    """Under finish_first with everything due in this step: each place is counted once."""
    bench = Bench(groups_per_step=4, in_flight_groups=4, max_staleness=1, interrupt="when_enough")
    bench.admit(4)
    for group_id in range(4):
        bench.ready(f"{group_id}-0")
    assert bench.scheduler.reserve(1, at_least=1) == [0, 1, 2, 3]


def test_parked_resume_before_waiting_start_in_group_order() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=4, max_staleness=1, interrupt="when_enough", group_size=2)
    bench.admit(4)
    bench.park("2-1", 3)
    bench.park("1-0", 3)
    assert bench.start() == ["1-0", "2-1", "0-0", "0-1", "1-1", "2-0", "3-0", "3-1"]


def test_slots_are_refilled_one_by_one() -> None:
    bench = Bench(max_running=2, groups_per_step=4)
    bench.admit(4)
    assert bench.start() == ["0-0", "1-0"]
    assert bench.start() == []
    bench.ready("1-0")
    assert bench.start() == ["2-0"]


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
    restored = bench.restored()
    assert bench.start(version=2) == ["1-1", "1-0", "0-0", "0-1", "2-0", "2-1"]
    # With time to spare the order function alone decides.
    assert [r.rollout_id for r in restored.start(0)][:2] == ["0-0", "1-1"]


@pytest.mark.parametrize("max_running", [None, 5])
def test_what_must_not_be_interrupted_again_precedes_even_the_urgent(max_running: int | None) -> None:
    bench = Bench(max_running, groups_per_step=1, in_flight_groups=3, max_staleness=2, interrupt="when_enough",
                  order="longest_first", group_size=2, max_continuations=1)  # fmt: skip
    bench.admit(3)
    bench.park("1-1", 1, version=0)  # deadline 2: urgent, its waiting sibling too
    bench.park("0-0", 9, version=2)
    assert bench.start(version=2) == ["0-0", "1-1", "1-0", "0-1", "2-0", "2-1"][:max_running]


@pytest.mark.parametrize("order", ["oldest_first", "longest_first", "fifo"])
@pytest.mark.parametrize("max_continuations", [0, 1])
def test_all_at_once_start_in_the_order_of_one_by_one(order: str, max_continuations: int) -> None:
    """Where there are slots for all, they are sorted; where not, they leave their queues in turn."""

    def started(slots_at_once: int) -> list[str]:
        bench = Bench(slots_at_once, groups_per_step=2, in_flight_groups=6, max_staleness=2, interrupt="when_enough",
                      group_size=3, order=order, max_continuations=max_continuations)  # fmt: skip
        bench.admit(6)
        for rollout_id, num_tokens, version in (
            ("5-1", 4, 0),
            ("3-2", 7, 1),
            ("3-0", 2, 0),
            ("0-2", 7, 1),
            ("2-2", 5, 2),
        ):
            bench.park(rollout_id, num_tokens, version)
        out = []
        while names := bench.start(version=2):
            out += names
            for name in names:
                bench.ready(name, version=2)
        return out

    everyone = started(18)
    assert len(everyone) == 18 and everyone[0] != "0-0"
    assert started(1) == started(5) == started(17) == everyone


def test_never_waits_for_all_when_enough_does_not() -> None:
    for interrupt, expected in (("never", None), ("when_enough", [1, 2])):
        bench = Bench(groups_per_step=2, in_flight_groups=4, max_staleness=1, interrupt=interrupt)
        bench.admit(4)
        bench.ready("2-0")
        assert bench.to_consume() is None
        bench.ready("1-0")
        bench.run("0-0")
        assert bench.to_consume() == expected
        running = bench.scheduler.to_interrupt(0)
        assert running == ([] if expected is None else ["0-0"])


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
    assert bench.scheduler.to_interrupt(2) == []
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
    assert bench.scheduler.to_drop(1) == []
    assert bench.scheduler.to_drop(2) == [0, 2]


def test_mask_drops_a_ready_group_only_once_its_newest_token_is_out_of_bound() -> None:
    bench = Bench(groups_per_step=1, in_flight_groups=4, max_staleness=1, interrupt="when_enough", on_stale="mask")
    bench.admit(3)
    bench.park("0-0", 3, version=0)
    bench.ready("1-0", version=1)
    bench.ready("2-0", version=0)
    assert bench.scheduler.to_drop(1) == []
    assert bench.to_consume(version=1) == [2], "the step at 1 may still train it"
    assert bench.scheduler.to_drop(2) == [2]
    assert bench.scheduler.to_drop(3) == [1, 2], "an unfinished group still gets tokens that are in bound"


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
    restored = bench.restored()
    assert restored.scheduler.state_dict()["admitted_at"] == {"0": 4, "1": 4, "2": 4}
    started = restored.start(4)
    assert [r.rollout_id for r in started] == ["2-0", "0-0", "1-0"]
    # What was parked before the restart stays ahead of what is parked after it.
    for rollout in started[:1]:
        restored.append(rollout, [make_segment(1, 4)])
    assert restored.scheduler.state_dict()["parked_since"] == {"0-0": 1, "1-0": 2, "2-0": 3}


def test_forgets_groups_that_left() -> None:
    bench = Bench(groups_per_step=1)
    bench.admit(1)
    bench.park("0-0", 2)
    bench.lifecycle.drop(0, DropReason.STALE)
    state = bench.scheduler.state_dict()
    assert not state["admitted_at"] and not state["parked_since"]


def test_supplement_never_holds_more_than_the_bound() -> None:
    """Groups whose scores are slow leave their places to new ones, but for one step's worth of them only."""
    bench = Bench(groups_per_step=2, in_flight_groups=4, max_staleness=2, interrupt="when_enough", supplement=True)
    assert bench.config.most_held == 6
    for expected in (4, 2, 0):
        assert bench.scheduler.num_to_admit() == expected
        for group in bench.admit(expected):
            (rollout,) = group.rollouts
            bench.run(rollout.rollout_id)
            bench.lifecycle.append(rollout, [make_segment(1, 0, StopReason.EOS)])  # finished, and not scored
    assert len(bench.cache.groups) == bench.config.most_held


def test_groups_that_another_config_left_behind() -> None:
    bench = Bench(groups_per_step=2, in_flight_groups=6, max_staleness=2, interrupt="when_enough")
    bench.admit(6)
    for i in range(4):
        bench.park(f"{i}-0", 1, version=0)
    check_restored(bench.lifecycle, 1, max_tokens=99)

    def under(**changes: object) -> Lifecycle:
        state, arrays = bench.lifecycle.state_dict()
        other = Lifecycle(bench.config.model_copy(update={"in_flight_groups": 4, "max_staleness": 1, **changes}))
        other.load_state_dict(through_json(state), arrays)
        return other

    with pytest.raises(ValueError, match="6 groups.*rollout.max_staleness = 1"):
        check_restored(under(), 1, max_tokens=99)
    check_restored(under(on_stale="drop"), 1, max_tokens=99)
    with pytest.raises(ValueError, match="cannot all be trained"):
        # Due by version 2, two in a step: at version 2 it is too late for four.
        check_restored(bench.lifecycle, 2, max_tokens=99)


VIEWS = [
    RolloutView("0-0", 0, 0, num_tokens=5, remaining=9, admitted_at=0, parked_since=3),
    RolloutView("0-1", 0, 1, num_tokens=9, remaining=5, admitted_at=0, parked_since=0),
    RolloutView("2-0", 2, 0, num_tokens=9, remaining=2, admitted_at=1, parked_since=2),
    RolloutView("3-0", 3, 0, num_tokens=1, remaining=2, admitted_at=1, parked_since=1),
]


def order(key) -> list[str]:
    forward, backward = sorted(VIEWS, key=key), sorted(reversed(VIEWS), key=key)
    assert forward == backward, "the order must be total"
    return [v.rollout_id for v in forward]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("oldest_first", ["0-0", "0-1", "2-0", "3-0"]),
        ("longest_first", ["0-1", "2-0", "0-0", "3-0"]),
        ("shortest_remaining", ["2-0", "3-0", "0-1", "0-0"]),
        ("fifo", ["0-1", "3-0", "2-0", "0-0"]),
    ],
)
def test_orders_break_ties_by_age(name: str, expected: list[str]) -> None:
    assert load_order(name) is ORDERS[name]
    assert order(ORDERS[name]) == expected


def own(folder: Path, returned: str) -> str:
    """The name of a user's order that returns this expression of `view`."""
    path = folder / "mine.py"
    path.write_text(f"def order(view):\n    return {returned}\n")
    return f"{path}:order"


@pytest.mark.parametrize("returned", ["()", "(-view.num_tokens,)", "(view.remaining, view.num_tokens > 5)"])
def test_a_users_order_is_made_total_by_admission(tmp_path: Path, returned: str) -> None:
    key = load_order(own(tmp_path, returned))
    assert all(key(view)[-2:] == (view.group_id, view.sibling) for view in VIEWS)
    expected = sorted(VIEWS, key=lambda view: (*eval(returned, {"view": view}), view.group_id, view.sibling))
    assert order(key) == [view.rollout_id for view in expected]


@pytest.mark.parametrize("returned", ['(1, "a")', '("a", 1)', "(1, 1.5)", "(None,)", "[1, 2]", "7", "None", '"ab"'])
def test_a_users_order_that_is_no_tuple_of_integers_is_refused(tmp_path: Path, returned: str) -> None:
    name = own(tmp_path, returned)
    with pytest.raises(ValueError) as refusal:
        load_order(name)(VIEWS[0])
    for part in ("rollout.order", name, f"returned {eval(returned)!r}", "tuple of integers"):
        assert part in str(refusal.value)
