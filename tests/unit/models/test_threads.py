"""The team sets torch's threads while a piece of work lasts, and counts what it took."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollover.config import RunConfig
from rollover.models.threads import Team


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def work(team: Team, clock: Clock, pieces: int, seconds: dict[int, float]) -> list[int]:
    """The threads of so many pieces, which take so long by their number."""
    seen = []
    for _ in range(pieces):
        with team.piece(1):
            seen.append(torch.get_num_threads())
            clock.now += seconds[seen[-1]]
    return seen


def test_a_fixed_number_stays_whatever_it_takes() -> None:
    clock = Clock()
    team = Team(clock=clock)
    assert set(work(team, clock, 50, {2: 1.0})) == {2}
    team.use(1)
    assert set(work(team, clock, 10, {1: 3.0})) == {1}
    assert team.seconds == 50 + 30 and team.thread_seconds == 2 * 50 + 30


def test_auto_ends_at_the_fastest() -> None:
    clock = Clock()
    team = Team(auto=True, clock=clock)
    seen = work(team, clock, 50, {1: 1.0, 2: 3.0})
    assert seen[0] == 2 and seen[20:].count(2) <= 4, "one, but for a trial"
    torch.set_num_threads(2)  # by something else in this thread
    team.assemble()
    assert torch.get_num_threads() == 1


def test_what_was_found_is_kept_for_each_limit() -> None:
    clock = Clock()
    team = Team(auto=True, clock=clock)
    work(team, clock, 12, {1: 1.0, 2: 3.0})
    assert torch.get_num_threads() == 1
    team.use(1)
    assert set(work(team, clock, 5, {1: 1.0})) == {1}
    team.use(2)
    assert torch.get_num_threads() == 1
    with ThreadPoolExecutor(1) as thread:  # which begins with torch's own number
        assert thread.submit(team.compute, lambda: 2, torch.get_num_threads).result() == 1


def test_a_piece_that_fails_is_not_counted() -> None:
    team = Team(auto=True, clock=Clock())
    with pytest.raises(RuntimeError, match="broken"), team.piece(1):
        raise RuntimeError("broken")
    assert team.seconds == 0


@pytest.mark.parametrize(
    ("threads", "device", "auto"), [("auto", "cpu", True), (0, "cpu", False), ("auto", "cuda", False)]
)
def test_threads_are_tuned_for_auto_on_cpu_only(threads: int | str, device: str, auto: bool) -> None:
    clock = Clock()
    team = Team.from_config(RunConfig.model_validate({"threads": threads}), torch.device(device), clock=clock)
    assert (len(set(work(team, clock, 20, {1: 1.0, 2: 3.0}))) == 2) == auto
