"""How many threads to compute with, found by trying now and again. Pure: it is told of times and never takes any.

A piece of work (a decode step, a micro-batch) comes with its size and the seconds it took. All threads of a piece wait
for each other at the end of every operation, so where other programs want the cores, fewer threads may be faster:

    settled ─── ENOUGH pieces were timed, and the credit pays what a trial of the next number lost last time ──▶ trial
       ▲                                                                                                          │
       └── the number tried, if its pieces cost less than MARGIN of the settled one's (hysteresis); else as before ─┘

What the pieces of a trial take beyond the settled number's is taken from the credit, which grows by BUDGET of all time:
trials cost about that share and no more, cheap ones come often, and dear ones seldom. When ENOUGH pieces in a row cost
much more than those before them, something else has begun to run, and fewer threads are tried; when they cost much less
it has ended, and more are. Less is taken for noise: a trial then costs more than it gains. Trials of a change are on
credit, the more of it the greater the change, so that the noise of a machine on which nothing runs does not use up what
a load needs; what trials lost before says nothing of those after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

BUDGET = 0.015
MARGIN = 0.92
ENOUGH = 6
_REMEMBERED = 24  # settled pieces
_COUNTED = 3  # pieces of a trial. The first that a number computes is not: code is generated for each
_HOPELESS = 1.5  # a piece that costs so many times as much ends the trial
_STOPPED = 10  # so many times as much is no price of threads: the process was stopped, or its machine suspended
_CHANGED = 1.3  # so many times as much, or as little, in ENOUGH pieces in a row is a change
_ON_CREDIT = 4  # after a change the credit may be overdrawn by what so many pieces take more, or less, than before
_SAVED_S = 60.0  # as long as trials cost nothing, no more credit than of so many seconds is saved


@dataclass
class _Trial:
    """Of `num` threads. `usual`: seconds of a unit of work at the settled number. `extra_s`: lost so far."""

    num: int
    usual: float
    costs: list[float] = field(default_factory=list)
    extra_s: float = 0.0


class ThreadTuner:
    """The number of threads for one kind of work, from 1 to `limit`; all at first."""

    def __init__(self, limit: int) -> None:
        self.limit = self.settled = limit
        self._trial: _Trial | None = None
        self._warm = {limit}  # numbers that have computed something
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)  # seconds of a unit of work at the settled number
        self._since_trial = 0
        self._credit_s = 0.0
        self._losses_s: dict[int, float] = {}  # of the last trial of each number beside the settled one
        self._turn = 0

    @property
    def num(self) -> int:
        """Threads for the next piece."""
        return self.settled if self._trial is None else self._trial.num

    def took(self, seconds: float, work: float) -> None:
        """A piece took so long with `num` threads. `work` > 0: its size, in a unit that its time grows with."""
        if self.limit == 1:
            return
        if self._trial is not None:
            self._try(self._trial, seconds, work)
            return
        self._credit_s += BUDGET * seconds
        self._costs.append(seconds / work)
        self._since_trial += 1
        if len(self._costs) > ENOUGH and self._since_trial >= ENOUGH:
            self._look(work)

    def _look(self, work: float) -> None:
        """Begin a trial if one is due. `work`: size of a piece."""
        num, step, costs = self.settled, max(1, self.settled // 4), list(self._costs)
        candidates = [n for n in (num - step, num + step, num // 2, 2 * num) if 1 <= n <= self.limit]
        usual, newest = median(costs[:-ENOUGH]), costs[-ENOUGH:]
        slower, faster = min(newest) > _CHANGED * usual, max(newest) * _CHANGED < usual
        if slower or faster:
            candidates = [n for n in candidates if (n < num) == slower]
            self._costs = deque(newest, maxlen=_REMEMBERED)
        if not candidates:
            return
        others = list(dict.fromkeys(candidates))
        candidate = others[self._turn % len(others)]
        price_s = self._losses_s.get(candidate, 0.0)
        if slower or faster:
            self._losses_s.clear()
            price_s = -_ON_CREDIT * abs(median(newest) - usual) * work
        self._credit_s = min(self._credit_s, max(price_s, BUDGET * _SAVED_S))
        if self._credit_s >= price_s:
            self._trial = _Trial(candidate, median(self._costs))

    def _try(self, trial: _Trial, seconds: float, work: float) -> None:
        usual_s = trial.usual * work
        trial.extra_s += min(seconds, _STOPPED * usual_s) - usual_s
        if trial.num not in self._warm:
            self._warm.add(trial.num)
            return
        trial.costs.append(seconds / work)
        if trial.costs[-1] > _HOPELESS * trial.usual:
            self._end(trial, won=False)
        elif len(trial.costs) == _COUNTED:
            self._end(trial, won=median(trial.costs) < MARGIN * trial.usual)

    def _end(self, trial: _Trial, *, won: bool) -> None:
        lost_s = max(0.0, trial.extra_s)
        self._trial, self._since_trial = None, 0
        self._turn += 1
        self._credit_s -= lost_s
        if won:
            self.settled = trial.num
            self._costs = deque(trial.costs, maxlen=_REMEMBERED)
            self._losses_s.clear()
        else:
            self._losses_s[trial.num] = lost_s
