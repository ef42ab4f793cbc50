"""The page's view of metrics.jsonl: curves, the ledger's accounts, pace and health warnings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from rollover.config import Config
from rollover.config.renames import upgraded
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
"""Horizontal axes of curves, with their units."""


def axis(columns: Columns, name: str, group_size: int | None = None) -> np.ndarray:
    """Return [step] float64, the position of each step on one of AXES; ValueError for another name.

    "time" is the sum of the steps' times, without interruptions. "samples" counts groups if `group_size` is unknown.
    """
    if name == "step":
        return columns.column("step")
    if name == "tokens":
        return columns.column("tokens/generated")
    if name == "samples":
        return columns.column("groups/consumed") * (group_size or 1)
    if name == "time":
        return np.cumsum(np.nan_to_num(columns.column("time/step_s")))
    raise ValueError(f"x: {name!r} is no axis: give one of {', '.join(AXES)}")


def keys_of(columns: Columns) -> list[dict[str, Any]]:
    """Return every key with its latest value, unit and meaning, in the order of the first steps with them."""
    found = []
    for key, value in columns.latest.items():
        metric = find(key)
        unit, doc, kind = (metric.unit, metric.doc, metric.kind) if metric else ("", "", "")
        found.append({"key": key, "last": number(value), "unit": unit, "doc": doc, "kind": kind})
    return found


def series(
    source: Columns,
    keys: Sequence[str],
    points: int,
    first: int | None = None,
    last: int | None = None,
    x: str = "step",
    group_size: int | None = None,
) -> dict[str, Any]:
    """Return columns of `keys` over the steps from `first` to `last`, about `points` values each.

    Consecutive steps share a bucket if there are more; its least and largest value remain, so a spike of one step stays
    visible. "first", "last": steps of each value's bucket; "steps": the end of it where the value is drawn; "x":
    position on the axis; "thinned": steps per bucket, 1 without thinning.
    """
    place = axis(source, x, group_size)
    steps = source.column("step")
    chosen = np.ones(len(steps), bool)
    if first is not None:
        chosen &= steps >= first
    if last is not None:
        chosen &= steps <= last
    columns = {key: source.column(key)[chosen] for key in keys}
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
    """Least and largest value of each bucket; the larger one first if the bucket falls."""
    low, high = np.fmin.reduceat(values, begins), np.fmax.reduceat(values, begins)
    falls = values[ends] < values[begins]
    return _pairs(np.where(falls, high, low), np.where(falls, low, high))


_DROPPED = re.compile(r"dropped/(.+)/(groups|tokens)")
_FILTERED = re.compile(r"filtered/(.+)/groups")


@dataclass(frozen=True, slots=True)
class Amount:
    """Content of an account: groups and sampled tokens."""

    groups: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """The ledger's accounts: generated = trained + dropped + held. `dropped`: by reason, without empty ones.
    `filtered`: groups of dropped["filtered"] by filter. `reprefilled`: tokens prefilled again, a cost and no
    account."""

    generated: Amount
    trained: Amount
    held: Amount
    dropped: Mapping[str, Amount]
    filtered: Mapping[str, int]
    reprefilled: int

    @property
    def missing(self) -> Amount:
        """Content of no account; zero in an intact run."""
        left = [self.trained, self.held, *self.dropped.values()]
        return Amount(
            self.generated.groups - sum(amount.groups for amount in left),
            self.generated.tokens - sum(amount.tokens for amount in left),
        )

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)


def accounts_of(row: Mapping[str, Any]) -> Accounts | None:
    """Return the accounts in a row of metrics.jsonl, None without them."""
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
    """Return the mean time of the latest steps, with evaluations and checkpoints; None without times."""
    times = [row["time/step_s"] for row in rows[-_LATEST:] if row.get("time/step_s")]
    return sum(times) / len(times) if times else None


class HealthWarning(NamedTuple):
    """A warning of track/health.py at `step` about `key` of metrics.jsonl; `text` has the advice."""

    step: int
    key: str
    text: str


def warnings_of(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[HealthWarning]:
    """Return the warnings of a run with these rows. `config`: its config.resolved.json or {}, also of an older
    version."""
    return list(_warnings(_health_of(config), rows))


class LiveWarnings:
    """Warnings of a growing run: each row is checked once."""

    def __init__(self) -> None:
        self._begin({}, -1)

    def update(self, columns: Columns, config: Mapping[str, Any]) -> list[HealthWarning]:
        """Return all warnings. Starts again if rows were removed or the configuration changed."""
        if (config, columns.rollbacks) != (self._config, self._rollbacks):
            self._begin(config, columns.rollbacks)
        self._found += _warnings(self._health, columns.rows([wanted.key for wanted in RANGES], self._looked_at))
        self._looked_at = len(columns)
        return list(self._found)

    def _begin(self, config: Mapping[str, Any], rollbacks: int) -> None:
        self._config, self._rollbacks = config, rollbacks
        self._health, self._looked_at = _health_of(config), 0
        self._found: list[HealthWarning] = []


def _health_of(config: Mapping[str, Any]) -> Health:
    try:
        return Health(ignored_figures(Config.model_validate(upgraded(config)))) if config else Health()
    except ValueError:  # a removed key, for example
        return Health()


def _warnings(health: Health, rows: Iterable[Mapping[str, Any]]) -> Iterator[HealthWarning]:
    for row in rows:
        for text in health.look({key: value for key, value in row.items() if value is not None}):
            yield HealthWarning(int(row["step"]), text.partition(" = ")[0], text)
