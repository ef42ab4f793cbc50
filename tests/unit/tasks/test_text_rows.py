"""JSON and CSV keep the types of their files: alone, streamed, in folders, nested, compressed; and what is no row."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollover.tasks.rows import Rows, TableLocation, open_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "2024-01-31"},
    {"prompt": "b", "answer": "2024-02-01", "reward_model": {"ground_truth": "2024-01-31", "n": None}},
    {"prompt": "c", "answer": 5},
    {"prompt": "d", "answer": "007"},
    {"prompt": "e", "answer": 2**80 + 1},
    {"prompt": "2024-01-31", "answer": 1.0, "extra": [1, "1", {"day": "2024-01-31T10:00:00"}]},
    {"prompt": "f", "answer": "None", "extra": True},
    {"prompt": "g \u2028 \U0001f600", "answer": ""},
]
COLUMNS = ["prompt", "answer", "reward_model", "extra"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "\n".join(map(json.dumps, rows)) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text if path.suffix != ".json" else json.dumps(rows, indent=1))
    return path


def exactly(rows: Rows, num: int) -> list[dict[str, Any]]:
    """The rows, without the keys that are not theirs."""
    assert num == (rows.num_rows or num)
    return [{k: v for k, v in rows[i].items() if v is not None or k in ROWS[i]} for i in range(num)]


def same(found: list[dict[str, Any]]) -> None:
    assert found == ROWS and [list(map(type, row.values())) for row in found] == [
        list(map(type, row.values())) for row in ROWS
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz"])
def test_json_keeps_its_types(name: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, which would copy it to a cache: a home that cannot be written to is enough."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path / name, ROWS)
    for path in (name, f"file://{tmp_path}/{name}"):
        rows = open_rows(TableLocation(path, streaming=streaming, base_dir=tmp_path))
        same(exactly(rows, len(ROWS)))
        assert rows.columns == (["prompt", "answer"] if streaming else COLUMNS)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_json_keeps_its_types(streaming: bool, tmp_path: Path) -> None:
    write(tmp_path / "train-00000.jsonl", ROWS[:3])
    write(tmp_path / "train-00001.jsonl", ROWS[3:])
    write(tmp_path / "test-00000.jsonl", ROWS[:1])
    same(exactly(open_rows(TableLocation(str(tmp_path), streaming=streaming)), len(ROWS)))
    assert open_rows(TableLocation(str(tmp_path), split="test", streaming=streaming))[0]["answer"] == "2024-01-31"


@pytest.mark.parametrize("streaming", [False, True])
def test_values_of_a_csv_are_texts(streaming: bool, tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,n\n"a, b",007,None\n"two\nlines",2024-01-31,nan\n\nx,"say ""hi""",\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    rows = open_rows(TableLocation("a.csv", streaming=streaming, base_dir=tmp_path))
    assert [rows[i] for i in range(3)] == [
        {"prompt": "a, b", "answer": "007", "n": "None"},
        {"prompt": "two\nlines", "answer": "2024-01-31", "n": "nan"},
        {"prompt": "x", "answer": 'say "hi"', "n": ""},
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', "a.jsonl, line 3 is no JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl, line 2 is a list: a row is a JSON object"),
        ("a.jsonl", b'{"a": 1}\n"text"\n', "line 2 is a text"),
        ("a.jsonl", b'{"a": 1}\n\xff\xfe\n', "a.jsonl, line 2 is no JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, it is no JSON"),
        ("a.json", b'[{"a": 1}, 5]', "a.json, row 2 is the value 5"),
        ("a.json", b'{\n"a": 1', "a.json, it is no JSON"),
        ("a.csv", b"a,b\n1\n", "a.csv, line 2: 1 values for 2 columns (a, b): quote values with commas"),
        ("a.csv", b"a,a\n1,2\n", "a.csv, line 1: the column 'a' is there twice"),
        ("a.csv", b'a,b\n1,"2\n', "a.csv, line "),
        ("a.csv", b"a,b\n1,\xff\n", "it is no CSV"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz"),
        ("a.jsonl", b"\n \n", "has no rows"),
    ],
)
def test_what_is_no_row_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for streaming in (False, True):
        with pytest.raises(ValueError) as caught:
            open_rows(TableLocation(name, streaming=streaming, base_dir=tmp_path))
        assert message in str(caught.value) and f"tasks.sources.path = '{name}'" in str(caught.value)


def test_one_json_object_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS[5], indent=2))
    rows = open_rows(TableLocation("a.json", base_dir=tmp_path))
    assert rows.num_rows == 1 and rows[0] == ROWS[5]


def test_rows_are_read_by_number_however_many_there_are(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "n": i} for i in range(5000)])
    rows = open_rows(TableLocation("a.jsonl", base_dir=tmp_path))
    assert [rows[i]["n"] for i in (4999, 0, 2500)] == [4999, 0, 2500] and rows.num_rows == 5000
