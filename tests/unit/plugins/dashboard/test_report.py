"""A report: what is in it, how large it is, and that nothing in it runs but the page's own script."""

from __future__ import annotations

import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recorded_run import HOSTILE, group, recorded, write_run, written
from rollover import cli
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import RolloutRecorder


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_small_run_is_whole(tmp_path: Path) -> None:
    told = written(make_report([RunData(write_run(tmp_path))]))
    (run,) = told["runs"]
    assert run["answers"]["state"]["step"] == 3 and run["answers"]["metrics"]["columns"]["reward/mean"] == [
        0.1,
        0.2,
        0.3,
    ]
    assert len(run["records"]) == 15 and run["left_out"] == 0 and run["rollouts"]["total"] == 15
    assert run["records"]["1/3-0"]["completion"] == "the answer 0"
    columns = run["rollouts"]["columns"]
    assert columns["id"][:3] == ["3-0", "3-1", "4-0"] and {len(of) for of in columns.values()} == {15}
    assert set(run["axes"]) == {"step", "tokens", "samples", "time"} and told["compare"] == {}


def test_report_infinite_setting_is_strict_json(tmp_path: Path) -> None:
    (write_run(tmp_path) / "config.resolved.json").write_text('{"rewards": {"timeout_s": Infinity}}')
    (run,) = written(make_report([RunData(tmp_path)]))["runs"]
    assert run["answers"]["config"] == {"rewards": {"timeout_s": None}}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_texts_are_no_markup(tmp_path: Path, name: str) -> None:
    hostile = f"{HOSTILE[name]}</script><script>alert(1)</script><!--"
    text = make_report([RunData(write_run(tmp_path, text=lambda step: hostile))])
    tags = Tags(text).tags
    assert [tag for tag, _ in tags].count("script") == 3 and not {"img", "iframe", "link1"} & {tag for tag, _ in tags}
    assert "alert(1)" not in text
    text.encode("utf-8")
    if name != "long":
        assert written(text)["runs"][0]["records"]["1/3-0"]["completion"].endswith("<!-- 0")


def test_the_policy_lets_no_other_script_run_and_asks_nobody(tmp_path: Path) -> None:
    text = make_report([RunData(write_run(tmp_path))])
    (policy,) = [
        attrs["content"] for tag, attrs in Tags(text).tags if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src" not in policy
    assert policy.count("'sha256-") == 3
    assert not any("src" in attrs for tag, attrs in Tags(text).tags if tag == "script")


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    recorder = RolloutRecorder(write_run(tmp_path) / "rollouts")
    for step in range(4, 40):
        noise = random.Random(step).randbytes(10_000).hex()  # packed it has half of its length
        recorder.write(step, [recorded(group(100 + step, [0.5, 1.0]), text=noise)])
    most = 600_000
    text = make_report([RunData(tmp_path)], most)
    (run,) = written(text)["runs"]
    assert len(text.encode()) <= most and 0 < len(run["records"]) < 87
    assert run["left_out"] == 87 - len(run["records"]) and run["rollouts"]["total"] == 87
    assert len(run["rollouts"]["columns"]["id"]) == 87
    for name, record in run["records"].items():  # whole groups, but for the last
        assert name == f"{record['step']}/{record['rollout_id']}"


def test_beginnings_of_texts_have_room_of_their_own(tmp_path: Path) -> None:
    """In the file they do not stand beside the texts that they begin, and are not packed with them."""
    recorder, rng = RolloutRecorder(write_run(tmp_path) / "rollouts"), random.Random(0)
    for step in range(4, 204):
        recorder.write(step, [recorded(group(100 + step, [0.5, 1.0]), text=rng.randbytes(400).hex())])
    text = make_report([RunData(tmp_path)], 350_000)
    (run,) = written(text)["runs"]
    assert 300_000 < len(text) <= 350_000 and run["left_out"] > 0


def test_several_runs_share_the_room_and_are_compared(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
        write_run(place)
    (places[1] / "config.resolved.json").write_text('{"run": {"name": "other"}, "train": {"num_steps": 7}}')
    told = written(make_report([RunData(place) for place in places]))
    assert [run["answers"]["state"]["name"] for run in told["runs"]] == ["told", "other", "told"]
    assert told["compare"]["config"] == [{"key": "train.num_steps", "values": ["5", "7", "5"]}]
    assert len(told["compare"]["evaluations"]) == 2


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    (tmp_path / "run").mkdir()
    run = write_run(tmp_path / "run")
    assert cli.main(["report", str(run), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n" and out.read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(run), "-o", str(tmp_path / "none" / "out.html")]) == 2
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert cli.main(["report", *[str(run)] * 9]) == 2 and "9 runs, at most 8" in capsys.readouterr().err
