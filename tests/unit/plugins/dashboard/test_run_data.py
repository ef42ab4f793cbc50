"""What a run answers to a page: every question, live and damaged, with texts that nobody should run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorded_run import group, recorded, row, segment, write_run
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.rollout_detail import split_text
from rollover.plugins.dashboard.run_data import RunData
from rollover.run.run_files import DirectoryLock
from rollover.track.jsonl import MetricsFile
from rollover.track.records import Format, RolloutRecorder
from rollover.track.trace import TRACE, TraceEvent, TraceFile


@pytest.fixture(params=["jsonl", "parquet"])
def of_format(request: pytest.FixtureRequest) -> Format:
    return request.param


def asked(data: RunData, name: str, **query: Any) -> Any:
    """The answer, as JSON makes it."""
    return json.loads(json.dumps(data.answer(name, {k: str(v) for k, v in query.items()}), allow_nan=False))


def test_every_question_has_an_answer_in_a_run_without_anything(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.json").write_text("{}")
    data = RunData(tmp_path)
    for name in data.queries:
        if name not in ("rollout", "episode", "answer", "picture"):
            asked(data, name)
    with pytest.raises(KeyError):
        data.answer("rollout", {"step": "1", "id": "3-0"})
    with pytest.raises(KeyError):
        data.answer("secrets", {})


def test_the_state_of_a_live_run(tmp_path: Path) -> None:
    lock = DirectoryLock(write_run(tmp_path), "run.dir")
    state = asked(RunData(tmp_path), "state")
    assert (state["name"], state["state"], state["step"], state["num_steps"]) == ("told", "running", 3, 5)
    assert state["seconds_a_step"] == 2 and state["seconds_left"] == 4 and "process" in state["holder"]
    assert state["waits"]["bound"] == "generation"
    lock.release()
    assert asked(RunData(tmp_path), "state")["state"] == "stopped"
    stopped = asked(RunData(tmp_path), "state")
    assert stopped["seconds_left"] is None and state["resume"] is None
    assert stopped["resume"] == {"command": f"rollover train FILE.toml --run.dir {tmp_path} --resume", "folder": ""}


def test_revisions_change_only_with_the_files(tmp_path: Path) -> None:
    data = RunData(write_run(tmp_path))
    before = asked(data, "state")["revisions"]
    assert asked(data, "state")["revisions"] == before and all(before.values())
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(row(4))
    RolloutRecorder(tmp_path / "rollouts").write(4, [recorded(group(50, [1.0]))])
    TraceFile(tmp_path / TRACE).write([TraceEvent("publish", 9.0, 4)])
    after = asked(data, "state")["revisions"]
    assert {of for of in before if before[of] != after[of]} == {"metrics", "rollouts", "trace"}
    assert asked(data, "metrics", keys="reward/mean")["columns"]["reward/mean"] == [0.1, 0.2, 0.3, 0.4]
    assert asked(data, "rollouts", text="50-0")["rows"][0]["step"] == 4


def test_metrics_over_an_axis_and_a_window(tmp_path: Path) -> None:
    data = RunData(write_run(tmp_path))
    assert asked(data, "metrics", keys="reward/mean,time/step_s", x="time", **{"from": 2}) == {
        "steps": [2, 3], "first": [2, 3], "last": [2, 3], "x": [4, 6],
        "columns": {"reward/mean": [0.2, 0.3], "time/step_s": [2, 2]}, "of": 2,
        "thinned": 1,
    }  # fmt: skip
    assert [of["step"] for of in asked(data, "evaluations")] == [0]


def test_a_rollout_with_its_segments_siblings_and_life(tmp_path: Path, of_format: Format) -> None:
    write_run(tmp_path, formats=(of_format,))
    events = [
        TraceEvent("start", 10.0, 0, 7, 0),
        TraceEvent("start", 10.0, 0, 7, 1),
        TraceEvent("park", 11.0, 0, 7, 0, tokens=3, segments=((0, 3),)),
        TraceEvent("resume", 12.0, 1, 7, 0, tokens=3),
        TraceEvent("consume", 13.0, 1, 7, tokens=12),
    ]
    TraceFile(tmp_path / TRACE).write(events)
    data = RunData(tmp_path, token_texts=lambda ids: [f"<{token}>" for token in ids])
    told = asked(data, "rollout", step=2, id="7-0")
    assert told["messages"] == [{"role": "user", "content": "7 + 1?"}] and told["completion"] == "the answer 0"
    assert [(s["policy_version"], s["first"], s["num_tokens"], s["staleness"]) for s in told["segments"]] == [
        (0, 0, 3, 1), (1, 3, 3, 0)
    ]  # fmt: skip
    tokens = told["tokens"]
    assert tokens["ids"] == [0, 1, 2, 0, 1, 2] and tokens["texts"] == ["<0>", "<1>", "<2>"] * 2
    assert tokens["logprobs"] == pytest.approx([0, -1 / 7, -2 / 7] * 2) and (tokens["first"], tokens["of"]) == (0, 6)
    assert [(s["id"], s["score"]) for s in told["siblings"]] == [("7-0", 0.5), ("7-1", None)]
    assert [of["kind"] for of in told["life"]] == ["admit", "start", "park", "resume", "consume"]
    assert told["life"][2]["segments"] == [[0, 3]] and told["life"][4]["whole_group"] is True
    second = asked(RunData(tmp_path), "rollout", step=2, id="7-1")
    assert second["messages"] == told["messages"] and second["error"] == "it raised"
    assert second["tokens"]["texts"] is None and second["prompt_tokens"] == 2


def test_a_part_may_end_amid_a_character(tmp_path: Path) -> None:
    """Which is told once, with the token that completes it."""
    of, text = group(50, [1.0]), "a\U0001f600b\U0001f600".encode()
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    of.rollouts[0].segments = [replace(segment(0, len(ids)), token_ids=ids)]
    RolloutRecorder(write_run(tmp_path) / "rollouts").write(4, [recorded(of)])
    data = RunData(tmp_path, lambda some: split_text(lambda part: bytes(part).decode("utf-8", "replace"), some))
    told = [asked(data, "rollout", step=4, id="50-0", first=at, count=2)["tokens"]["texts"] for at in range(0, 10, 2)]
    assert "".join(token for part in told for token in part) == text.decode()


def test_what_an_environment_wrote_has_no_staleness(tmp_path: Path) -> None:
    of = group(50, [1.0], versions=[2])
    of.rollouts[0].segments.append(segment(2, 4, trainable=False))
    RolloutRecorder(write_run(tmp_path) / "rollouts").write(4, [recorded(of)])
    segments = asked(RunData(tmp_path), "rollout", step=4, id="50-0")["segments"]
    assert [(s["trainable"], s["staleness"], s["first"]) for s in segments] == [(True, 1, 0), (False, None, 3)]


def test_waste_is_that_of_all_steps(tmp_path: Path) -> None:
    rows = [row(step, **{"waste/dropped_tokens": step, "waste/dropped_s": 0.5}) for step in range(1, 5)]
    (write_run(tmp_path) / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    assert asked(RunData(tmp_path), "ledger")["waste"] == {"dropped": {"tokens": 10, "seconds": 2}}
    more = {"time/generate_s": 3.0, "tokens/step_generated": 10}
    rows = [row(step, **{"waste/dropped_tokens": 0, "waste/dropped_s": 0.0}, **more) for step in range(1, 4)]
    rolled_back = row(4, **{"waste/dropped_tokens": 40, "tokens/step_generated": 0, "time/generate_s": 0.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in (*rows, rolled_back)))
    assert asked(RunData(tmp_path), "ledger")["waste"] == {"dropped": {"tokens": 40, "seconds": 12}}


def test_waits_by_length_are_of_all_steps(tmp_path: Path) -> None:
    """bias/wait_steps_q is of one step, and bias/trained_vs_dispatched_length of the run so far."""
    write_run(tmp_path, steps=0)
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for step, waits in ((1, 4.0), (2, 1.0), (3, math.nan)):
            more = {"bias/wait_steps_q1": waits, "bias/wait_steps_q2": math.nan}
            metrics.write(row(step, **more, **{"bias/trained_vs_dispatched_length": 0.3 * step}))
    assert asked(RunData(tmp_path), "ledger")["bias"] == {
        "bias/wait_steps_q1": 2.5, "bias/wait_steps_q2": None, "bias/trained_vs_dispatched_length": 0.9,
    }  # fmt: skip


def test_the_ledger_adds_up_in_tokens_and_seconds(tmp_path: Path) -> None:
    write_run(tmp_path)
    events = [TraceEvent("start", 10.0, 0, number, 0) for number in (3, 5, 99)]
    events += [TraceEvent("finish", 10.0 + n, 0, g, 0, tokens=3) for n, g in enumerate((3, 5, 99), start=1)]
    events += [TraceEvent("consume", 20.0, 1, 3), TraceEvent("drop", 20.0, 1, 5, reason="stale")]
    TraceFile(tmp_path / TRACE).write(events)
    told = asked(RunData(tmp_path), "ledger")
    accounts = told["accounts"]
    dropped = sum(of["tokens"] for of in accounts["dropped"].values())
    held, trained = accounts["held"]["tokens"], accounts["trained"]["tokens"]
    assert accounts["generated"]["tokens"] == trained + held + dropped and told["missing_tokens"] == 0
    assert told["slot_seconds"] == {"trained": 1.0, "dropped:stale": 2.0, "held": 3.0}
    lengths = told["lengths"]
    assert {of: sum(counts) for of, counts in lengths["counts"].items()} == {"trained": 12, "dropped:stale": 3}
    assert lengths["means"] == {"trained": 4, "dropped:stale": 5} and lengths["edges"][-1] > 6


@pytest.mark.parametrize(
    ("name", "query", "says"),
    [
        ("rollout", {}, "give the id and the step of the rollout"),
        ("rollout", {"step": "-1", "id": "3-0"}, "step: '-1' is not a number"),
        ("rollout", {"step": "1" * 20, "id": "3-0"}, "step: '1+' is not a number"),
        ("metrics", {"points": "many"}, "points: 'many' is not a number"),
        ("metrics", {"x": "miles"}, "x: 'miles' is no axis"),
        ("lanes", {"from": "inf"}, "from: 'inf' is not a number of seconds"),
        ("lanes", {"from": "5", "to": "4"}, "from, to: 5 to 4"),
        ("lanes", {"columns": "100000"}, "columns: 100000"),
        ("rollouts", {"sort": "beauty"}, "sort: 'beauty'"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path: Path, name: str, query: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RunData(write_run(tmp_path)).answer(name, query)


def test_without_patience_answers_are_partial(tmp_path: Path) -> None:
    """The page asks again for what has another revision: until it has all."""
    write_run(tmp_path, steps=6)
    data, whole = RunData(tmp_path, patience_s=0.0), RunData(tmp_path)
    assert asked(data, "state")["reading"].keys() == {"metrics"}, "nobody asked for rollouts yet"
    seen, revisions = [], []
    while not seen or seen[-1] < 1:
        told = asked(data, "rollouts", limit=100)
        seen.append(told["read"])
        assert len(told["rows"]) == told["total"] == 5 * len(seen)
        state = asked(data, "state")
        assert state["reading"].get("rollouts", 1) == told["read"]
        revisions.append(state["revisions"]["rollouts"])
    assert len(seen) == 6 and len(set(revisions)) == 6
    assert asked(data, "rollouts", limit=100) == asked(whole, "rollouts", limit=100)
    assert revisions[-1] == asked(whole, "state")["revisions"]["rollouts"]


def test_without_patience_metrics_are_partial(tmp_path: Path) -> None:
    """Those of a long run take longer to read than anybody waits."""
    write_run(tmp_path, steps=6)
    data, whole = RunData(tmp_path, patience_s=0.0), RunData(tmp_path)
    seen = []
    while not seen or seen[-1]["reading"]:
        seen.append(asked(data, "state"))
    assert [state["step"] for state in seen] == [1, 2, 3, 4, 5, 6]
    shares = [state["reading"].get("metrics", 1) for state in seen]
    assert shares == sorted(set(shares)) and 0 < shares[0] < 0.5 and shares[-1] == 1
    assert len({state["revisions"]["metrics"] for state in seen}) == 6, "the page asks again"
    assert asked(data, "metrics", keys="reward/mean") == asked(whole, "metrics", keys="reward/mean")
    assert seen[-1]["revisions"] == asked(whole, "state")["revisions"]


def test_unread_rollouts_are_found_and_reading_ahead_ends(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6)
    data = RunData(tmp_path, patience_s=0.0)
    assert asked(data, "rollout", step=6, id="18-0")["step"] == 6
    assert asked(data, "state")["reading"]["rollouts"] == pytest.approx(2 / 6), "its step, and one more"
    data = RunData(tmp_path, patience_s=0.0)
    data.read_ahead()
    assert asked(data, "state")["reading"] == {} and asked(data, "rollouts")["total"] == 30
    assert asked(data, "rollouts")["read"] == 1


def test_rows_of_metrics_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 of them would be more than a gigabyte."""
    write_run(tmp_path)
    monkeypatch.setattr(IndexedRun, "metrics", lambda files: pytest.fail("all rows are read as dicts"))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 2001)))
    data = RunData(tmp_path)
    for name in data.queries:
        if name not in ("rollout", "episode", "answer", "picture"):
            asked(data, name)
    assert asked(data, "state")["step"] == 2000 and len(asked(data, "metrics", keys="reward/mean")["steps"]) <= 800
    rows, num_bytes = data.files.columns().kept
    assert rows < 300 and num_bytes < 2000 * len(row(1)) * 8
