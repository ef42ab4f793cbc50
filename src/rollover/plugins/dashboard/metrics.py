"""What the page shows of metrics.jsonl: curves, the ledger's accounts, pace and health warnings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from rollover.config import Config
from rollover.config.schema import renamed
from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.numbers import number, numbers
from rollover.track.health import RANGES, Health, ignored_figures
from rollover.track.metrics import find

MOST_POINTS = 4_000  # a screen has fewer
AXES = {
    "step": "training steps",
    "tokens": "tokens generated",
    "samples": "rollouts trained (of agents: episodes)",
    "time": "seconds in steps",
}
"""What a curve may be drawn over, and in what it is counted."""


def axis(of: Columns, name: str, group_size: int | None = None) -> np.ndarray:
    """[step] float64: where each step lies on one of AXES. ValueError for another name.

    "time" is the sum of the steps' times, so that an interruption takes none. "samples" counts groups where nobody
    knows `group_size`.
    """
    if name == "step":
        return of.column("step")
    if name == "tokens":
        return of.column("tokens/generated")
    if name == "samples":
        return of.column("groups/consumed") * (group_size or 1)
    if name == "time":
        return np.cumsum(np.nan_to_num(of.column("time/step_s")))
    raise ValueError(f"x: {name!r} is no axis: give one of {', '.join(AXES)}")


def keys_of(of: Columns) -> list[dict[str, Any]]:
    """Every key that some step has, in the order of their first steps: its latest value, unit and meaning."""
    found = []
    for key, value in of.latest.items():
        metric = find(key)
        unit, doc, kind = (metric.unit, metric.doc, metric.kind) if metric else ("", "", "")
        found.append({"key": key, "last": number(value), "unit": unit, "doc": doc, "kind": kind})
    return found


def series(
    of: Columns,
    keys: Sequence[str],
    points: int,
    first: int | None = None,
    last: int | None = None,
    x: str = "step",
    group_size: int | None = None,
) -> dict[str, Any]:
    """Columns of `keys` over the steps from `first` to `last`, of some `points` values each.

    Where there are more steps than that, consecutive ones are one bucket, of which the least and the largest value are
    left: a spike of one step stays a spike. "first", "last": the bucket of each value, which may be of any step in it;
    "steps": where it is drawn, at one end of that; "x": where this lies on the axis; "thinned": how many steps are in a
    bucket, 1 where every step is there.
    """
    place = axis(of, x, group_size)
    steps = of.column("step")
    chosen = np.ones(len(steps), bool)
    if first is not None:
        chosen &= steps >= first
    if last is not None:
        chosen &= steps <= last
    columns = {key: of.column(key)[chosen] for key in keys}
    steps, place = steps[chosen], place[chosen]
    count = len(steps)
    buckets = max(1, min(points, MOST_POINTS) // 2)
    thinned, between = 1, (steps, steps)
    if count > 2 * buckets:
        begins = np.unique(np.linspace(0, count, buckets, endpoint=False).astype(np.int64))
        ends = np.append(begins[1:], count) - 1
        between = np.repeat(steps[begins], 2), np.repeat(steps[ends], 2)
        steps, place = _pairs(steps[begins], steps[ends]), _pairs(place[begins], place[ends])
        columns = {key: _extremes(values, begins, ends) for key, values in columns.items()}
        thinned = -(-count // buckets)
    return {
        "steps": numbers(steps),
        "first": numbers(between[0]),
        "last": numbers(between[1]),
        "x": numbers(place),
        "columns": {key: numbers(values) for key, values in columns.items()},
        "of": count,
        "thinned": thinned,
    }


def _pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([a, b], axis=1).reshape(-1)


def _extremes(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of each bucket its least and its largest value, in the order in which the bucket goes."""
    low, high = np.fmin.reduceat(values, begins), np.fmax.reduceat(values, begins)
    falls = values[ends] < values[begins]
    return _pairs(np.where(falls, high, low), np.where(falls, low, high))


_DROPPED = re.compile(r"dropped/(.+)/(groups|tokens)")
_FILTERED = re.compile(r"filtered/(.+)/groups")


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is in an account. `tokens`: sampled ones."""

    groups: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where everything is that the run generated so far. `dropped`: by reason, those that are not empty. `filtered`:
    the groups of dropped["filtered"] by the filter's name. `reprefilled`: tokens that the engine computed twice, a
    cost beside the accounts."""

    generated: Amount
    trained: Amount
    held: Amount
    dropped: Mapping[str, Amount]
    filtered: Mapping[str, int]
    reprefilled: int

    @property
    def missing(self) -> Amount:
        """What is in no account: nothing, in the row of a run."""
        left = [self.trained, self.held, *self.dropped.values()]
        return Amount(
            self.generated.groups - sum(amount.groups for amount in left),
            self.generated.tokens - sum(amount.tokens for amount in left),
        )

    def as_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def accounts_of(row: Mapping[str, Any]) -> Accounts | None:
    """The accounts in a row of metrics.jsonl; None where it has none (before the first step)."""
    if row.get("tokens/generated") is None:
        return None

    def amount(groups: str, tokens: str) -> Amount:
        return Amount(int(row.get(groups) or 0), int(row.get(tokens) or 0))

    reasons = dict.fromkeys(match[1] for key in row if (match := _DROPPED.fullmatch(key)))
    dropped = {reason: amount(f"dropped/{reason}/groups", f"dropped/{reason}/tokens") for reason in reasons}
    return Accounts(
        generated=amount("groups/admitted", "tokens/generated"),
        trained=amount("groups/consumed", "tokens/trained"),
        held=amount("groups/held", "tokens/held"),
        dropped={reason: of for reason, of in dropped.items() if of.groups or of.tokens},
        filtered={match[1]: int(row[key] or 0) for key in row if (match := _FILTERED.fullmatch(key))},
        reprefilled=int(row.get("engine/reprefill_tokens") or 0),
    )


_LATEST = 20  # steps


def seconds_a_step(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean time of its latest steps, evaluations and checkpoints in them; None where no row has times."""
    times = [row["time/step_s"] for row in rows[-_LATEST:] if row.get("time/step_s")]
    return sum(times) / len(times) if times else None


class HealthWarning(NamedTuple):
    """`key` of metrics.jsonl was out of its range at `step`; `text` says how, and what to try."""

    step: int
    key: str
    text: str


def warnings_of(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[HealthWarning]:
    """What a run with these rows was told, in order. `config`: its config.resolved.json, or {}; that of an older
    version counts as far as it can be read."""
    return list(_told(_health_of(config), rows))


class LiveWarnings:
    """`warnings_of` the columns of a run that grows, whose rows are looked at once each."""

    def __init__(self) -> None:
        self._begin({}, -1)

    def of(self, columns: Columns, config: Mapping[str, Any]) -> list[HealthWarning]:
        """What was said up to now. From the beginning where rows went away, or under another configuration."""
        if (config, columns.cuts) != (self._config, self._cuts):
            self._begin(config, columns.cuts)
        self._found += _told(self._health, columns.rows([wanted.key for wanted in RANGES], self._looked_at))
        self._looked_at = len(columns)
        return list(self._found)

    def _begin(self, config: Mapping[str, Any], cuts: int) -> None:
        self._config, self._cuts = config, cuts
        self._health, self._looked_at = _health_of(config), 0
        self._found: list[HealthWarning] = []


def _health_of(config: Mapping[str, Any]) -> Health:
    try:
        return Health(ignored_figures(Config.model_validate(renamed(config)))) if config else Health()
    except ValueError:  # a key that is gone, say
        return Health()


def _told(health: Health, rows: Iterable[Mapping[str, Any]]) -> Iterator[HealthWarning]:
    for row in rows:
        for text in health.look({key: value for key, value in row.items() if value is not None}):
            yield HealthWarning(int(row["step"]), text.partition(" = ")[0], text)
