"""`rollover show`: what is said of a run, live, ended or damaged, and of its rollouts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from recorded_run import HOSTILE, is_harmless, row, write_run
from rollover import cli
from rollover.commands.eval import print_eval
from rollover.logs import terminal
from rollover.run.run_files import DirectoryLock
from rollover.track.answers import Answer, print_worst, write_answers
from rollover.track.live import LiveView
from rollover.track.summary import RunSummary, SampleAnswer, print_summary


def show(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert cli.main(["show", *map(str, words)]) == 0
    return capsys.readouterr().out


def squeezed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def test_a_stopped_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = squeezed(show(capsys, write_run(tmp_path)))
    for part in (
        "told: 3 steps",
        f"state stopped; to continue: rollover train FILE.toml --run.dir {tmp_path} --resume",
        "step 3 of 5",
        "reward 0.200 -> 0.200 (means of the first and the last 3 steps)",
        "generated 61 100%",
        "trained 36 59%",
        "dropped: stale 21 34%",
        "held, unfinished or not trained 4 7%",
        "generate 0:03 50%",
        f"run {tmp_path}",
    ):
        assert part in out, part
    assert "Health" not in out and "rollouts" not in out.lower().replace("rollouts of >= 2", "")


def test_a_live_run_says_who_makes_it_and_how_long_it_takes(tmp_path: Path, capsys) -> None:
    lock = DirectoryLock(write_run(tmp_path), "run.dir")
    out = squeezed(show(capsys, tmp_path))
    assert "state running: process " in out and "2.0 s a step" in out and "ETA 0:04" in out
    lock.release()


def test_a_run_without_a_step_yet(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew')
    out = squeezed(show(capsys, tmp_path, "--rollouts"))
    assert "step 0 of ?" in out and "Best rollouts: none" in out and "Stalest rollouts: none" in out


def test_rows_of_an_older_version_lack_keys(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "reward/mean": null}\n')
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "mean": 0.5}\n{"step": 2, "mean": 0.6}\n')
    out = squeezed(show(capsys, tmp_path))
    assert "step 2 of ?" in out and "mean reward 0.500 0.600 +0.100" in out


def test_health_is_said_with_its_step(tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    rows = [row(step, entropy=0.01) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    assert "Health\n  step 5: entropy = 0.01 has been below 0.05" in show(capsys, tmp_path)


@pytest.mark.parametrize("formats", [("jsonl",), ("parquet",)])
def test_rollouts_are_those_that_tell_most(tmp_path: Path, capsys, formats) -> None:
    out = show(capsys, write_run(tmp_path, formats=formats), "--rollouts", "--num", "2")
    kinds = {}
    for line in out.splitlines():
        if line.endswith(" rollouts"):
            found = kinds.setdefault(line.split()[0], [])
        elif line.startswith("  ") and "(sums, task" in line:
            found.append(line.split()[0])
    assert kinds == {
        "Best": ["3-0", "6-0"],
        "Worst": ["3-1", "6-1"],
        "Longest": ["7-0", "7-1"],
        "Stalest": ["11-0", "7-0"],
    }
    assert (
        "  11-0 (sums, task task-11): score 0.250, dropped:stale in step 3, 6 tokens in 1 segment, policy version 0,"
        " staleness 2, eos\n    11 + 1?\n    -> the answer 0\n"
    ) in out
    assert "policy version 0 to 1, staleness 1" in out


def test_json_is_one_object_that_says_the_same(tmp_path: Path, capsys) -> None:
    found = json.loads(show(capsys, write_run(tmp_path), "--json", "--rollouts", "--num", "1"))
    assert (found["name"], found["state"], found["step"], found["num_steps"]) == ("told", "stopped", 3, 5)
    assert found["ledger"]["dropped"] == {"stale": {"groups": 3, "tokens": 21}}
    assert found["recorded"] == {"trained": 12, "dropped:stale": 3} and found["last_row"] == row(3)
    assert [of["rollout_id"] for of in found["rollouts"]["stalest"]] == ["11-0"]
    assert found["rollouts"]["best"][0]["completion"] == "the answer 0"
    assert "rollouts" not in json.loads(show(capsys, tmp_path, "--json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is not the directory of a run: it is not there"),
        (["."], "'.' is not the directory of a run: it has no config.resolved.json"),
        ([".", "--train.num_steps", "3"], "reads no configuration: leave out --train.num_steps"),
    ],
)
def test_what_is_wrong_exits_2(tmp_path: Path, monkeypatch, capsys, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    assert cli.main(["show", str(tmp_path)]) == 2
    assert "metrics.jsonl has a line that is not JSON" in capsys.readouterr().err


# ---- what nobody should print


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def printed(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def test_show_prints_hostile_text_as_text(tmp_path: Path, capsys, hostile: str) -> None:
    out = show(capsys, write_run(tmp_path, text=lambda step: hostile), "--rollouts")
    assert is_harmless(out) and max(map(len, out.splitlines())) < 1000
    found = json.loads(show(capsys, tmp_path, "--rollouts", "--json"))
    kept = hostile.encode("utf-8", "replace").decode()
    assert found["rollouts"]["best"][0]["completion"] == f"{kept} 0"


def test_answers_print_hostile_text_as_text(tmp_path: Path, hostile: str) -> None:
    answer = Answer(hostile, 0, hostile, hostile, hostile, "eos", 3, None, hostile, hostile, hostile)
    print_worst([answer], on := console())
    assert is_harmless(printed(on)) and max(map(len, printed(on).splitlines())) < 1000
    write_answers(tmp_path / "answers.md", [answer])
    written = (tmp_path / "answers.md").read_text()
    assert is_harmless(written) and "?" in written or "script" in hostile


def test_the_summary_prints_hostile_text_as_text(hostile: str) -> None:
    samples = [SampleAnswer(hostile, hostile, hostile, 0.0, 1.0)]
    row = {"mean": 0.5, "sources": {hostile: {"mean": 0.5}, "b": {"mean": 0.5}}, "samples": []}
    print_summary(RunSummary("run", 1, row, row, samples, paths={"run": "here"}), on := console())
    assert is_harmless(printed(on))


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_the_live_view_prints_hostile_text_as_text(mode, hostile: str) -> None:
    view = LiveView(mode, 1, console=(on := console()))
    view.on_message(f"health: {hostile}\nsecond line")
    assert is_harmless(printed(on)) and printed(on).endswith("\nsecond line\n")
    on.print(LiveView(mode, 1, title=hostile[:100], console=on).render())  # run.name, of somebody's file
    assert is_harmless(printed(on))


def test_an_error_prints_hostile_text_as_text(tmp_path: Path, capsys, hostile: str) -> None:
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f"{hostile}\n", encoding="utf-8", errors="replace")
    assert cli.main(["show", str(tmp_path)]) == 2
    terminal.error(f"{hostile}\nand a second line")
    err = capsys.readouterr().err
    assert is_harmless(err) and err.endswith("\nand a second line\n")


def test_the_trace_of_somebody_else_s_run_is_text(tmp_path: Path, capsys, hostile: str) -> None:
    write_run(tmp_path)
    events = [[f"{hostile}_start", 1.0, 0], [f"{hostile}_end", 2.0, 0]]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert cli.main(["trace", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    assert is_harmless(out) and "1.0 s (50%)" in out


def test_the_table_of_an_evaluation_prints_hostile_text_as_text(capsys, hostile: str) -> None:
    of = {"mean": 0.5, "ci": [0.4, 0.6], "tasks": 3}
    print_eval({**of, "sources": {hostile: of, "b": of}})
    assert is_harmless(capsys.readouterr().out)


def test_names_of_somebody_else_s_run_are_text(tmp_path: Path, capsys, hostile: str) -> None:
    write_run(tmp_path)
    (tmp_path / "config.resolved.json").write_text(json.dumps({"run": {"name": hostile}, "train": {"num_steps": 9}}))
    (tmp_path / "resume.json").write_text(json.dumps({"command": hostile, "folder": hostile}))
    assert is_harmless(show(capsys, tmp_path))
    (tmp_path / "finished").write_text(json.dumps({"step": 3, "used_up": hostile}))
    assert is_harmless(show(capsys, tmp_path))
    lock = DirectoryLock(tmp_path, "run.dir")
    (tmp_path / "lock").write_text(hostile, encoding="utf-8", errors="replace")
    assert is_harmless(show(capsys, tmp_path))
    lock.release()
