"""What a finished run leaves for tools that keep files (track.artifacts): which files that are.

Owns what is in no artifact: checkpoints, the run's logs and settings (a tool has those as its configuration), and every
file with a credential in it.
"""

from __future__ import annotations

from pathlib import Path

from rollover.track.trackers.tool import secrets

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
    parts = _PARTS[name]
    root = run / parts[0] if len(parts) == 1 else run
    found = [file for part in parts for file in _files(run / part)]
    kept, left_out = {}, []
    for file in found:
        path = file.relative_to(root).as_posix()
        if file.suffix not in _WEIGHTS and _holds(file, [value.encode() for value in secrets()]):
            left_out.append(path)
        else:
            kept[path] = file
    return kept, left_out


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    return [place] if place.is_file() else []


def _holds(file: Path, values: list[bytes]) -> bool:
    """Whether one of these is in the file, which is read in pieces."""
    longest = max(map(len, values), default=0)
    before = b""
    with file.open("rb") as opened:
        while longest and (piece := opened.read(_CHUNK)):
            if any(value in before + piece for value in values):
                return True
            before = piece[-longest:]
    return False
