"""RolloutIndex: what is known of all rollouts, and each of them again, of either format."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recorded_run import group, recorded, write_run
from rollover.plugins.dashboard.rollout_index import RolloutIndex, rollout_id, staleness, versions
from rollover.plugins.dashboard.rollout_query import RolloutFilter, page
from rollover.plugins.dashboard.run_statistics import staleness_map
from rollover.track.records import Format, RolloutRecorder, read_records
from rollover.track.tracker import Cut
from rollover.types import DropReason

EITHER = pytest.mark.parametrize("formats", [("jsonl",), ("parquet",), ("jsonl", "parquet")], ids="-".join)


@EITHER
def test_an_entry_says_what_its_record_says(tmp_path: Path, formats: tuple[Format, ...]) -> None:
    folder = write_run(tmp_path, formats=formats) / "rollouts"
    index, records = RolloutIndex(folder), list(read_records(folder))
    entries = index.entries()
    assert len(entries) == len(records) == 15
    for entry, record in zip(entries, records, strict=True):
        assert index.record(entry) == record
        assert rollout_id(entry) == record["rollout_id"]
        for name in ("step", "group_id", "sibling", "num_tokens"):
            assert entry[name] == record[name]
        assert (math.nan if record["score"] is None else record["score"]) == pytest.approx(entry["score"], nan_ok=True)
        assert index.word(entry["outcome"]) == record["outcome"] and index.word(entry["source"]) == "sums"
        of = [s["policy_version"] for s in record["segments"]]
        assert [entry["segments"], entry["oldest"], entry["newest"]] == [len(of), min(of), max(of)]
    assert list(staleness(entries)) == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 2]


@EITHER
def test_files_that_come_grow_and_go_are_seen(tmp_path: Path, formats: tuple[Format, ...]) -> None:
    index, recorder = RolloutIndex(tmp_path / "rollouts"), RolloutRecorder(tmp_path / "rollouts", formats=formats)

    def ids() -> list[int]:
        return [int(of) for of in index.entries()["group_id"]]

    assert ids() == []
    recorder.write(1, [recorded(group(0, [1.0]))])
    assert ids() == [0]
    recorder.write(1, [recorded(group(1, [1.0]), DropReason.STALE)])
    recorder.write(2, [recorded(group(2, [1.0])), recorded(group(3, [1.0]))])
    assert ids() == [0, 1, 2, 3]
    recorder.truncate(Cut(1, held={1}))
    assert ids() == [0]
    recorder.write(2, [recorded(group(4, [0.5]))])
    assert ids() == [0, 4]
    assert [index.record(entry)["score"] for entry in index.entries()] == [1.0, 0.5]


@EITHER
def test_many_records_are_read_in_the_order_that_is_wanted(tmp_path: Path, formats: tuple[Format, ...]) -> None:
    recorder = RolloutRecorder(tmp_path, formats=formats)
    for step in (1, 2):
        recorder.write(step, [recorded(group(100 * step + i, [1.0, 0.5])) for i in range(50)])
    index = RolloutIndex(tmp_path)
    entries = index.entries()
    chosen = entries[[150, 3, 99, 101, 0, 3, 199, 70]]  # of several files, and row groups
    assert [record["rollout_id"] for record in index.records_of(chosen)] == [rollout_id(entry) for entry in chosen]
    assert index.records_of(chosen)[3] == index.record(entries[101])
    assert index.records_of(entries[:0]) == []


def test_versions_before_the_first_are_versions(tmp_path: Path) -> None:
    """With checkpoint.lost_steps = "roll_back" they are below 0; nothing sampled has none."""
    unsampled = group(2, [None])
    unsampled.rollouts[0].segments, unsampled.rollouts[0].stop_reason = [], None
    RolloutRecorder(tmp_path).write(1, [recorded(group(1, [1.0], [-1, 0])), recorded(unsampled, DropReason.STALE)])
    index = RolloutIndex(tmp_path)
    entries = index.entries()
    assert staleness(entries).tolist() == [1, 0] and index.word(entries[1]["stop"]) == "unfinished"
    assert [math.isnan(of) for of in versions(entries, "oldest")] == [False, True]
    assert staleness_map(index)["counts"] == [[0], [1]]
    told = page(index, RolloutFilter.from_query({"version_from": "-9"}))["rows"]
    assert [(row["oldest"], row["newest"]) for row in told] == [(-1, 0)]
    (row,) = page(index, RolloutFilter.from_query({"stop": "unfinished"}))["rows"]
    assert (row["oldest"], row["newest"], row["stop"]) == (None, None, "unfinished")
    assert [row["id"] for row in page(index, RolloutFilter.from_query({"versions_from": "2"}))["rows"]] == ["1-0"]


def test_a_name_among_extras_that_is_the_one_of_the_tokens(tmp_path: Path) -> None:
    """The short values of a line end where its tokens begin; what only looks like that is read whole."""
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [1.0]), text='x", "token_ids": [1')])
    line = path.read_text().replace('"role": "user", ', '"role": "user", "token_ids": [1, 2], ')
    path.write_text(line)
    index = RolloutIndex(tmp_path)
    (entry,) = index.entries()
    assert entry["num_tokens"] == 3 and index.record(entry)["completion"] == 'x", "token_ids": [1 0'


def test_half_a_line_at_the_end_is_no_rollout(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [1.0, 0.0]))])
    path.write_bytes(path.read_bytes()[:-40])
    index = RolloutIndex(tmp_path)
    assert len(index.entries()) == 1 and len(list(read_records(tmp_path))) == 1


def test_a_damaged_line_names_file_and_line(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [1.0]))])
    path.write_bytes(path.read_bytes() + b'{"step": 1}\n')
    with pytest.raises(ValueError, match=r"step-000001\.jsonl:2: not a recorded rollout"):
        RolloutIndex(tmp_path).entries()


def test_a_rollout_whose_file_is_gone_is_said(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [1.0]))])
    index = RolloutIndex(tmp_path)
    (entry,) = index.entries()
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read any more"):
        index.record(entry)


@EITHER
def test_index_without_patience_reads_one_file(tmp_path: Path, formats: tuple[Format, ...]) -> None:
    folder = write_run(tmp_path, steps=4, formats=formats) / "rollouts"
    index = RolloutIndex(folder)
    index.patience = 0.0
    told = [(sorted(set(index.entries()["step"].tolist())), index.share) for _ in range(5)]
    assert told == [([1], 0.25), ([1, 2], 0.5), ([1, 2, 3], 0.75), ([1, 2, 3, 4], 1.0), ([1, 2, 3, 4], 1.0)]
    assert str(index.entries()) == str(RolloutIndex(folder).entries())  # nan is not nan
    RolloutRecorder(folder, formats=formats).write(2, [recorded(group(70, [1.0]))])
    assert 70 in index.entries()["group_id"], "what changed is seen at once"
    impatient = RolloutIndex(folder)
    impatient.patience = 0.0
    assert set(impatient.entries()["step"]) == {1}
    impatient.look_at_step(4)
    assert set(impatient.entries()["step"]) == {1, 2, 4}, "that one, and one more as at each look"
    assert set(impatient.entries()["step"]) == {1, 2, 3, 4} and impatient.share == 1
