"""JsonlSink: strict JSON, one object a line, and an exact cut on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.track.jsonl import EvalFile, JsonlSink, to_json
from rollover.track.metrics import validate
from rollover.track.tracker import Cut
from scripted import output_of


def rows(path: Path) -> list[dict]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_visible_at_once_and_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write(
            {"step": np.int64(1), "loss": float("nan"), "grad_norm": np.float32("inf"), "x": {"y": [-np.inf, 1]}}
        )
        assert rows(path) == [{"step": 1, "loss": None, "grad_norm": None, "x": {"y": [None, 1]}}]
        sink.write({"text": "ü\n\u2028"})
    assert path.read_bytes().count(b"\n") == 2


def test_check_is_called_before_anything_is_written(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m.jsonl", check=validate) as sink:
        with pytest.raises(AssertionError, match="not registered"):
            sink.write({"nonsense": 1})
        assert sink.rows() == []


def test_not_json_is_refused() -> None:
    with pytest.raises(TypeError, match="set is not JSON"):
        to_json({"x": {1}})


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 4), after=st.integers(0, 4), torn=st.binary(max_size=5))
def test_resume_has_no_duplicate_step(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, torn: bytes
) -> None:
    """Snapshot after `before` rows, crash after `after` more and a torn line, then the same steps again."""
    path = tmp_path_factory.mktemp("s") / "metrics.jsonl"
    with JsonlSink(path) as sink:
        for step in range(before):
            sink.write({"step": step})
        sink.sync()
        for step in range(before, before + after):
            sink.write({"step": step, "lost": True})
    with open(path, "ab") as file:
        file.write(torn)
    with JsonlSink(path) as sink:
        sink.truncate(Cut(before - 1))
        for step in range(before, before + after):
            sink.write({"step": step})
    assert rows(path) == [{"step": step} for step in range(before + after)]


def test_rows_names_the_file_of_a_line_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text("{}\n{\n")
    with (
        JsonlSink(tmp_path / "m.jsonl") as sink,
        pytest.raises(ValueError, match="m.jsonl has a line that is not JSON"),
    ):
        sink.rows()


FULL = """
import errno, resource, signal, sys
from pathlib import Path
from rollover.files import atomic_write_text
from rollover.track.jsonl import JsonlSink
from rollover.track.trace import PUBLISH, TraceEvent, TraceFile
from rollover.track.tracker import Cut

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
sink, trace = JsonlSink(folder / "metrics.jsonl"), TraceFile(folder / "trace.jsonl")
writers = {
    "metrics.jsonl": lambda: sink.write({"step": 1, "text": "x" * 300}),
    "trace.jsonl": lambda: trace.write([TraceEvent(PUBLISH, 0.0, version) for version in range(50)]),
    "config.json": lambda: atomic_write_text(folder / "config.json", "x" * 300),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for name, write in writers.items():
    try:
        write()
    except OSError as error:
        assert error.errno == errno.EFBIG and str(folder / name) in str(error), error
    else:
        raise AssertionError(name)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
with JsonlSink(folder / "metrics.jsonl") as again:
    again.truncate(Cut(0))
    again.write({"step": 1})
    sink.close()
    assert again.rows() == [{"step": 1}], "what the first could not write came after all"
"""


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"mean": "high"}, "'mean' is 'high'"),
        ({"seconds": [1]}, "'seconds'"),
        ({"pass@4": True}, "'pass@4'"),
        ({"ci": [0.1]}, "'ci'"),
        ({"ci": ["a", 1]}, "'ci'"),
        ({"samples": 3}, "'samples'"),
        ({"samples": [{"prompt": 1}]}, "'samples'"),
        ({"sources": [1]}, "'sources'"),
        ({"sources": {"a": {"mean": {}}}}, "'sources/a/mean'"),
        ({"settings": {"sampled": {"sources": {"b": {"ci": 1}}}}}, "'settings/sampled/sources/b/ci'"),
    ],
)
def test_an_evaluation_of_another_kind_is_refused_by_its_place(
    tmp_path: Path, damage: dict[str, Any], named: str
) -> None:
    """Not by a TypeError, when a run that has made all its steps sums it up."""
    sample = {"prompt": "p", "completion": "c", "score": None}
    part = {"mean": 0.5, "ci": [0.25, None], "pass@1": 0.5, "samples": 3, "tasks": 2}
    whole = {"step": 1, "mean": None, "ci": None, "seconds": 1.5, "samples": [sample], "sources": {"a": part}}
    with EvalFile(tmp_path / "eval.jsonl") as file:
        file.on_eval(whole)
        assert file.rows() == [whole]
        file.on_eval(whole | damage)
        with pytest.raises(ValueError, match="eval.jsonl has an evaluation whose .*: restore the file") as refused:
            file.rows()
    assert named in str(refused.value)


def test_half_a_character_is_not_worth_the_run(tmp_path: Path) -> None:
    """Data may call a source so."""
    with JsonlSink(tmp_path / "eval.jsonl") as sink:
        sink.write({"step": 1, "sources": {"half \ud800": 1.0}})
        assert sink.rows() == [{"step": 1, "sources": {"half ?": 1.0}}]


def test_full_disk_is_reported_and_the_row_never_follows(tmp_path: Path) -> None:
    """A run that is gone on with in the same process has another sink, while the first may still be alive."""
    output_of(FULL, tmp_path)
