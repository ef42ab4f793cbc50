"""The dashboard as one file that opens from a disk without a network: the same page, its parts inlined, and its
answers.

    RunData, RunComparison ──answers──▶ written (JSON, packed, in the file) ──▶ page/sample.js, asked in place of a
    server

Owns what a report has of a run, and how large it gets: every curve, thinned out; of every rollout its numbers, and of
whole groups, the most telling first, all there is, as far as there is room; the whole trace as a screen shows it. What
did not fit is counted in the report. Nothing that a run says can become markup: it stands in a block of base64.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from rollover.plugins.dashboard.compare import RunComparison
from rollover.plugins.dashboard.eval_answers import MOST_ROWS, lowest
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.lanes import MOST_COLUMNS, window
from rollover.plugins.dashboard.metrics import AXES, keys_of, series
from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.page_files import one_script, page_files
from rollover.plugins.dashboard.rollout_detail import detail_in_group
from rollover.plugins.dashboard.rollout_index import RolloutIndex, rollout_id, staleness, versions
from rollover.plugins.dashboard.rollout_query import row_of
from rollover.plugins.dashboard.run_data import RunData
from rollover.plugins.dashboard.trace_index import TraceIndex

MOST_BYTES = 2_900_000
_ANSWERS = ("state", "keys", "evaluations", "warnings", "choices", "intervals", "staleness", "ledger", "config", "plan")
_CURVES, _NUMBERS, _LANES, _EVALUATED = 0.25, 0.25, 0.15, 0.05  # shares of a run's room; texts have what is left
_POINT, _ROW, _BAR = 6, 25, 16  # bytes that one takes packed, about
_MOST_POINTS, _MOST_BARS = 600, 10_000
_COLUMNS = 1200  # of a screen
_TELLING = 4  # of each kind
_TOKENS = 4000  # of a rollout
_TOO_LARGE = 20  # rollouts that no longer fit, before no other is tried


def make_report(runs: Sequence[RunData], most_bytes: int = MOST_BYTES) -> str:
    """The file's text. ValueError where the settings and evaluations alone do not fit."""
    empty = _html({})
    room = (most_bytes - len(empty.encode())) // len(runs)
    several = RunComparison(runs)
    compare = {name: several.answer(name, {}) for name in ("config", "evaluations")} if len(runs) > 1 else {}
    room -= len(_packed(compare)) // len(runs)
    text = _html({"runs": [_written(run, room) for run in runs], "compare": compare})
    if (size := len(text.encode())) > most_bytes:
        raise ValueError(f"the report would have {size:,} bytes, and {most_bytes:,} are the most: give fewer runs")
    return text


def _written(run: RunData, room: int) -> dict[str, Any]:
    answers = {name: run.answer(name, {}) for name in _ANSWERS}
    evaluated = _evaluated(run, int(room * _EVALUATED))
    room -= len(_packed([answers, evaluated]))
    with run.reading("rows", "rollouts", "trace") as files:
        columns, index = files.columns(), files.rollouts
        keys = [of["key"] for of in keys_of(columns)]
        points = min(_MOST_POINTS, max(20, int(room * _CURVES / _POINT / max(1, len(keys)))))
        metrics = series(columns, keys, points)
        group_size = files.value("rollout.group_size")
        axes = {name: series(columns, [], points, x=name, group_size=group_size)["x"] for name in AXES}
        files.trace.look()
        whole = max(files.trace.seconds, 1e-3)
        lanes = _lanes(files.trace, whole, min(_MOST_BARS, int(room * _LANES / _BAR)))
        entries = index.entries()
        numbers_of = _columns(index, entries, int(room * _NUMBERS / _ROW))
        found = {
            "answers": answers | {"metrics": metrics},
            "evaluated": evaluated,
            "axes": axes,
            "lanes": [lanes],
            "rollouts": numbers_of,
        }
        space, too_large = _Room(room - len(_packed(found))), 0
        found |= {"excerpts": {}, "records": {}, "left_out": 0}
        for name, excerpt, record in _texts(run, files, entries):
            if not space.takes([name, record], [name, excerpt]):
                too_large += 1
                if too_large > _TOO_LARGE:
                    break
                continue
            found["excerpts"][name], found["records"][name] = excerpt, record
        found["left_out"] = len(entries) - len(found["records"])
    return found


def _texts(
    run: RunData, files: IndexedRun, entries: np.ndarray
) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Of each rollout, the most telling first: its name, what a list shows of it, and all that its page has."""
    for places in _telling(entries):
        group = entries[places]
        records = files.rollouts.records_of(group)
        for place, (entry, record) in enumerate(zip(group, records, strict=True)):
            row = row_of(files.rollouts, entry, record)
            excerpt = {"asked": row["asked"], "answered": row["answered"]}
            whole = detail_in_group(files, place, group, records, 0, _TOKENS, run.pieces)
            yield f"{row['step']}/{row['id']}", excerpt, whole | {"siblings": []}


def _evaluated(run: RunData, room: int) -> dict[str, Any]:
    """Of the newest evaluation the lowest scores first, as many answers as there is room for: as in a list, and whole
    ("whole", by place)."""
    none = {"steps": [], "step": None, "settings": [], "of": 0}
    found: dict[str, Any] = {**none, "rows": [], "whole": {}}
    try:
        found |= {**run.answer("answers", {"limit": "0"})}
        lowest_first = list(islice(lowest(run.files.directory), MOST_ROWS))
    except ValueError:  # damaged: the page of a server says how, and all else can be told
        return found
    space = _Room(room)
    for row, whole in lowest_first:
        if not space.takes(row, [row["place"], whole]):
            break
        found["rows"].append(row)
        found["whole"][row["place"]] = whole
    return found


def _lanes(trace: TraceIndex, seconds: float, most_bars: int) -> dict[str, Any]:
    """The whole time; finely, so that it can be looked at closely, where every bar has room."""
    fine = window(trace, 0.0, seconds, MOST_COLUMNS, most_bars)
    return fine if fine["bars"] is not None else window(trace, 0.0, seconds, _COLUMNS, most_bars)


def _columns(index: RolloutIndex, entries: np.ndarray, most: int) -> dict[str, Any]:
    """The numbers of rollouts, as row_of names them; of whole steps, evenly chosen, where all do not fit."""
    total = len(entries)
    if total > most:
        steps, counts = np.unique(entries["step"], return_counts=True)
        every = -(-total // max(1, most))
        entries = entries[np.isin(entries["step"], steps[::every])][: max(most, int(counts.max()))]
    return {
        "total": total,
        "words": list(index.words),
        "columns": {
            "id": [rollout_id(entry) for entry in entries],
            "step": entries["step"].tolist(),
            "group": entries["group_id"].tolist(),
            "sibling": entries["sibling"].tolist(),
            "score": numbers(entries["score"]),
            "advantage": numbers(entries["advantage"]),
            "tokens": entries["num_tokens"].tolist(),
            "segments": entries["segments"].tolist(),
            "oldest": numbers(versions(entries, "oldest")),
            "newest": numbers(versions(entries, "newest")),
            "staleness": np.atleast_1d(staleness(entries)).tolist(),
            "outcome": entries["outcome"].tolist(),
            "source": entries["source"].tolist(),
            "stop": entries["stop"].tolist(),
        },
    }


def _telling(entries: np.ndarray) -> Iterator[np.ndarray]:
    """Places of whole groups: those of the best, the worst, the longest and the stalest rollouts first, then one
    of each step, first of steps that lie far apart; then the others."""
    heads: list[int] = []
    scored = np.flatnonzero(~np.isnan(entries["score"]))
    by_score = scored[np.argsort(entries["score"][scored], kind="stable")]
    longest, stalest = np.argsort(-entries["num_tokens"].astype("i8")), np.argsort(-staleness(entries))
    for order in (by_score[::-1], by_score, longest, stalest):
        heads += order[:_TELLING].tolist()
    steps, first = np.unique(entries["step"], return_index=True)
    order = sorted(range(len(steps)), key=lambda place: int(f"{place:032b}"[::-1], 2))
    heads += [int(first[place]) for place in order]
    told_of: set[tuple[int, int]] = set()
    for head in chain(heads, range(len(entries))):
        group = int(entries[head]["step"]), int(entries[head]["group_id"])
        if group not in told_of:
            told_of.add(group)
            yield np.flatnonzero((entries["step"] == group[0]) & (entries["group_id"] == group[1]))


class _Room:
    """Bytes of the file, for values that are packed one after the other: what is alike in neighbours is written once.
    Values that stand in several places of it are neighbours of their like alone."""

    def __init__(self, size: int) -> None:
        self._left = float(size)
        self._packers: list[Any] = []

    def takes(self, *values: Any) -> bool:
        """Whether there was room for them, one in each place, which they have then."""
        self._packers = self._packers or [zlib.compressobj() for _ in values]
        tried = [packer.copy() for packer in self._packers]
        pairs = zip(tried, values, strict=True)
        size = sum(len(of.compress(_json(value)) + of.flush(zlib.Z_SYNC_FLUSH)) for of, value in pairs) * 4 / 3
        if size > self._left:
            return False
        self._packers, self._left = tried, self._left - size
        return True


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _packed(value: Any) -> str:
    """As page/source.js unpacks it. Without the time, so that the same run makes the same file."""
    return base64.b64encode(gzip.compress(_json(value), mtime=0)).decode()


def _html(written: Any) -> str:
    files = {name: content.decode() for name, content in page_files().items()}
    charts, script = files["vendor/uPlot.iife.min.js"], one_script()
    style = files["vendor/uPlot.min.css"] + files["page.css"]
    policy = (
        f"default-src 'none'; script-src {_hash(charts)} {_hash(script)}; style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    for name, text in (("script", charts), ("script", script), ("style", style)):
        assert f"</{name}" not in text.lower()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>Rollover</title><link rel="icon" href="data:,"><style>{style}</style></head><body>',
            f"<!--\nuPlot:\n{files['vendor/LICENSE.uPlot.txt']}\n-->",
            f'<script type="application/gzip" id="written">{_packed(written)}</script>',
            f"<script>{charts}</script>",
            f'<script type="module">{script}</script></body></html>\n',
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
