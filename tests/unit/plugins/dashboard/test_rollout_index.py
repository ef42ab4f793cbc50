"""Rollouts on the page: index, queries, episodes, answers, tokens."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from recorded_run import HOSTILE, group, recorded, write_run, written
from rollover.plugins.dashboard.eval_answers import MOST_EVALUATIONS, answer, answers, lowest
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.rollout_detail import RunTokenTexts, split_text
from rollover.plugins.dashboard.rollout_index import RolloutIndex, rollout_id, staleness, versions
from rollover.plugins.dashboard.rollout_query import RolloutFilter, choices, episode, page
from rollover.plugins.dashboard.run_data import RunData
from rollover.plugins.dashboard.run_statistics import staleness_map
from rollover.track.answers import Answer, write_answers
from rollover.track.records import Format, RolloutRecorder, read_records
from rollover.track.tracker import Cut
from rollover.types import DropReason, Group, Rollout

# RolloutIndex: what is known of all rollouts, and each of them again, of either format


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


# Filters, order, pages and search over rollouts


@pytest.fixture(params=["jsonl", "parquet"])
def of_format(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture
def index(tmp_path: Path, of_format: Format) -> RolloutIndex:
    """Three steps: groups 3 and 4 of two rollouts, 5 of one that is dropped; then 6, 7, 8 and 9, 10, 11."""
    return RolloutIndex(write_run(tmp_path, formats=(of_format,)) / "rollouts")


def found(index: RolloutIndex, **query: Any) -> list[str]:
    return [row["id"] for row in page(index, RolloutFilter.from_query({k: str(v) for k, v in query.items()}))["rows"]]


ALL = "3-0 3-1 4-0 4-1 5-0 6-0 6-1 7-0 7-1 8-0 9-0 9-1 10-0 10-1 11-0".split()


def test_a_name_may_have_a_comma(tmp_path: Path, of_format: Format) -> None:
    """As the file of a data set may: in a list it is %2C."""
    recorder = RolloutRecorder(tmp_path / "own", formats=(of_format,))
    for step, source in enumerate(("math, easy", "50%", "sums"), start=1):
        of = group(step, [1.0])
        of.rollouts[0].task = of.task = replace(of.task, source=source)
        recorder.write(step, [recorded(of)])
    own = RolloutIndex(tmp_path / "own")
    assert found(own, source="math%2C easy") == ["1-0"] and found(own, source="math%2C easy,50%25") == ["1-0", "2-0"]
    assert found(own, source="math, easy") == []


def test_without_a_filter_all_in_the_order_of_their_leaving(index: RolloutIndex) -> None:
    assert found(index) == ALL and found(index, order="down") == ALL[::-1]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"score_from": 0.5}, ["3-0", "4-0", "6-0", "7-0", "9-0", "10-0"]),
        ({"score_from": 0.2, "score_to": 0.5}, ["4-0", "5-0", "7-0", "8-0", "10-0", "11-0"]),
        ({"scored": "no"}, ["4-1", "7-1", "10-1"]),
        ({"scored": "yes", "step_to": 1}, ["3-0", "3-1", "4-0", "5-0"]),
        ({"outcome": "dropped:stale"}, ["5-0", "8-0", "11-0"]),
        ({"outcome": "dropped:stale,trained", "step_from": 3}, ALL[10:]),
        ({"outcome": "dropped:unknown"}, []),
        ({"source": "sums", "stop": "eos", "step_from": 2, "step_to": 2}, ALL[5:10]),
        ({"versions_from": 2}, ["7-0", "7-1", "10-0", "10-1"]),
        ({"staleness_from": 2}, ["11-0"]),
        ({"tokens_from": 6}, ["7-0", "7-1", "10-0", "10-1", "11-0"]),
        ({"group_from": 7, "group_to": 7}, ["7-0", "7-1"]),
        ({"sort": "score", "order": "down", "step_to": 1}, ["3-0", "4-0", "5-0", "3-1", "4-1"]),
        ({"sort": "score", "step_to": 1}, ["3-1", "5-0", "4-0", "3-0", "4-1"]),
        ({"sort": "tokens", "order": "down", "limit": 2}, ["7-0", "7-1"]),
        ({"score_from": ""}, ALL),
    ],
)  # fmt: skip
def test_filters_and_order(index: RolloutIndex, query: Mapping[str, Any], expected: list[str]) -> None:
    assert found(index, **query) == expected


def test_pages_join_to_the_whole(index: RolloutIndex) -> None:
    shown, offset = [], 0
    while offset is not None:
        of = page(index, RolloutFilter(offset=offset, limit=4))
        assert (of["total"], of["passed"], of["searched"]) == (15, 15, None) and len(of["rows"]) <= 4
        shown += [row["id"] for row in of["rows"]]
        offset = of["next"]
    assert shown == ALL


def test_a_row_says_what_a_list_shows(index: RolloutIndex) -> None:
    (row,) = page(index, RolloutFilter.from_query({"step_from": "2", "text": "7-0"}))["rows"]
    assert row == {
        "id": "7-0", "step": 2, "group": 7, "sibling": 0, "contexts": 1, "score": 0.5, "advantage": 0.25,
        "tokens": 6, "segments": 2, "oldest": 0, "newest": 1, "staleness": 1, "outcome": "trained", "source": "sums",
        "stop": "eos", "asked": "7 + 1?", "answered": "the answer 0",
    }  # fmt: skip


def test_a_text_is_found_in_answer_prompt_and_names(index: RolloutIndex) -> None:
    assert found(index, text="ANSWER 1") == ["3-1", "4-1", "6-1", "7-1", "9-1", "10-1"]
    assert found(index, text="10 + 1") == ["10-0", "10-1"]  # a prompt is its whole group's
    assert found(index, text="task-11") == ["11-0"]
    assert found(index, text="user") == [] and found(index, text="eos") == []
    assert found(index, text="answer", score_from=0.9) == ["3-0", "6-0", "9-0"]
    assert found(index, text="answer", sort="score", order="down", limit=2) == ["3-0", "6-0"]


def test_letters_of_any_alphabet_are_found_in_either_case(tmp_path: Path, of_format: Format) -> None:
    recorder = RolloutRecorder(tmp_path / "own", formats=(of_format,))
    recorder.write(1, [recorded(group(0, [1.0]), text="l'\u00e9cole \u0416"), recorded(group(1, [1.0]), text="ecole")])
    own = RolloutIndex(tmp_path / "own")
    for text in ("\u00c9COLE", "\u00e9Cole", "\u0436"):
        assert found(own, text=text) == ["0-0"], text
    assert found(own, text="ECOLE") == ["1-0"]


def test_a_search_whose_time_is_up_goes_on_where_it_stopped(tmp_path: Path, of_format: Format) -> None:
    recorder = RolloutRecorder(tmp_path, formats=(of_format,))
    many = [group(number, [0.0] * 1200) for number in range(2)]
    recorder.write(1, [recorded(of, text="seldom" if of.group_id else "often") for of in many])
    index, clock = RolloutIndex(tmp_path), iter(float(second) for second in range(1000))
    searched, shown, offset = [], [], 0
    while offset is not None:
        of = page(index, RolloutFilter(text="seldom 1199", offset=offset), search_s=0.5, clock=lambda: next(clock))
        searched.append(of["searched"])
        shown += [row["id"] for row in of["rows"]]
        offset = of["next"]
    assert searched == [1000, 1000, 400] and shown == ["1-1199"]


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_texts_are_found_as_they_are(tmp_path: Path, of_format: Format, name: str) -> None:
    recorder = RolloutRecorder(tmp_path, formats=(of_format,))
    recorder.write(1, [recorded(group(0, [1.0, 0.0]), DropReason.STALE, text=HOSTILE[name]), recorded(group(1, [1.0]))])
    index, wanted = RolloutIndex(tmp_path), HOSTILE[name][:60]
    assert found(index, text=wanted) == ["0-0", "0-1"]  # half a surrogate is a question mark, asked for and recorded
    (row, *_) = page(index, RolloutFilter())["rows"]
    assert len(row["answered"]) <= 200


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"socre_from": "1"}, "socre_from: there is no such filter"),
        ({"score_from": "much"}, "score_from: 'much' is not a number"),
        ({"score_from": "nan"}, "score_from: 'nan' is not a number"),
        ({"sort": "beauty"}, "sort: 'beauty' is not one of step, score"),
        ({"order": "sideways"}, "order: 'sideways' is neither up nor down"),
        ({"scored": "maybe"}, "scored: 'maybe' is neither yes nor no"),
        ({"limit": "501"}, "limit: 501 is more than 500"),
        ({"offset": "-1"}, "offset: '-1' is not a number from 0"),
    ],
)
def test_what_cannot_be_meant_is_named(query: Mapping[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RolloutFilter.from_query(query)


def test_what_there_is_to_choose_from(index: RolloutIndex) -> None:
    of = choices(index)
    assert of["total"] == 15 and of["words"]["outcome"] == {"trained": 12, "dropped:stale": 3}
    assert of["words"]["source"] == {"sums": 15} and of["words"]["stop"] == {"eos": 15}
    assert of["numbers"]["step"] == [1, 3] and of["numbers"]["score"] == [0, 1] and of["numbers"]["tokens"] == [3, 6]


def test_nothing_recorded_is_no_error(tmp_path: Path) -> None:
    index = RolloutIndex(tmp_path / "rollouts")
    assert page(index, RolloutFilter(text="x"))["rows"] == [] and choices(index)["total"] == 0


# Episodes: all contexts of one, in their order, and which rollouts of a list belong to one of several


def agents(group_id: int) -> Group:
    """Episode 0 of a solver's two contexts and a judge's one, episode 1 of one rollout."""
    of = group(group_id, [1.0, 0.5, 0.0, 1.0])
    places = [(0, 0, 0, "solver"), (0, 0, 1, "solver"), (0, 1, 0, "judge"), (1, 0, 0, "solver")]
    of.rollouts = [
        Rollout(
            group_id, sibling, one.task, one.segments, one.state, one.stop_reason, one.reward, role=role,
            trajectory=trajectory, context=context,
        )
        for one, (sibling, trajectory, context, role) in zip(of.rollouts, places, strict=True)
    ]  # fmt: skip
    return of


@pytest.mark.parametrize("of_format", ["jsonl", "parquet"])
def test_the_contexts_of_an_episode_in_order(tmp_path: Path, of_format: Format) -> None:
    folder = write_run(tmp_path, formats=(of_format,)) / "rollouts"
    RolloutRecorder(folder, formats=(of_format,)).write(4, [recorded(agents(50)), recorded(agents(51))])
    index = RolloutIndex(folder)
    told = episode(index, 4, 50, 0)
    assert (told["of"], told["step"], told["group"], told["sibling"]) == (3, 4, 50, 0)
    assert [(of["id"], of["role"], of["trajectory"], of["context"], of["score"]) for of in told["contexts"]] == [
        ("50-0", "solver", 0, 0, 1), ("50-0.0.1", "solver", 0, 1, 0.5), ("50-0.1.0", "judge", 1, 0, 0),
    ]  # fmt: skip
    assert told["contexts"][1]["answered"] == "the answer 1" and "50 + 1" in told["contexts"][0]["asked"]
    rows = page(index, RolloutFilter.from_query({"step_from": "4", "group_to": "50"}))["rows"]
    assert [(row["id"], row["contexts"]) for row in rows] == [
        ("50-0", 3), ("50-0.0.1", 3), ("50-0.1.0", 3), ("50-1", 1)
    ]  # fmt: skip
    only = page(index, RolloutFilter.from_query({"group_from": "50", "group_to": "50", "sibling_from": "1"}))
    assert [row["id"] for row in only["rows"]] == ["50-1"]


def test_what_is_asked_wrongly_is_said(tmp_path: Path) -> None:
    data = RunData(write_run(tmp_path), patience_s=0.0)
    assert data.answer("episode", {"step": "3", "group": "9", "sibling": "1"})["of"] == 1
    with pytest.raises(KeyError, match="no episode 9-7 left the run with step 3"):
        data.answer("episode", {"step": "3", "group": "9", "sibling": "7"})
    with pytest.raises(ValueError, match="give step, group and sibling"):
        data.answer("episode", {"step": "3"})


# Answers of evaluations: pages of those that are wanted, and one whole with what the same task got before


def of_task(task: int, sibling: int, score: float | None, text: str = "seven", setting: str = "") -> Answer:
    return Answer(
        f"task-{task}", sibling, "sums", None, "7", "eos", 3 + task, score, None if score is not None else "it raised",
        f"What is {task}?", text, setting=setting,
    )  # fmt: skip


def evaluated(run: Path, step: int, *of: Answer) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    write_answers(run / "evaluations" / f"step-{step:06d}.jsonl", of)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Evaluated after steps 0 and 2, the second time in two settings."""
    write_run(tmp_path)
    evaluated(tmp_path, 0, of_task(0, 0, 0.0), of_task(0, 1, 1.0), of_task(1, 0, 0.0))
    evaluated(
        tmp_path, 2, of_task(0, 0, 1.0), of_task(0, 1, 1.0, "EIGHT or so"), of_task(1, 0, None),
        of_task(1, 0, 0.25, setting="sampled"),
    )  # fmt: skip
    return tmp_path


def places(run: Path, **query: Any) -> list[int]:
    return [row["place"] for row in answers(run, {key: str(value) for key, value in query.items()})["rows"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"text": "eight"}, [1]),
        ({"text": "WHAT IS 1"}, [2, 3]),
        ({"text": "no such"}, []),
        ({"score_from": 0.5}, [0, 1]),
        ({"score_to": 0.5}, [3]),
        ({"scored": "no"}, [2]),
        ({"setting": "sampled"}, [3]),
        ({"setting": "[eval]"}, [0, 1, 2]),
        ({"sort": "score"}, [3, 0, 1, 2]),
        ({"sort": "score", "order": "down"}, [0, 1, 3, 2]),
        ({"sort": "tokens", "order": "down"}, [2, 3, 0, 1]),
        ({"order": "down"}, [3, 2, 1, 0]),
        ({"step": 0}, [0, 1, 2]),
        ({"offset": 1, "limit": 2}, [1, 2]),
        ({"score_from": ""}, [0, 1, 2, 3]),
    ],
)
def test_answers_are_filtered_and_ordered(run: Path, query: dict[str, Any], expected: list[int]) -> None:
    assert places(run, **query) == expected


def test_a_page_says_what_there_is(run: Path) -> None:
    told = answers(run, {"limit": "2", "scored": "yes"})
    assert (told["steps"], told["step"], told["settings"]) == ([0, 2], 2, ["", "sampled"])
    assert (told["of"], told["passed"], told["next"]) == (4, 3, 2)
    assert told["rows"][1] == {
        "place": 1, "task": "task-0", "sibling": 1, "source": "sums", "setting": "", "score": 1, "tokens": 3,
        "stop": "eos", "asked": "What is 0?", "answered": "EIGHT or so", "expected": "7", "error": None,
    }  # fmt: skip
    assert answers(run, {"offset": "2", "limit": "2"})["next"] is None


def test_an_answer_with_what_its_task_got_in_other_evaluations(run: Path) -> None:
    told = answer(run, {"step": "2", "place": "1"})
    assert told["answer"] == "EIGHT or so" and told["prompt"] == "What is 0?" and told["same_task"] == [0, 1]
    assert told["over"] == [{"step": 0, "mean": 0.5, "count": 2}, {"step": 2, "mean": 1, "count": 2}]
    assert answer(run, {"place": "3"})["over"] == [{"step": 2, "mean": 0.25, "count": 1}], "of its setting alone"


def test_of_many_evaluations_the_first_and_the_newest_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3, 40):
        evaluated(run, step, of_task(0, 0, 1.0))
    told = answer(run, {"step": "20", "place": "0"})
    assert [of["step"] for of in told["over"]] == [0, 20, *range(40 - MOST_EVALUATIONS, 40)]


@pytest.mark.parametrize(
    ("query", "error", "says"),
    [
        ({"step": "1"}, KeyError, "no answers were recorded of an evaluation after step 1"),
        ({"colour": "red"}, ValueError, "colour: there is no such filter"),
        ({"score_from": "low"}, ValueError, "score_from: 'low' is not a number"),
        ({"limit": "100000"}, ValueError, "limit: 100000 is more than 500"),
        ({"sort": "colour"}, ValueError, "sort: 'colour' is not one of"),
        ({"order": "sideways"}, ValueError, "order: 'sideways' is neither"),
    ],
)
def test_what_cannot_be_meant_is_said(run: Path, query: dict[str, str], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        answers(run, query)


def test_a_run_without_evaluations_has_no_answers(tmp_path: Path) -> None:
    assert answers(tmp_path, {})["steps"] == [] and list(lowest(tmp_path)) == []
    with pytest.raises(KeyError):
        answer(tmp_path, {"place": "0"})


def test_report_of_a_run_with_a_damaged_file(run: Path) -> None:
    (run / "evaluations" / "step-000002.jsonl").write_text("no answer\n")
    with pytest.raises(ValueError, match="no JSON"):
        RunData(run).answer("answers", {})
    assert written(make_report([RunData(run)]))["runs"][0]["evaluated"]["steps"] == []


def test_a_report_has_the_lowest_of_the_newest_evaluation(run: Path) -> None:
    told = written(make_report([RunData(run)]))["runs"][0]["evaluated"]
    assert [row["place"] for row in told["rows"]] == [3, 0, 1, 2] and told["of"] == 4 and told["steps"] == [0, 2]
    assert told["whole"]["1"]["answer"] == "EIGHT or so" and told["whole"]["1"]["same_task"] == [0, 1]


# What each token says


TEXT = "naïve 😀 日本語\n\ttab <|end|> \u202eabc"


def by_bytes(ids: Sequence[int]) -> str:
    """A tokenizer of 256 tokens, one a byte."""
    return bytes(ids).decode("utf-8", "replace")


def test_tokens_together_are_the_text() -> None:
    told = split_text(by_bytes, list(TEXT.encode()))
    assert "".join(told) == TEXT and len(told) == len(TEXT.encode())
    assert "😀" in told and told[told.index("😀") - 3 : told.index("😀")] == ["", "", ""]


def test_bytes_that_never_become_a_character_are_told_as_such() -> None:
    assert "".join(split_text(by_bytes, [65, 0xF0, 0x9F])) == by_bytes([65, 0xF0, 0x9F])
    assert "".join(split_text(by_bytes, [])) == ""


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_bytes_are_nothing_after_them_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(256) for _ in range(60)] + list(b" the end")
    assert "".join(split_text(by_bytes, ids)).endswith("the end") and len(split_text(by_bytes, ids)) == len(ids)


@pytest.mark.parametrize("ids", [[0x9F] * 400, [300] * 400, [0xF0] * 400], ids=["inside", "unknown", "begins"])
def test_what_is_no_character_takes_a_time_of_its_length(ids: list[int]) -> None:
    """As a collapsed policy may write it."""
    decoded = 0

    def decode(some: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return by_bytes([of for of in some if of < 256])

    whole = [*ids, *"a😀b".encode()]
    told = split_text(decode, whole)
    assert "".join(told) == by_bytes([of for of in whole if of < 256]) and len(told) == len(whole)
    assert told[-1] == "b" and "😀" in told[-2]
    assert decoded < 60 * len(whole)


@pytest.mark.parametrize("folder", ["", "model"])
def test_spaces_before_words_are_told_with_them(tmp_path: Path, folder: str) -> None:
    vocabulary = {"\u2581one": 0, "\u2581two": 1, "x": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Metaspace()
    run = write_run(tmp_path)
    (run / "model").mkdir()
    tokenizer.save(str(run / folder / "tokenizer.json"))
    assert RunTokenTexts(IndexedRun(run))([0, 1, 2]) == ["one", " two", "x"]


def test_a_run_whose_tokenizer_is_not_here_or_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert RunTokenTexts(IndexedRun(run))([0, 1]) is None
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text("no tokenizer")
    assert RunTokenTexts(IndexedRun(run))([0, 1]) is None
    (run / "config.resolved.json").write_text(json.dumps({"model": {"path": "nobody/has-this-model-here"}}))
    assert RunTokenTexts(IndexedRun(run))([0, 1]) is None


def test_another_run_in_the_same_place_has_its_own_tokenizer(tmp_path: Path) -> None:
    tokens = RunTokenTexts(IndexedRun(write_run(tmp_path)))
    assert tokens([0]) is None
    for word in ("one", "another"):
        Tokenizer(models.WordLevel({word: 0}, unk_token=word)).save(str(tmp_path / "tokenizer.json"))
        assert tokens([0]) == [word]
    (tmp_path / "tokenizer.json").unlink()
    assert tokens([0]) is None
