"""Finds the fastest number of threads by occasional trials. Pure: it receives times and never measures any.

A piece of work (a decode step, a micro-batch) comes with its size and its seconds. All threads of a piece wait for each
other at the end of every operation, so if other programs use the cores, fewer threads may be faster:

    settled ─── ENOUGH pieces were timed, and the credit pays what a trial of the next number lost last time ──▶ trial
       ▲                                                                                                          │
       └── the number tried, if its pieces cost less than MARGIN of the settled one's (hysteresis); else as before ─┘

The extra time of a trial's pieces is subtracted from the credit, which grows by BUDGET of all time: trials cost about
that share, cheap ones come often, and expensive ones seldom. When ENOUGH pieces in a row cost much more than those
before them, another program has started, and fewer threads are tried; when they cost much less it has ended, and more
are. Smaller changes count as noise: a trial would cost more than it gains. Trials after a change are on credit, more
for a greater change, so that the noise of an idle machine does not use up the credit for a real load; earlier losses
say nothing about trials after a change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

BUDGET = 0.015
MARGIN = 0.92
ENOUGH = 6
_REMEMBERED = 24  # settled pieces
_COUNTED = 3  # pieces of a trial, without the first of a new number, for which code is generated
_HOPELESS = 1.5  # a piece that costs this factor more ends the trial
_STOPPED = 10  # a factor not caused by threads: the process was stopped, or the machine suspended
_CHANGED = 1.3  # this factor, up or down, in ENOUGH pieces in a row is a change
_ON_CREDIT = 4  # pieces whose change of time the credit may be overdrawn by after a change
_SAVED_S = 60.0  # largest saved credit, in seconds of work


@dataclass
class _Trial:
    """A trial of `num` threads. `usual`: seconds per unit of work at the settled number. `extra_s`: lost so far."""

    num: int
    usual: float
    costs: list[float] = field(default_factory=list)
    extra_s: float = 0.0


class ThreadTuner:
    """The number of threads for one kind of work, from 1 to `limit`; starts at the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = self.settled = limit
        self._trial: _Trial | None = None
        self._warm = {limit}  # numbers that have been used
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)  # seconds of a unit of work at the settled number
        self._since_trial = 0
        self._credit_s = 0.0
        self._losses_s: dict[int, float] = {}  # of the last trial of each other number
        self._turn = 0

    @property
    def num(self) -> int:
        """Threads for the next piece."""
        return self.settled if self._trial is None else self._trial.num

    def took(self, seconds: float, work: float) -> None:
        """Record the seconds of a piece with `num` threads. `work` > 0: its size, proportional to its time."""
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
