"""The number of threads is found by trying: on simulated machines, whose times are known and take none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rollover.models.thread_tuner import BUDGET, ThreadTuner

# Seconds of a decode step on two cores, as measured: alone, beside one busy process, beside two.
ALONE = {1: 0.14, 2: 0.09}
BESIDE_ONE = {1: 0.14, 2: 0.32}
BESIDE_TWO = {1: 0.21, 2: 1.3}


def cores_shared(cores: int, busy: int) -> dict[int, float]:
    """Seconds of a piece by threads: a tenth cannot be shared, and one thread too many waits for its turn."""
    free = max(1, cores - busy)
    return {n: (0.1 + 0.9 / n) * (1 if n <= free else 3 * n / free) for n in range(1, cores + 1)}


class Machine:
    """Pieces of work one after the other. `seconds` of each number of threads; `noise`: standard deviation, a share."""

    def __init__(self, limit: int, noise: float = 0.05, seed: int = 0) -> None:
        self.size, self.noise, self.random = ThreadTuner(limit), noise, random.Random(seed)
        self.now = 0.0
        self.settled: list[int] = []  # after each piece

    def work(self, pieces: int, seconds: dict[int, float], size: Callable[[int], float] = lambda _: 1.0) -> float:
        """Seconds of so many pieces; piece i is so large."""
        started = self.now
        for i in range(pieces):
            took = seconds[self.size.num] * size(i) * max(0.5, self.random.gauss(1, self.noise))
            self.size.took(took, size(i))
            self.now += took
            self.settled.append(self.size.settled)
        return self.now - started

    @property
    def num_changes(self) -> int:
        return sum(a != b for a, b in zip(self.settled, self.settled[1:], strict=False))


@pytest.mark.parametrize("seed", range(2))
def test_nothing_else_runs_all_threads_are_kept_and_trials_cost_little(seed: int) -> None:
    machine = Machine(2, seed=seed)
    took = machine.work(4000, ALONE)
    assert machine.num_changes == 0 and machine.size.settled == 2
    assert took < 4000 * ALONE[2] * 1.02


@pytest.mark.parametrize("beside", [BESIDE_ONE, BESIDE_TWO])
@pytest.mark.parametrize("seed", range(2))
def test_load_comes_and_goes(beside: dict[int, float], seed: int) -> None:
    machine = Machine(2, seed=seed)
    machine.work(500, ALONE)
    machine.work(20, beside)
    assert machine.size.settled == 1, "three slow pieces, and a trial of four"
    assert machine.work(1000, beside) < 1000 * beside[1] * 1.03
    assert machine.num_changes == 1
    machine.work(800, ALONE)
    assert machine.size.settled == 2
    assert machine.num_changes == 2


@pytest.mark.parametrize("seed", range(2))
def test_numbers_that_are_as_good_do_not_take_turns(seed: int) -> None:
    machine = Machine(2, noise=0.03, seed=seed)
    machine.work(4000, {1: 0.1, 2: 0.104})
    assert machine.num_changes <= 1


@pytest.mark.parametrize(("busy", "best"), [(0, 16), (1, 15), (4, 12), (12, 4)])
def test_many_cores_end_near_those_that_are_free(busy: int, best: int) -> None:
    seconds = cores_shared(16, busy)
    machine = Machine(16, noise=0.02)
    machine.work(4000, seconds)
    assert seconds[machine.size.settled] < 1.1 * seconds[best]


def test_a_load_that_comes_and_goes_all_the_time_costs_no_more_than_the_budget() -> None:
    """Every few pieces everything takes twice as long, and one thread is never worth it."""
    machine = Machine(2)
    idle, slow = {1: 0.3, 2: 0.1}, {1: 0.6, 2: 0.2}
    for _ in range(300):
        machine.work(10, idle)
        machine.work(10, slow)
    assert machine.num_changes == 0
    assert machine.now < 300 * 10 * (0.1 + 0.2) * (1 + 2 * BUDGET)


def test_pieces_of_any_size_are_compared() -> None:
    """Micro-batches of a step: the last one is a fifth of the others."""
    machine = Machine(2)
    machine.work(400, BESIDE_ONE, lambda i: 0.2 if i % 5 == 4 else 1.0)
    assert machine.size.settled == 1
    assert machine.num_changes == 1


@pytest.mark.parametrize("seed", range(2))
def test_a_machine_that_swings_by_itself_does_not_use_up_what_a_load_needs(seed: int) -> None:
    """Micro-batches of a second: alone they take half as long again for some time, now and then."""
    machine = Machine(2, seed=seed)
    for _ in range(8):
        machine.work(8, {1: 2.1, 2: 1.1})
        machine.work(4, {1: 3.1, 2: 1.6})
    assert machine.size.settled == 2
    machine.work(14, {1: 2.4, 2: 4.1})
    assert machine.size.settled == 1


@pytest.mark.parametrize("seed", range(2))
def test_seconds_of_noise_cost_no_more_than_trials_may(seed: int) -> None:
    """Four micro-batches in thirty take twice as long: when fewer threads have been tried, it is over."""
    machine = Machine(2, seed=seed)
    for _ in range(40):
        machine.work(26, {1: 1.4, 2: 1.0})
        machine.work(4, {1: 1.6, 2: 2.0})
    assert machine.num_changes == 0
    assert machine.now < 40 * (26 * 1.0 + 4 * 2.0) * (1 + 2 * BUDGET)


def test_one_thread_is_one_thread() -> None:
    machine = Machine(1)
    machine.work(100, {1: 0.1})
    assert set(machine.settled) == {1}


def test_a_trial_is_given_up_at_a_hopeless_piece() -> None:
    machine = Machine(2, noise=0)
    machine.size.settled = 1
    tried = 0
    for _ in range(100):
        tried += machine.size.num == 2
        machine.work(1, BESIDE_TWO)
    assert 1 <= tried <= 4, "the piece that is not counted, and one that is"


def test_a_process_that_was_stopped_in_a_trial_tries_again_soon() -> None:
    """Ctrl-Z for an hour, in one piece of a trial: that was not the price of another number of threads."""
    machine = Machine(2)
    machine.work(500, ALONE)
    while machine.size.num == machine.size.settled:
        machine.work(1, ALONE)
    machine.work(1, dict.fromkeys(ALONE, 3600.0))
    machine.work(60, ALONE)
    machine.work(400, BESIDE_ONE)
    assert machine.size.settled == 1
    machine.work(4000, ALONE)  # nothing but a trial shows that the load has gone
    assert machine.size.settled == 2
