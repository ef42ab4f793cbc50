"""Filters, order, pages and search over rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recorded_run import HOSTILE, group, recorded, write_run
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.rollout_query import RolloutFilter, choices, page
from rollover.track.records import Format, RolloutRecorder
from rollover.types import DropReason


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
