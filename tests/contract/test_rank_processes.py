"""A rank that is killed or frozen ends all of them, and says so; so does one whose parent ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contract import ranks_model
from rollover.process_tree import has_ended
from rollover.trainer.backend import BackendLost
from rollover.trainer.objective import Counts
from rollover.trainer.ranks.backend import RanksBackend, start_ranks
from rollover.trainer.ranks.group import LocalRanks
from samples import random_samples

SAMPLES = random_samples(3, num_groups=4)
LIMIT_S = 60.0  # of a machine with other things to do
LOOK_S = 0.02
MOST_S = 5.0  # from the death of a rank to that of the others


def wait_until(what: Callable[[], bool]) -> float:
    """Seconds until `what` is so, of a machine that does nothing else: as many naps as this thread took until then.
    Where there is more to do, all that is waited for takes longer, and so do they."""
    started, naps = time.monotonic(), 0
    while not what():
        assert time.monotonic() - started < LIMIT_S
        time.sleep(LOOK_S)
        naps += 1
    return naps * LOOK_S


@pytest.fixture
def idle() -> Iterator[LocalRanks]:
    ranks = LocalRanks(3, 60.0)
    yield ranks
    ranks.close()


def test_a_rank_that_ends_between_two_calls_takes_the_others_with_it(idle: LocalRanks) -> None:
    os.kill(idle.pids[1], signal.SIGKILL)
    assert wait_until(lambda: all(map(has_ended, idle.pids))) < MOST_S
    for _ in range(2):
        with pytest.raises(BackendLost, match="rank 1 of 3 was killed by SIGKILL .*: the other 2 were ended"):
            idle.call("listen", {0: {"host": "127.0.0.1"}})


def test_ranks_end_when_they_are_closed(idle: LocalRanks) -> None:
    idle.close()
    assert all(map(has_ended, idle.pids))
    with pytest.raises(BackendLost, match="the ranks were ended"):
        idle.call("listen", {0: {"host": "127.0.0.1"}})


@pytest.mark.parametrize("calling", [False, True])
def test_ranks_that_were_all_stopped_are_noticed(calling: bool) -> None:
    """Nobody of them can tell; nor where one of them is called alone, or what is asked may take its time."""
    ranks = LocalRanks(2, 1.0)
    try:
        for pid in ranks.pids:
            os.kill(pid, signal.SIGSTOP)
        if not calling:
            wait_until(lambda: all(map(has_ended, ranks.pids)))
        with pytest.raises(BackendLost, match=r"rank \d of 2 was stopped, and did not go on within 1 s"):
            ranks.call("listen", {0: {"host": "127.0.0.1"}}, limited=False)
        wait_until(lambda: all(map(has_ended, ranks.pids)))
    finally:
        ranks.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_that_the_others_wait_for_is_noticed(frozen: bool, tmp_path: Path) -> None:
    """A killed one at once; one that is frozen, and so keeps its connections, after the time limit."""
    timeout_s = 5.0 if frozen else 10 * LIMIT_S
    of = ranks_model.config(ranks_model.model_folder(tmp_path), backend={"rank_timeout_s": timeout_s})
    ranks = start_ranks(of, tmp_path / "logs")
    try:
        backend = RanksBackend(ranks_model.setup(of), ranks)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread, pytest.raises(BackendLost) as lost:
            step = thread.submit(backend.forward_backward, SAMPLES, Counts.from_samples(SAMPLES))
            if not frozen:
                time.sleep(0.5)  # the other one waits for it by then
                os.kill(ranks.pids[1], signal.SIGKILL)
                assert wait_until(step.done) + wait_until(lambda: all(map(has_ended, ranks.pids))) < MOST_S
            step.result()
        wait_until(lambda: all(map(has_ended, ranks.pids)))
        with pytest.raises(BackendLost):
            backend.forget_gradients()
    finally:
        ranks.close()
    if frozen:
        told = ("rank 0 of 2 failed (", "rank 1 of 2 did not answer within 5 s", "rank 1 of 2 was stopped")
        assert any(how in str(lost.value) for how in told), lost.value
    else:
        assert str(lost.value).startswith("rank 1 of 2 was killed by SIGKILL (in forward_backward): ")
        assert str(lost.value).endswith(f"({tmp_path / 'logs' / 'rank-1.log'})")
