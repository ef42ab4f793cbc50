"""What a finished run leaves for tools that keep files (track.artifacts): which files that are.

Owns what is in no artifact: checkpoints, the run's logs and settings (a tool has those as its configuration), and every
file with a credential in it.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollover.plugins.trackers.tool import secrets
from rollover.track.rollout_table import pyarrow_module

_PARTS = {
    "model": ("model",),
    "best_model": ("best_model",),
    "records": (
        "metrics.jsonl",
        "metrics.parquet",
        "eval.jsonl",
        "trace.jsonl",
        "rollouts",
        "evaluations",
    ),
}
_WEIGHTS = {".safetensors", ".bin", ".pt"}  # numbers, and gigabytes of them
_CHUNK = 1 << 22


def files_of(name: str, run: Path) -> tuple[dict[str, Path], list[str]]:
    """The files of an artifact of the run in the directory `run`, by their paths in it; and those that hold a
    credential of this environment, which are left out."""
    parts, hidden = _PARTS[name], secrets()
    root = run / parts[0] if len(parts) == 1 else run
    found = [file for part in parts for file in _files(run / part)]
    kept, left_out = {}, []
    for file in found:
        path = file.relative_to(root).as_posix()
        if file.suffix not in _WEIGHTS and (_table_holds if file.suffix == ".parquet" else _holds)(file, hidden):
            left_out.append(path)
        else:
            kept[path] = file
    return kept, left_out


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    return [place] if place.is_file() else []


def _holds(file: Path, secrets: list[str]) -> bool:
    """Whether one of these is in the file, as it is or in JSON, which is read in pieces."""
    values = [form.encode() for value in secrets for form in (value, json.dumps(value)[1:-1])]
    longest = max(map(len, values), default=0)
    before = b""
    with file.open("rb") as opened:
        while longest and (piece := opened.read(_CHUNK)):
            if any(value in before + piece for value in values):
                return True
            before = piece[-longest:]
    return False


def _table_holds(file: Path, secrets: list[str]) -> bool:
    """The same of the texts of a Parquet file, which is packed."""
    pa, parquet = pyarrow_module(), pyarrow_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            leaves = [table.schema.column(number) for number in range(len(table.schema))]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            for group in range(table.num_row_groups if texts and secrets else 0):
                said = str(table.read_row_group(group, columns=texts).to_pylist())
                if any(form in said for value in secrets for form in (value, repr(value)[1:-1])):
                    return True
        return False
    except (pa.ArrowException, ValueError):  # it is none: as any other file
        return _holds(file, secrets)
