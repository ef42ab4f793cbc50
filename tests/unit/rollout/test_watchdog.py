"""The watchdog's pure part: what counts as a stall, what does not, and what is done about each, on a clock of ours."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.config import WatchdogConfig
from rollover.rollout.watchdog import Action, Stall, Watchdog
from unit.rollout.world import make_segment

CONFIG = WatchdogConfig(rollout_timeout_s=100, grace_s=10, reward_timeout_s=40)


class Bench:
    """A watchdog that looks whenever it wants to, and rollouts with so many new tokens each."""

    def __init__(self, config: WatchdogConfig = CONFIG, scoring_s: float = 60, **tokens: int) -> None:
        self.scoring_blocked = False
        self.watchdog = Watchdog(config, scoring_s, scoring_blocked=lambda: self.scoring_blocked)
        self.now, self.tokens, self.queued = 1000.0, {}, set()
        for name, num in tokens.items():
            self.start(name.removeprefix("r").replace("_", "-"), num)

    def start(self, rollout_id: str, num_tokens: int = 0) -> None:
        self.watchdog.on_start(rollout_id, int(rollout_id.split("-")[0]), num_tokens, self.now)
        self.tokens[rollout_id] = 0

    def end(self, rollout_id: str, num_tokens: int) -> None:
        del self.tokens[rollout_id]
        self.watchdog.on_end(rollout_id, num_tokens, self.now)

    def check(self) -> list[Stall]:
        progress = {i: [make_segment(num, 0)] for i, num in self.tokens.items()}
        return self.watchdog.check(self.now, progress, self.queued, self.watchdog.scoring)

    def run(self, seconds: float, *growing: str) -> list[Stall]:
        """Let time pass; `growing` get a token before every look. Ends at the first stall."""
        end = self.now + seconds
        while True:
            self.now += self.watchdog.next_check_in(self.now)
            if self.now >= end:
                self.now = end
                return []
            for rollout_id in growing:
                self.tokens[rollout_id] += 1
            if stalls := self.check():
                return stalls


def test_the_steps_of_a_rollout_that_never_moves() -> None:
    bench = Bench(r0_0=5)
    (stall,) = bench.run(1000)
    assert stall == Stall(Action.CONTINUE, 0, "0-0", "running", 100, 5, 100) and bench.now == 1100
    (stall,) = bench.run(1000)
    assert stall == Stall(Action.CANCEL, 0, "0-0", "interrupted", 110, 5, 110) and bench.now == 1110
    (stall,) = bench.run(1000)
    assert stall == Stall(Action.ABANDON, 0, "0-0", "cancelled", 120, 5, 120) and bench.now == 1120
    bench.end("0-0", 5)
    assert bench.run(1000) == []
    assert bench.watchdog.stats() == {
        "watchdog/stalled_rollouts": 1,
        "watchdog/stalled_rewards": 0,
        "watchdog/redispatched": 1,
    }


def test_second_stall_in_a_row_drops_only_its_group() -> None:
    bench = Bench(r3_0=0)
    assert [s.action for s in bench.run(1000)] == [Action.CONTINUE]
    bench.end("3-0", 0)
    bench.start("3-0")
    bench.now += 1
    bench.start("3-1")
    stalls = bench.run(1000)
    assert [(s.action, s.rollout_id) for s in stalls] == [(Action.DROP, "3-0")]
    bench.watchdog.on_interrupt(["3-0", "3-1"], bench.now)
    assert [s.action for s in bench.run(1000)] == [Action.CANCEL_DROPPED] * 2


def test_a_token_in_between_forgives_the_first_stall() -> None:
    bench = Bench(r0_0=0)
    assert [s.action for s in bench.run(1000)] == [Action.CONTINUE]
    bench.end("0-0", 0)
    bench.start("0-0")
    assert bench.run(300, "0-0") == []
    assert [s.action for s in bench.run(1000)] == [Action.CONTINUE]
    bench.end("0-0", bench.watchdog.config.max_stalls + 100)  # it came back with tokens: that was no stall at all
    bench.start("0-0", 102)
    assert [s.action for s in bench.run(1000)] == [Action.CONTINUE]


def test_an_interruption_of_the_schedulers_must_end_too() -> None:
    bench = Bench(r0_0=4, r0_1=4)
    bench.now += 3
    bench.watchdog.on_interrupt(["0-0", "0-1"], bench.now)
    bench.end("0-1", 4)
    (stall,) = bench.run(1000)
    assert (stall.action, stall.state, bench.now) == (Action.CANCEL, "interrupted", 1013)
    assert bench.watchdog.stats()["watchdog/redispatched"] == 1


def test_queued_rollout_stalls_only_if_no_rollout_progresses() -> None:
    bench = Bench(r0_0=0, r1_0=0)
    bench.queued = {"1-0"}
    assert bench.run(1000, "0-0") == []
    stalls = bench.run(1000)
    assert [s.rollout_id for s in stalls] == ["0-0", "1-0"]
    assert stalls[1].token_age_s > 1000, "its own last token is what is said"


def test_time_in_which_nobody_could_look_is_forgiven() -> None:
    bench = Bench(r0_0=0)
    bench.watchdog.on_scoring_start(7, bench.now)
    bench.watchdog.next_check_in(bench.now)
    bench.now += 5000  # the loop stood still
    assert bench.check() == []
    began = bench.now
    stalls = bench.run(1000)
    assert {s.action for s in stalls} == {Action.CONTINUE, Action.RESCORE} and bench.now - began <= 100
    bench.watchdog.clear()
    bench.now += 5000  # the time between two phases is nobody's
    bench.start("0-0")
    began = bench.now
    assert bench.run(1000) and bench.now == began + 100


def test_a_scoring_is_repeated_once_then_given_up() -> None:
    bench = Bench()
    bench.watchdog.on_scoring_start(4, bench.now)
    (stall,) = bench.run(1000)
    assert stall == Stall(Action.RESCORE, 4, None, "scoring", 100) and bench.now == 1100
    bench.watchdog.on_scoring_start(4, bench.now)
    (stall,) = bench.run(1000)
    assert stall == Stall(Action.FAIL_SCORING, 4, None, "scoring", 100) and bench.now == 1200
    bench.watchdog.on_scoring_end(4, bench.now)
    assert bench.run(1000) == []
    bench.watchdog.on_scoring_start(4, bench.now)
    assert [s.action for s in bench.run(1000)] == [Action.RESCORE], "another time is another first time"


def test_a_scorings_time_does_not_run_while_nobody_could_score() -> None:
    bench = Bench()
    bench.watchdog.on_scoring_start(4, bench.now)
    bench.scoring_blocked = True
    for _ in range(100):
        bench.now += bench.watchdog.next_check_in(bench.now)
        assert bench.check() == []
    bench.scoring_blocked = False
    assert bench.run(99) == [], "its whole time begins when somebody can"
    assert [s.action for s in bench.run(2 * CONFIG.reward_timeout_s)] == [Action.RESCORE]


def test_a_group_that_waits_behind_another_does_not_stall() -> None:
    """Scorers work in turn: what hangs is the oldest, and the others' time begins when they come first."""
    bench = Bench()
    for group_id in (1, 2, 3):
        bench.watchdog.on_scoring_start(group_id, bench.now)
    bench.now += 90
    bench.watchdog.on_scoring_end(1, bench.now)
    assert [(s.group_id, bench.now) for s in bench.run(1000)] == [(2, 1190)]
    bench.watchdog.on_scoring_start(2, bench.now)  # repeated: behind 3 now
    bench.now += 90
    bench.watchdog.on_scoring_end(3, bench.now)
    assert [(s.group_id, s.action) for s in bench.run(1000)] == [(2, Action.FAIL_SCORING)]


def test_later_scorings_that_end_do_not_hide_the_one_that_hangs() -> None:
    bench = Bench()
    bench.watchdog.on_scoring_start(0, bench.now)
    for group_id in range(1, 10):
        bench.watchdog.on_scoring_start(group_id, bench.now)
        if stalls := bench.run(30):
            break
        bench.watchdog.on_scoring_end(group_id, bench.now)
    else:
        raise AssertionError("it was hidden")
    assert [s.group_id for s in stalls] == [0]


@pytest.mark.parametrize("off", ["rollout_timeout_s", "reward_timeout_s"])
def test_each_limit_can_be_off(off: str) -> None:
    bench = Bench(CONFIG.model_copy(update={off: 0}), r0_0=0)
    bench.watchdog.on_interrupt(["0-0"], bench.now)
    bench.watchdog.on_scoring_start(1, bench.now)
    assert bench.watchdog.is_on
    seen = {s.rollout_id is None for _ in range(3) for s in bench.run(1000)}
    assert seen == {off == "rollout_timeout_s"}
    assert not Watchdog().is_on


def test_describes_the_longest_silent_first() -> None:
    bench = Bench(r0_0=1)
    bench.now += 10
    for i in range(1, 5):
        bench.start(f"0-{i}")
    text = bench.watchdog.describe(bench.now + 10)
    assert text.startswith("rollout 0-0 (running, begun 20 s ago, 1 tokens, none for 20 s); ")
    assert text.endswith("; 2 more")
    assert Watchdog().describe(0.0) == "no rollout"


# Properties


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_every_stall_is_noticed_in_time_and_nothing_else_is(seed: int) -> None:
    """Rollouts get tokens at random: flagged within a limit and a quarter after the last one, and never before."""
    rng, bench = random.Random(seed), Bench()
    limit = CONFIG.rollout_timeout_s
    ids = [f"{i}-0" for i in range(5)]
    last = {}
    dead = set(rng.sample(ids, rng.randint(0, 5)))
    for rollout_id in ids:
        bench.start(rollout_id)
        last[rollout_id] = bench.now
    flagged: dict[str, float] = {}
    for _ in range(40):
        end = bench.now + bench.watchdog.next_check_in(bench.now)
        for rollout_id in bench.tokens:
            alive = rollout_id not in dead or bench.now < 1100
            if alive and (rng.random() < 0.5 or bench.now - last[rollout_id] > limit / 2):
                bench.tokens[rollout_id] += rng.randint(1, 3)
                last[rollout_id] = rng.uniform(bench.now, end)
        bench.now = end
        for stall in bench.check():
            assert stall.rollout_id is not None and stall.action is Action.CONTINUE
            flagged[stall.rollout_id] = bench.now
            bench.end(stall.rollout_id, bench.tokens[stall.rollout_id])
    assert set(flagged) == dead
    for rollout_id, when in flagged.items():
        assert limit <= when - last[rollout_id] <= 1.25 * limit + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_hangs_everything_ends(seed: int) -> None:
    """Rollouts that ignore any of the steps: each is out of the way after a bounded time, and looks never cease."""
    rng, bench = random.Random(seed), Bench()
    behaviour = {f"{i}-0": rng.choice(["returns", "needs cancelling", "ignores all"]) for i in range(4)}
    for rollout_id in behaviour:
        bench.start(rollout_id)
    began, dropped = bench.now, set()
    while bench.tokens:
        for stall in bench.run(1000):
            rollout_id, how = stall.rollout_id, behaviour[stall.rollout_id]
            if stall.action is Action.DROP:
                dropped.add(rollout_id)
            ends = {
                Action.CONTINUE: how == "returns",
                Action.DROP: how == "returns",
                Action.CANCEL: how != "ignores all",
                Action.CANCEL_DROPPED: how != "ignores all",
                Action.ABANDON: True,
            }[stall.action]
            if ends:
                bench.end(rollout_id, 0)
                if stall.action is not Action.ABANDON and rollout_id not in dropped:
                    bench.start(rollout_id)
        assert bench.now - began <= 2 * (1.25 * CONFIG.rollout_timeout_s + 2 * CONFIG.grace_s) + 1


def test_a_rollout_that_left_has_no_stall_behind_it() -> None:
    bench, actions = Bench(r0_0=0), []
    for leaves in (True, False, False):
        actions += [stall.action for stall in bench.run(1000)]
        bench.end("0-0", 0)
        if leaves:
            bench.watchdog.on_leave(["0-0"])
        bench.start("0-0")
    assert actions == [Action.CONTINUE, Action.CONTINUE, Action.DROP]
