"""Golden runs: each mode by the tree before and by the current one, from the same recipe, on this machine."""

from __future__ import annotations

from pathlib import Path

from .compare import (
    between,
    check_run,
    compare_rows,
    compare_tensors,
    json_lines,
    metrics_of,
    recomputed,
    records_of,
    renamed,
    renamed_tensors,
    steady,
    tensors_of,
)
from .modes import STEPS, Mode
from .trees import Bench, Tree

RECORD = ("step", "rollout_id")


def golden(bench: Bench, before: Tree, current: Tree, mode: Mode) -> list[str]:
    """Return the differences of a mode, and the faults of the current run alone."""
    one, other = bench.whole(before, mode), bench.whole(current, mode)
    out = check_run(other / "run", mode, STEPS)
    if not mode.vision:
        out += recomputed(other)
    return out + (differences if mode.exact else tasks_differ)(one, other, before, current)


def differences(one: Path, other: Path, before: Tree, current: Tree) -> list[str]:
    """Compare metrics, records, trace, evaluations and tensors of two run folders, bit for bit."""
    old, new = before.renames, current.renames
    first, second, names = one / "run", other / "run", between(old["METRICS"], new["METRICS"])
    out = []
    for file in ("metrics.jsonl", "eval.jsonl"):
        rows = [[steady(renamed(row, n)) for row in json_lines(f / file)] for f, n in ((first, names), (second, {}))]
        out += compare_rows(*rows, key=("step",), where=file, new=set(new["NEW_METRICS"]) - set(old["NEW_METRICS"]))
    names = between(old["RECORDS"], new["RECORDS"])
    out += compare_rows(
        [renamed(r, names) for r in records_of(first)],
        records_of(second),
        key=RECORD,
        where="rollouts",
        new=set(new["NEW_RECORDS"]) - set(old["NEW_RECORDS"]),
    )
    names = between(old["TENSORS"], new["TENSORS"])
    return out + compare_tensors(renamed_tensors(tensors_of(first), names), tensors_of(second))


def tasks_differ(one: Path, other: Path, before: Tree, current: Tree) -> list[str]:
    """Compare the task of each group that both runs recorded, and how many were admitted for the first step."""
    names = between(before.renames["RECORDS"], current.renames["RECORDS"])
    tasks = [
        {r["group_id"]: (r["task_id"], r["attempt"]) for r in records}
        for records in ([renamed(r, names) for r in records_of(one / "run")], records_of(other / "run"))
    ]
    out = [
        f"group {group}: task {task} before, {tasks[1][group]} now"
        for group, task in tasks[0].items()
        if group in tasks[1] and tasks[1][group] != task
    ]
    if not tasks[0].keys() & tasks[1].keys():
        out.append("the runs have no group in common")
    first = [metrics_of(f / "run")[0]["groups/in_flight_limit"] for f in (one, other)]
    return out + ([f"groups/in_flight_limit: {first[0]} before, {first[1]} now"] if first[0] != first[1] else [])
