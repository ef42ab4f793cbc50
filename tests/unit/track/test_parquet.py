"""Rollouts and metrics as Parquet: the values of the JSON lines, of one schema, whole at every moment."""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from documents import ROOT
from recorded_run import HOSTILE, group, recorded, row, segment, write_run
from rollover import cli
from rollover.config import Config
from rollover.track.build import build_trackers
from rollover.track.jsonl import MetricsFile, read_rows
from rollover.track.parquet import METADATA, MetricsTable, read_columns, schema
from rollover.track.records import FORMATS, Format, RolloutRecorder, read_records, read_rollouts, step_files
from rollover.track.token_stats import KEYS
from rollover.track.tracker import Cut, RecordedGroup
from rollover.types import DropReason, Prompt, Reward, Rollout

pandas = pytest.importorskip("pandas")
parquet = pytest.importorskip("pyarrow.parquet")


def rich_groups() -> list[RecordedGroup]:
    """Records that differ as much as they may."""
    full = group(0, [1.0, None], [0, 2])
    full.rollouts[0].reward = Reward(
        1.0,
        {"acc": 1.0, "bad": math.nan},
        turns=[0.5, -2.0],
        shaping={"length": -0.25},
        texts={"pred": "7 \u2028", "note": ""},
    )
    full.rollouts[1].prompt = Prompt((9,))
    bare = group(1, [None])
    bare.rollouts[0].reward, bare.rollouts[0].stop_reason, bare.rollouts[0].segments = None, None, []
    bare.task.columns.update(deep=[1, {"x": None}], text="ü \u2028")
    strange = group(2, [0.1])
    logprobs = np.array([math.nan, -1 / 3, 1e-30], np.float32)
    strange.rollouts[0].segments[0] = replace(segment(0, 3), logprobs=logprobs)
    of_env = group(3, [0.0])
    of_env.rollouts[0].segments += [segment(0, 2, trainable=False, ended=False)]
    texts = [*HOSTILE.values(), ""]
    all_of = (full, bare, strange, of_env)
    told = []
    for i, of in enumerate(all_of):
        count = len(of.rollouts)
        completions = [texts[(3 * i + j) % len(texts)] for j in range(count)]
        told.append(RecordedGroup(of, completions, [math.inf, None][:count]))
    return [*told, recorded(group(4, [0.5]), DropReason.STALE)]


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Comparable: log-probs as the float32 that they are, nan where JSON has null."""
    values = [math.nan if x is None else x for x in record["logprobs"]]
    return record | {"logprobs": np.array(values, np.float32).tobytes()}


def facts(rollout: Rollout) -> Any:
    segments = [(s.token_ids.tolist(), s.logprobs.tobytes(), s.policy_version, s.sampling, s.stop_reason, s.trainable)
                for s in rollout.segments]  # fmt: skip
    return rollout.rollout_id, rollout.state, rollout.stop_reason, repr(rollout.reward), rollout.prompt, segments


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    for name in FORMATS:
        RolloutRecorder(tmp_path / name, formats=[name]).write(1, rich_groups())
    lines, table = (list(map(plain, read_records(tmp_path / name))) for name in FORMATS)
    assert len(lines) == 6
    for line, of_table in zip(lines, table, strict=True):
        assert line == of_table
    of_lines, of_table = ([s for s in read_rollouts(tmp_path / name, include_dropped=True)] for name in FORMATS)
    assert [[list(map(facts, g.rollouts)) for g in s] for s in of_lines] == [
        [list(map(facts, g.rollouts)) for g in s] for s in of_table
    ]
    for one, other in zip(of_lines[0], of_table[0], strict=True):
        assert repr(one.task) == repr(other.task)


def test_every_file_has_the_schema_of_the_docs(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path, formats=["parquet"])
    recorder.write(1, rich_groups())
    recorder.write(2, [recorded(group(9, [None]))])
    page = (ROOT / "docs" / "parquet.md").read_text(encoding="utf-8").partition("## Schema")[2]
    listed = {name: kind for names, kind in re.findall(r"^\| (`.*?) \| (.*?) \|$", page, re.MULTILINE)
              for name in re.findall(r"`(\w+)`", names)}  # fmt: skip
    for name in ("step-000001.parquet", "step-000002.parquet"):
        found = parquet.ParquetFile(tmp_path / name).schema_arrow
        kinds = {field.name: re.sub(r"(item|element): | \('\w+'\)", "", str(field.type)) for field in found}
        assert kinds == listed
        assert found.metadata[METADATA] == b"rollouts/5"
    assert list(listed) == schema().names


def test_pandas_reads_a_folder_of_steps(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, formats=["parquet"])
    frame = pandas.read_parquet(tmp_path / "rollouts")
    records = list(read_records(tmp_path / "rollouts"))
    assert frame["rollout_id"].tolist() == [r["rollout_id"] for r in records]
    assert frame["score"].mean() == pytest.approx(np.mean([r["score"] for r in records if r["score"] is not None]))
    assert [ids.tolist() for ids in frame["token_ids"]] == [r["token_ids"] for r in records]
    assert frame["segments"][8][1]["policy_version"] == 1 and set(frame["outcome"]) == {"trained", "dropped:stale"}


def test_a_resumed_run_has_no_rollout_twice(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path, formats=FORMATS)
    for step in (1, 2, 3):
        recorder.write(step, [recorded(group(2 * step, [1.0])), recorded(group(2 * step + 1, [0.5]), DropReason.STALE)])
    (tmp_path / ".step-000004.parquet.tmp-77").write_bytes(b"half")
    recorder.truncate(Cut(2, held={5}))
    assert sorted(os.listdir(tmp_path)) == [f"step-00000{n}.{of}" for n in (1, 2) for of in ("jsonl", "parquet")]
    recorder.write(3, [recorded(group(5, [0.5]))])
    assert [r["group_id"] for r in read_records(tmp_path)] == [2, 3, 4, 5]
    lines = [row["group_id"] for n in (1, 2, 3) for row in read_rows(tmp_path / f"step-00000{n}.jsonl")]
    assert lines == [2, 3, 4, 5]


@pytest.mark.parametrize(("before", "after"), [("jsonl", "parquet"), ("parquet", "jsonl")])
def test_a_step_goes_on_in_the_format_that_it_was_begun_in(tmp_path: Path, before: Format, after: Format) -> None:
    RolloutRecorder(tmp_path, formats=[before]).write(1, [recorded(group(0, [1.0]))])
    recorder = RolloutRecorder(tmp_path, formats=[after])
    recorder.write(1, [recorded(group(1, [1.0]))])
    recorder.write(2, [recorded(group(2, [1.0]))])
    assert [path.suffix for _, path in step_files(tmp_path)] == [f".{before}", f".{after}"]
    assert [r["group_id"] for r in read_records(tmp_path)] == [0, 1, 2]


def test_what_is_no_file_of_rollouts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="step-000001.parquet: not recorded rollouts"):
        list(read_records(tmp_path))
    newer = schema().with_metadata({METADATA: b"rollouts/6"}).empty_table()
    parquet.write_table(newer, path)
    with pytest.raises(ValueError, match="its schema is rollouts/6, and rollouts/5 is what this version reads"):
        list(read_records(tmp_path))


def test_a_file_of_the_first_schema_is_read_and_extended(tmp_path: Path) -> None:
    """A run that an earlier version began, and this one resumes within the step."""
    recorder = RolloutRecorder(tmp_path, formats=["parquet"])
    path = recorder.write(1, rich_groups())
    whole = parquet.read_table(path)
    kept = [
        name
        for name in whole.column_names
        if name not in ("credit", "texts", "media", "later_media") and name not in KEYS
    ]
    parquet.write_table(whole.select(kept).replace_schema_metadata({METADATA: b"rollouts/1"}), path)
    before = list(map(plain, read_records(tmp_path)))
    assert len(before) == 6 and all(of["credit"] is None and of["loss_mask"] is None for of in before)
    assert read_columns(path, ("step", "score"))["step"] == [1] * 6
    recorder.write(1, [recorded(group(20, [1.0]))])
    assert [of["rollout_id"] for of in read_records(tmp_path)] == [*(of["rollout_id"] for of in before), "20-0"]
    assert parquet.ParquetFile(path).schema_arrow.metadata[METADATA] == b"rollouts/5"


# ---- metrics


def told(path: Path) -> list[dict[str, Any]]:
    """The rows of the table without what is null."""
    return [{k: v for k, v in of.items() if v is not None} for of in parquet.read_table(path).to_pylist()]


def test_the_table_has_the_values_of_the_lines(tmp_path: Path) -> None:
    lines, table = tmp_path / "metrics.jsonl", MetricsTable(tmp_path / "metrics.parquet", tmp_path / "metrics.jsonl")
    rows = [row(1), {**row(2, entropy=1 / 3), "reward/mean": None}, row(3, **{"own/late": 2.0})]
    with MetricsFile(lines) as file:
        for of in rows:
            file.write(of)  # type: ignore[arg-type]
            table.on_step(of)  # type: ignore[arg-type]
    table.close()
    assert told(table.path) == [{k: v for k, v in of.items() if v is not None} for of in read_rows(lines)]
    frame = pandas.read_parquet(table.path)
    assert frame["step"].tolist() == [1, 2, 3] and str(frame["step"].dtype) == "int64"
    assert frame["own/late"].isna().tolist() == [True, True, False]
    assert parquet.ParquetFile(table.path).schema_arrow.metadata[METADATA] == b"metrics/1"


def test_it_is_cut_as_its_lines_are(tmp_path: Path) -> None:
    lines = tmp_path / "metrics.jsonl"
    table = MetricsTable(tmp_path / "metrics.parquet", lines)
    with MetricsFile(lines) as file:
        for step in (1, 2, 3):
            file.write(row(step))
            table.on_step(row(step))
        for step, left in ((2, [1, 2]), (-1, [])):
            file.truncate(Cut(step))
            table.truncate(Cut(step))
            assert table.path.exists() == bool(left)
            assert not left or [of["step"] for of in told(table.path)] == left
        table.close()
        assert not table.path.exists()


def test_after_a_kill_the_next_start_makes_it_whole(tmp_path: Path) -> None:
    lines = tmp_path / "metrics.jsonl"
    with MetricsFile(lines) as file:
        for step in (1, 2):
            file.write(row(step))
    MetricsTable(tmp_path / "metrics.parquet", lines).truncate(Cut(2))
    assert [of["step"] for of in told(tmp_path / "metrics.parquet")] == [1, 2]


def test_writing_takes_a_five_hundredth_of_the_time_at_most(tmp_path: Path) -> None:
    """A clock that each look moves on: a write, between two looks, takes one second."""
    seconds, looks = [0.0], []

    def clock() -> float:
        looks.append(seconds[0])
        seconds[0] += 1.0
        return seconds[0]

    table = MetricsTable(tmp_path / "metrics.parquet", tmp_path / "metrics.jsonl", clock)
    writes = []
    for step in range(1, 501):
        seconds[0] += 10.0  # the step
        table.on_step(row(step))
        if told(table.path)[-1]["step"] == step:
            writes.append(step)
    assert writes[0] == 1 and 9 <= len(writes) <= 12  # some 500 of 5,500 seconds apart
    table.close()
    assert told(table.path)[-1]["step"] == 500


# ---- through the configuration


@pytest.mark.parametrize(
    ("formats", "written"),
    [
        (["jsonl"], {"rollouts/step-000001.jsonl"}),
        (["parquet"], {"rollouts/step-000001.parquet", "metrics.parquet"}),
        (["jsonl", "parquet"], {"rollouts/step-000001.jsonl", "rollouts/step-000001.parquet", "metrics.parquet"}),
    ],
)
def test_the_option_says_what_is_written(tmp_path: Path, formats: list[str], written: set[str]) -> None:
    config = Config.model_validate({"track": {"format": formats, "live": "off", "trace": False}})
    with build_trackers(config, tmp_path) as trackers:
        trackers.truncate(Cut(-1))
        trackers.on_groups(1, [recorded(group(0, [1.0]))])
        trackers.on_step(row(1))
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {"metrics.jsonl", "eval.jsonl"} == written
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1]


def test_without_pyarrow_the_run_says_what_to_install(tmp_path: Path, monkeypatch, capsys) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    words = ["train", str(recipe), '--track.format=["parquet"]', f"--run.dir={tmp_path / 'run'}"]
    assert cli.main(words) == 2
    assert "track.format: Parquet needs the package pyarrow" in (err := capsys.readouterr().err)
    assert "pip install 'rollover[parquet]'" in err
