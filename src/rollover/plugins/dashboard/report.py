"""The dashboard as one file that opens without a network: the page with its files and its answers inlined.

    RunData, RunComparison ──answers──▶ JSON, compressed, in the file ──▶ page/sample.js, in place of a server

Owns the content of a report within its size: every curve, thinned; the numbers of every rollout; complete groups, the
most interesting first, while there is room; the whole trace in screen resolution. The report counts what does not fit.
Data of a run cannot become markup: it is a block of base64.
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
_CURVES, _NUMBERS, _LANES, _EVALUATED = 0.25, 0.25, 0.15, 0.05  # shares of a run's room; texts get the rest
_POINT, _ROW, _BAR = 6, 25, 16  # bytes of one, compressed, approximately
_MOST_POINTS, _MOST_BARS = 600, 10_000
_COLUMNS = 1200  # of a screen
_INTERESTING = 4  # of each kind
_TOKENS = 4000  # per rollout
_TOO_LARGE = 20  # rollouts that do not fit before the search for smaller ones ends


def make_report(runs: Sequence[RunData], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of the file; ValueError if settings and evaluations alone do not fit."""
    empty = _html({})
    room = (most_bytes - len(empty.encode())) // len(runs)
    comparison = RunComparison(runs)
    compare = {name: comparison.answer(name, {}) for name in ("config", "evaluations")} if len(runs) > 1 else {}
    room -= len(_packed(compare)) // len(runs)
    text = _html({"runs": [_run_answers(run, room) for run in runs], "compare": compare})
    if (size := len(text.encode())) > most_bytes:
        raise ValueError(f"the report would have {size:,} bytes, more than {most_bytes:,}: give fewer runs")
    return text


def _run_answers(run: RunData, room: int) -> dict[str, Any]:
    answers = {name: run.answer(name, {}) for name in _ANSWERS}
    evaluated = _evaluated(run, int(room * _EVALUATED))
    room -= len(_packed([answers, evaluated]))
    with run.reading("rows", "rollouts", "trace") as files:
        columns, index = files.columns(), files.rollouts
        keys = [found["key"] for found in keys_of(columns)]
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
        budget, too_large = _ByteBudget(room - len(_packed(found))), 0
        found |= {"excerpts": {}, "records": {}, "left_out": 0}
        for name, excerpt, record in _texts(run, files, entries):
            if not budget.add([name, record], [name, excerpt]):
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
    """Yield the rollouts, the most interesting first: name, excerpt for a list, complete detail."""
    for places in _interesting_groups(entries):
        group = entries[places]
        records = files.rollouts.records_of(group)
        for place, (entry, record) in enumerate(zip(group, records, strict=True)):
            row = row_of(files.rollouts, entry, record)
            excerpt = {"asked": row["asked"], "answered": row["answered"]}
            whole = detail_in_group(files, place, group, records, 0, _TOKENS, run.token_texts)
            yield f"{row['step']}/{row['id']}", excerpt, whole | {"siblings": []}


def _evaluated(run: RunData, room: int) -> dict[str, Any]:
    """Return the answers of the newest evaluation that fit, the lowest scores first: "rows", and "whole" by place."""
    none = {"steps": [], "step": None, "settings": [], "of": 0}
    found: dict[str, Any] = {**none, "rows": [], "whole": {}}
    try:
        found |= {**run.answer("answers", {"limit": "0"})}
        lowest_first = list(islice(lowest(run.files.directory), MOST_ROWS))
    except ValueError:  # damaged: the live dashboard shows the error; the rest of the report is usable
        return found
    budget = _ByteBudget(room)
    for row, whole in lowest_first:
        if not budget.add(row, [row["place"], whole]):
            break
        found["rows"].append(row)
        found["whole"][row["place"]] = whole
    return found


def _lanes(trace: TraceIndex, seconds: float, most_bars: int) -> dict[str, Any]:
    """Return the whole time, in fine resolution if every bar fits."""
    fine = window(trace, 0.0, seconds, MOST_COLUMNS, most_bars)
    return fine if fine["bars"] is not None else window(trace, 0.0, seconds, _COLUMNS, most_bars)


def _columns(index: RolloutIndex, entries: np.ndarray, most: int) -> dict[str, Any]:
    """Return the numbers of rollouts by the names of row_of; of evenly spaced steps if not all fit."""
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


def _interesting_groups(entries: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the places of whole groups: of the best, worst, longest and stalest rollouts, then one per step, distant
    steps first, then the others."""
    heads: list[int] = []
    scored = np.flatnonzero(~np.isnan(entries["score"]))
    by_score = scored[np.argsort(entries["score"][scored], kind="stable")]
    longest, stalest = np.argsort(-entries["num_tokens"].astype("i8")), np.argsort(-staleness(entries))
    for order in (by_score[::-1], by_score, longest, stalest):
        heads += order[:_INTERESTING].tolist()
    steps, first = np.unique(entries["step"], return_index=True)
    order = sorted(range(len(steps)), key=lambda place: int(f"{place:032b}"[::-1], 2))
    heads += [int(first[place]) for place in order]
    seen: set[tuple[int, int]] = set()
    for head in chain(heads, range(len(entries))):
        group = int(entries[head]["step"]), int(entries[head]["group_id"])
        if group not in seen:
            seen.add(group)
            yield np.flatnonzero((entries["step"] == group[0]) & (entries["group_id"] == group[1]))


class _ByteBudget:
    """Budget of bytes for values that are compressed one after the other, in several separate streams."""

    def __init__(self, size: int) -> None:
        self._left = float(size)
        self._packers: list[Any] = []

    def add(self, *values: Any) -> bool:
        """Return whether the values, one per stream, fit; if so they are added."""
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
    """Compress for page/source.js; without a time stamp, so that equal runs give equal files."""
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
