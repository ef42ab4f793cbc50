"""What is read of a run, whole, damaged or hostile, and of several at once."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from recorded_run import group, recorded, row, segment, write_run
from rollover.cli import main
from rollover.config import Config
from rollover.config.run import RunConfig
from rollover.files import MOST_LINE_BYTES, lines_of, open_regular, read_regular
from rollover.plugins.dashboard.app import make_app
from rollover.plugins.dashboard.compare import RunComparison, differences, evaluations
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.metrics import Amount
from rollover.plugins.dashboard.rollout_detail import split_text
from rollover.plugins.dashboard.run_data import RunData
from rollover.run.directory import RunDirectory
from rollover.run.run_files import DirectoryLock
from rollover.track.build import build_trackers
from rollover.track.jsonl import MetricsFile
from rollover.track.records import Format, RolloutRecorder
from rollover.track.trace import TRACE, TraceEvent, TraceFile

# What a run answers to a page: every question, live and damaged, with texts that nobody should run


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
        ("metrics", {"points": "many"}, "points: 'many' is not a number"),
        ("lanes", {"from": "inf"}, "from: 'inf' is not a number of seconds"),
        ("lanes", {"columns": "100000"}, "columns: 100000"),
    ],
)
def test_query_that_means_nothing_is_named(tmp_path: Path, name: str, query: dict[str, str], says: str) -> None:
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


# IndexedRun: what the directory of a run says, live, finished, killed or of an older version


def test_all_that_a_run_says(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    assert [of["step"] for of in files.metrics()] == [1, 2, 3]
    assert [of["mean"] for of in files.evaluations()] == [0.1]
    assert [event.group for event in files.events()] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert (files.name, files.value("train.num_steps"), files.value("no.such", 7)) == ("told", 5, 7)
    accounts = files.accounts()
    assert accounts is not None and accounts.missing == Amount(0, 0)
    assert accounts.dropped == {"stale": Amount(3, 21)}
    assert (accounts.generated, accounts.trained, accounts.held) == (Amount(10, 61), Amount(6, 36), Amount(1, 4))


@pytest.mark.parametrize("what", ["nowhere", "file", "empty"])
def test_what_is_no_run_is_said(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not the directory of a run"):
        IndexedRun(tmp_path / what)


def test_a_killed_run_with_half_lines(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    for name in ("metrics.jsonl", "eval.jsonl", "trace.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"step": 4, "rew')
    assert len(files.metrics()) == 3 and len(files.evaluations()) == 1 and len(list(files.events())) == 9


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    with build_trackers(Config.model_validate({}), tmp_path):
        files = IndexedRun(tmp_path)
        assert (files.config, files.metrics(), files.evaluations(), list(files.events())) == ({}, [], [], [])
        assert files.accounts() is None and files.warnings() == [] and len(files.rollouts.entries()) == 0


def test_who_makes_it_is_known_and_looking_hinders_nobody(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    assert (files.state, files.holder) == ("stopped", "")
    lock = DirectoryLock(tmp_path, "run.dir")
    assert files.state == "running" and files.holder.startswith("process ")
    with pytest.raises(ValueError, match="is in use by process"):
        DirectoryLock(tmp_path, "run.dir")
    lock.release()
    assert files.state == "stopped"
    (tmp_path / "finished").write_text(json.dumps({"step": 3, "used_up": "tasks"}))
    assert (files.state, files.ended_early) == ("finished", "the tasks are used up")
    (tmp_path / "finished").write_text("")
    assert (files.state, files.ended_early) == ("finished", "")


def test_how_to_go_on_is_what_the_run_said_itself(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path / "a run"))
    unknown = (f"rollover train FILE.toml --run.dir '{tmp_path}/a run' --resume", "")
    assert files.resume == unknown
    file = files.directory / "resume.json"
    file.write_text(json.dumps({"command": "rollover train my.toml --resume", "folder": "/home"}))
    assert files.resume == ("rollover train my.toml --resume", "/home")
    for damaged in ("[]", "{", '{"command": "x"}', "null"):
        file.write_text(damaged)
        assert files.resume == unknown


def test_warnings_are_those_that_the_run_was_told(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    rows = [row(step, entropy=0.01) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    (warning,) = files.warnings()
    assert (warning.step, warning.key) == (5, "entropy") and "below 0.05 for 5 steps" in warning.text


def test_a_figure_that_does_not_matter_in_this_run_is_no_warning(tmp_path: Path) -> None:
    files = IndexedRun(write_run(tmp_path))
    rows = [row(step, **{"groups/zero_variance": 1.0}) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    assert [warning.key for warning in files.warnings()] == ["groups/zero_variance"]
    one = {"rollout": {"group_size": 1}, "algorithm": {"advantage": "reinforce_plus_plus"}, "rewards": {"min_valid": 1}}
    (tmp_path / "config.resolved.json").write_text(json.dumps(one))
    assert files.warnings() == []


# Files that are damaged, gone or another run's under a running server: it says which, and shows all else


DEEP = "[" * 100_000 + "\n"


def client(*directories: Path) -> TestClient:
    app = make_app([RunData(of) for of in directories])
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return write_run(tmp_path / "run")


def change(path: Path, key: str, value: Any) -> None:
    """In the first line of a file."""
    first, *others = path.read_text().splitlines(keepends=True)
    record = json.loads(first)
    del record[key]
    if value is not None:
        record[key] = value
    path.write_text("".join([json.dumps(record) + "\n", *others]))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


ROLLOUTS = "rollouts/step-000001.jsonl"


@pytest.mark.parametrize(
    ("question", "file", "damage"),
    [
        ("keys", "metrics.jsonl", lambda path: path.write_text(DEEP)),
        ("metrics?keys=reward/mean", "metrics.jsonl", lambda path: change(path, "reward/mean", 10**400)),
        ("keys", "metrics.jsonl", replace_by_folder),
        ("state", "config.resolved.json", lambda path: path.write_text(DEEP)),
        ("lanes", "trace.jsonl", lambda path: path.write_text(DEEP)),
        ("lanes", "trace.jsonl", lambda path: path.write_text("[null,9,1]\n")),
        ("lanes", "trace.jsonl", lambda path: path.write_text('["start",9,1,' + "1" * 30 + ",0,0,0]\n")),
        ("lanes", "trace.jsonl", replace_by_folder),
        ("choices", ROLLOUTS, lambda path: path.write_text(DEEP)),
        ("choices", ROLLOUTS, lambda path: change(path, "score", "high")),
        ("choices", ROLLOUTS, lambda path: change(path, "source", ["a"])),
        ("choices", ROLLOUTS, lambda path: change(path, "segments", [{}])),
        ("rollouts", ROLLOUTS, lambda path: change(path, "completion", 5)),
        ("rollouts", ROLLOUTS, lambda path: change(path, "columns", "{")),
        ("rollout?step=1&id=3-0", ROLLOUTS, lambda path: change(path, "token_ids", 5)),
        ("rollout?step=1&id=3-0", ROLLOUTS, lambda path: change(path, "prompt_ids", None)),
    ],
)
def test_what_is_damaged_is_named(run: Path, question: str, file: str, damage: Callable[[Path], object]) -> None:
    damage(run / file)
    answer = client(run).get(f"/api/runs/0/{question}")
    assert answer.status_code == 400, answer.text
    assert str(run) in answer.json()["error"]["message"]


def test_what_says_how_it_ended_may_be_damaged(run: Path) -> None:
    for name in ("finished", "resume.json"):
        (run / name).write_text(DEEP)
    state = client(run).get("/api/runs/0/state").json()
    assert state["state"] == "finished" and state["ended_early"] == ""


def test_a_damaged_run_hides_no_other(run: Path, tmp_path: Path) -> None:
    asked = client(run, write_run(Path(shutil.copytree(run, tmp_path / "other")), steps=1))
    (run / "metrics.jsonl").write_text("no row\n")
    damaged, other = asked.get("/api/runs").json()
    assert damaged.keys() == other.keys()
    assert damaged["state"] == "unreadable" and "metrics.jsonl has a line that is not" in damaged["ended_early"]
    assert damaged["directory"] == str(run) and other["state"] == "stopped"


def test_a_run_that_is_gone_is_no_stopped_one_and_comes_back(run: Path, tmp_path: Path) -> None:
    asked = client(run)
    before = asked.get("/api/runs/0/state").json()
    moved = run.rename(tmp_path / "moved")
    for stands_there in (lambda: None, run.mkdir, lambda: (run.rmdir(), run.write_text("a file"))):
        stands_there()
        answer = asked.get("/api/runs/0/state")
        assert answer.status_code == 400 and "is not the directory of a run" in answer.json()["error"]["message"]
        assert asked.get("/api/runs").json()[0]["state"] == "unreadable"
    run.unlink()
    moved.rename(run)
    assert asked.get("/api/runs/0/state").json() == before


def test_a_report_of_a_damaged_run_says_which_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run / ROLLOUTS, "completion", 5)
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 2
    assert ROLLOUTS in capsys.readouterr().err and not (run / "report.html").exists()


# Several runs, asked together and at the same time


def runs(tmp_path: Path, count: int) -> list[RunData]:
    places = [tmp_path / str(number) for number in range(count)]
    for place in places:
        place.mkdir()
    return [RunData(write_run(place, steps=1 + number)) for number, place in enumerate(places)]


def test_all_runs_or_those_that_are_named(tmp_path: Path) -> None:
    several = RunComparison(runs(tmp_path, 3))
    assert [of["steps"] for of in several.answer("metrics", {"keys": "reward/mean"})] == [[1], [1, 2], [1, 2, 3]]
    found = several.answer("metrics", {"keys": "reward/mean", "runs": "2,0", "x": "tokens"})
    assert [of["x"] for of in found] == [[23, 42, 61], [23]]
    assert len(several.answer("metrics", {"runs": "0," * 1000})) == 1, "each once"
    assert several.answer("config", {}) == [] and len(several.answer("evaluations", {"runs": "0,1"})) == 1
    for name in several.queries:
        several.answer(name, {})


@pytest.mark.parametrize(
    ("name", "query", "error", "says"),
    [
        ("metrics", {"runs": "3"}, KeyError, "there is no run 3: there are 3"),
        ("metrics", {"runs": "-1"}, KeyError, "there is no run -1"),
        ("secrets", {}, KeyError, "there is no query secrets"),
        ("metrics", {"x": "miles"}, ValueError, "no axis"),
        ("metrics", {"points": "x"}, ValueError, "points"),
        ("metrics", {"keys": ",".join(map(str, range(501)))}, ValueError, "501 keys, at most 500 are allowed"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, name: str, query: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        RunComparison(runs(tmp_path, 3)).answer(name, query)


def test_a_question_waits_for_nobody_who_reads_something_else(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, 1)
    with run.reading("rollouts", "trace"):
        for name in ("state", "keys", "metrics", "evaluations", "warnings", "config"):
            asked = threading.Thread(target=run.answer, args=(name, {}), daemon=True)
            asked.start()
            asked.join(60)
            assert not asked.is_alive(), name
        waiting = threading.Thread(target=run.answer, args=("rollouts", {}), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


# Runs beside each other


def run_at(path: Path, config: dict, scores: dict[str, float | None] | None = None) -> IndexedRun:
    path.mkdir()
    write_run(path)
    (path / "config.resolved.json").write_text(json.dumps(config))
    if scores is not None:
        (path / "evaluations").mkdir()
        rows = [{"task_id": task, "prompt": "?", "score": score} for task, score in scores.items()]
        (path / "evaluations" / "step-000003.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return IndexedRun(path)


def config(rate: float, **more: object) -> dict:
    return {"run": {"dir": str(rate), "name": "x"}, "train": {"learning_rate": rate, "lora": {"rank": 8}}, **more}


def test_only_keys_that_differ() -> None:
    assert differences([config(1e-5), config(1e-5)]) == []
    assert differences([config(1e-5), config(2e-5), config(1e-5, tasks={"sources": [{"name": "<b>"}]})]) == [
        {"key": "train.learning_rate", "values": ["1e-05", "2e-05", "1e-05"]},
        {"key": "tasks.sources", "values": [None, None, '[{"name": "<b>"}]']},
    ]
    nested = config(1e-5) | {"train": {"learning_rate": 1e-5, "lora": {"rank": 16}}}
    assert differences([config(1e-5), nested]) == [{"key": "train.lora.rank", "values": ["8", "16"]}]


def test_evaluations_are_paired_by_task(tmp_path: Path) -> None:
    tasks = [str(number) for number in range(10)]
    first = run_at(tmp_path / "a", config(1.0), {task: 0.0 for task in tasks} | {"only": 1.0})
    better = run_at(tmp_path / "b", config(2.0), {task: 1.0 for task in tasks})
    other = run_at(tmp_path / "c", config(3.0), {"elsewhere": 1.0})
    without = run_at(tmp_path / "d", config(4.0))
    (of_better,), of_other, of_without = (
        found["comparisons"] or found["why"] for found in evaluations([first, better, other, without])
    )
    assert (of_better["tasks"], of_better["difference"], of_better["better"], of_better["unpaired"]) == (10, 1.0, 10, 1)
    assert of_better["p_value"] == pytest.approx(2 / 1024) and "better in 10" in of_better["text"]
    assert "no task has a score in both" in of_other and "has no recorded evaluation" in of_without
    assert evaluations([without, first])[0]["comparisons"] == []


# Pipes, devices and endless files in a run's directory: every reader answers, within seconds and little memory


LIMIT_S, LIMIT_MB = 60, 2500  # of address space, so that a gigabyte of zeros does not fit twice
FILES = (
    "config.resolved.json", "metrics.jsonl", "eval.jsonl", "trace.jsonl", "finished", "resume.json", "lock",
    "tokenizer.json", "rollouts/step-000001.jsonl", "evaluations/step-000001.jsonl",
)  # fmt: skip


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/full")


def endless(path: Path) -> None:
    """A sparse file: a gigabyte of zeros, which is one line."""
    with open(path, "wb") as file:
        file.truncate(1 << 30)


READ = """
import sys
from contextlib import suppress
from rollover.cli import main
from rollover.plugins.dashboard.run_data import RunData
for run in sys.argv[1:]:
    print("reading", run, flush=True)
    for words in (["show", run, "--rollouts"], ["show", run, "--json"], ["trace", run],
                  ["report", run, "-o", run + ".html"]):
        assert main(words) in (0, 2), words
    with suppress(ValueError):
        data = RunData(run)
        of_one = {"rollout": {"step": "1", "id": "3-0"}, "episode": {"step": "1", "id": "3-0"}}
        for name in data.queries:
            with suppress(ValueError, KeyError):
                data.answer(name, of_one.get(name, {}))
        data.state()
        data.read_ahead()
"""


def hostile(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    damage(path)


@pytest.mark.parametrize("damage", [pipe, device, endless])
def test_readers_answer_for_hostile_files(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    runs = []
    for number, name in enumerate(FILES):
        runs.append(tmp_path / f"{number}-{name.replace('/', '-')}")
        runs[-1].mkdir()
        hostile(write_run(runs[-1]), name, damage)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_MB << 20, LIMIT_MB << 20))

    command = [sys.executable, "-c", READ, *map(str, runs)]
    with open(tmp_path / "said", "w") as said:
        done = subprocess.run(command, stdout=said, stderr=said, timeout=LIMIT_S, preexec_fn=limit)
    text = (tmp_path / "said").read_text()
    assert done.returncode == 0 and "MemoryError" not in text, text[-2000:]


@pytest.mark.parametrize("damage", [pipe, device])
@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "finished", "resume.json", "trace.jsonl"])
def test_train_refuses_hostile_file(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    hostile(write_run(tmp_path), name, damage)
    with pytest.raises(ValueError, match=f"{name} in it is a folder, a device or a pipe"):
        RunDirectory(Config(run=RunConfig(dir=str(tmp_path))), resume=True)


def test_open_regular_takes_files_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\ntwo")
    os.mkfifo(tmp_path / "pipe")
    with open_regular(tmp_path / "file") as file:
        assert list(lines_of(file, "file")) == [b"one\n", b"two"]
    for name in ("pipe", "", "/dev/zero"):
        with pytest.raises(ValueError, match="no file, but a folder, a device or a pipe"):
            open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    assert read_regular(tmp_path / "file", 7) == b"one\ntwo"
    with pytest.raises(ValueError, match="more than 6 bytes"):
        read_regular(tmp_path / "file", 6)
    with open_regular(tmp_path / "file") as file, pytest.raises(ValueError, match="a line of more than 3 bytes"):
        list(lines_of(file, "file", 3))
    assert MOST_LINE_BYTES > 10**8
