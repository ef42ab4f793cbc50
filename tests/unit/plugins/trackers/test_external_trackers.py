"""External trackers in processes of their own: they get every event, and neither a hang nor a crash costs a step."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from heard import hear
from rollover.config import TrackConfig
from rollover.config.load import load_config
from rollover.config.run import TOOLS
from rollover.functions import explained
from rollover.plugins.trackers import external
from rollover.plugins.trackers.adapter import as_paths, redacted, without_secrets
from rollover.plugins.trackers.child import files_of
from rollover.plugins.trackers.external import AdapterSpec, ExternalTrackers
from rollover.plugins.trackers.sample import sample_of, sample_of_records
from rollover.track.build import build_trackers
from rollover.track.jsonl import EvalFile, MetricsFile
from rollover.track.records import RolloutRecorder, records_of
from rollover.track.tracker import Cut, RecordedGroup, RunInfo, Tracker, Trackers
from samples import group, rollout, segment

MODEL = [("track.trackers", '["wandb"]'), ("track.artifacts", '["model"]')]
REPOSITORY = Path(__file__).parents[4]
QUOTED = json.dumps('with "q\u00e9otes" in it')
FAKE = """
import json, os, time
from rollover.plugins.trackers.adapter import LastSteps, Adapter

class Kept(Adapter):
    '''Writes down what it is told. A file "raise", "hang" or "die" beside that makes it do so at the next step.'''

    def truncate(self, cut):
        if (self.about.directory / "closed").exists():
            raise ConnectionError("nobody is there")
        self.broken = False
        self.file = self.about.directory / "told.jsonl"
        told = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        told = [what for what in told if what[1] <= cut.step]
        self.file.write_text("".join(json.dumps(what) + chr(10) for what in told))
        steps = lambda kind: max([what[1] for what in told if what[0] == kind], default=-1)
        self.last_steps, self.place = LastSteps(steps("row"), steps("eval")), "a folder"

    def tell(self, *what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + chr(10))

    def on_step(self, row):
        folder = self.about.directory
        self.broken |= (folder / "break").exists()
        if self.broken:
            raise OSError("no space left")
        if (folder / "raise").exists():
            raise ConnectionError("no route with " + os.environ["FAKE_API_KEY"])
        if (folder / "chatter").exists():
            for descriptor in (1, 2):
                try:
                    os.write(descriptor, b"7\\n[]\\nno JSON\\n" * 1000)
                except OSError:
                    pass
        if (folder / "die").exists():
            os.write(2, b"out of memory")
            os._exit(3)
        while (folder / "hang").exists():
            time.sleep(0.01)
        self.tell("row", row["step"], row["loss"])

    def on_eval(self, row):
        self.tell("eval", row["step"], row["mean"])

    def show(self, name, step, rows):
        self.tell("rollouts", step, rows)

    def on_artifact(self, name, files):
        folder = self.about.directory
        while (folder / "hang").exists():
            time.sleep(0.01)
        if name == "best_model" and (folder / "raise").exists():
            raise OSError("no space for " + os.environ["FAKE_API_KEY"])
        self.tell("artifact", -1, [name, {path: file.read_text() for path, file in files.items()}])

    def close(self):
        self.tell("close", -1, self.failed)
"""


class Heard(Tracker):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_message(self, text: str) -> None:
        self.lines.append(text)


class RunOf:
    """The trackers of one process of a run in `folder`, cut after the step `cut` (None: not yet)."""

    def __init__(self, folder: Path, cut: int | None = -1, **options: Any) -> None:
        self.folder, self.messages, self.trackers = folder, Heard(), Trackers()
        self.trackers.add("heard", self.messages)
        self.trackers.add("metrics", MetricsFile(folder / "metrics.jsonl"))
        self.trackers.add("evals", EvalFile(folder / "eval.jsonl"))
        config = TrackConfig(trackers=["fake"], **{"finish_s": 120.0, **options})
        self.tools = ExternalTrackers(["fake"], config)
        hear(self.trackers.on_message)
        self.trackers.add("tools", self.tools)
        self.trackers.on_start(RunInfo("demo", folder, {"run": {"name": "demo"}}, resumed=False))
        if cut is not None:
            self.trackers.truncate(Cut(cut))

    def step(self, step: int) -> None:
        self.trackers.on_step({"step": step, "loss": step / 3})

    def told(self, kind: str = "") -> list[Any]:
        path = self.folder / "told.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [what for what in map(json.loads, lines) if what[0] == kind or not kind]

    def end(self) -> None:
        self.trackers.on_phase("done")
        self.trackers.close()

    def kill(self) -> None:
        """As where the run is killed: its children go with it."""
        for tool in self.tools.adapters:
            tool.kill()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "fake_adapter.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    monkeypatch.setenv("FAKE_API_KEY", "s3cr3t-of-the-user")
    monkeypatch.setitem(external.ADAPTERS, "fake", AdapterSpec("fake_adapter:Kept", "json"))


def test_it_is_told_all_in_order_and_closed(tmp_path: Path) -> None:
    run = RunOf(tmp_path)
    run.trackers.on_eval({"step": 0, "mean": 0.25})
    run.step(1)
    run.step(2)
    run.trackers.on_eval({"step": 2, "mean": 0.5})
    run.end()
    assert run.told() == [
        ["eval", 0, 0.25], ["row", 1, 1 / 3], ["row", 2, 2 / 3], ["eval", 2, 0.5], ["close", -1, False],
    ]  # fmt: skip
    assert run.messages.lines == ["fake: this run is shown at a folder"]
    assert run.trackers.stats() == {"trackers/failed": 0, "trackers/lost": 0}


@pytest.mark.parametrize("cut", [1, 3])
def test_a_killed_adapter_catches_up_after_resume(tmp_path: Path, cut: int) -> None:
    first = RunOf(tmp_path)
    first.step(1)
    first.step(2)
    until(lambda: len(first.told("row")) == 2)
    first.kill()
    first.step(3)  # into the files alone
    first.trackers.on_eval({"step": 3, "mean": 0.5})
    second = RunOf(tmp_path, cut=cut)
    for step in range(cut + 1, 5):
        second.step(step)
    second.end()
    assert second.told("row") == [["row", step, step / 3] for step in (1, 2, 3, 4)]
    assert second.told("eval") == ([["eval", 3, 0.5]] if cut == 3 else [])
    assert len((tmp_path / "tracked_as").read_text().strip()) == 16


def test_a_hanging_adapter_delays_nothing_and_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "MAX_PENDING", 4)
    (tmp_path / "hang").touch()
    run = RunOf(tmp_path)
    for step in range(1, 21):
        run.step(step)
    lost = run.trackers.stats()["trackers/lost"]
    assert lost == 18, "about, the cut, and two rows were under way"
    assert [line for line in run.messages.lines if "does not keep up" in line], "it is said"
    assert not run.told("row")
    (tmp_path / "hang").unlink()
    until(lambda: len(run.told("row")) == 2)
    until(lambda: not run.tools.adapters[0].num_pending)
    run.step(21)
    run.end()
    assert run.told("row") == [["row", step, step / 3] for step in range(1, 22)], "told from metrics.jsonl"


def test_one_that_hangs_is_ended_after_its_time(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    run = RunOf(tmp_path, finish_s=0.2)
    run.step(1)
    run.end()
    assert run.tools.adapters[0].wait(0), "its process is gone"
    (line,) = [line for line in run.messages.lines if "track.finish_s" in line]
    assert "fake had not taken" in line and "0.2 s after the end" in line


def test_the_silence_of_one_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.plugins.trackers.external._SILENT_S", 0.0)
    (tmp_path / "hang").touch()
    run = RunOf(tmp_path, finish_s=0.0)
    for step in (1, 2, 3):
        run.step(step)
    run.end()
    assert len([line for line in run.messages.lines if "has taken nothing for" in line]) == 1


def test_a_failing_adapter_is_reported_once_and_retried(tmp_path: Path) -> None:
    (tmp_path / "raise").touch()
    run = RunOf(tmp_path)
    run.step(1)
    run.step(2)
    until(lambda: run.trackers.stats()["trackers/failed"] == 2)
    (tmp_path / "raise").unlink()
    run.step(3)
    run.end()
    assert run.told("row") == [["row", step, step / 3] for step in (1, 2, 3)]
    (line,) = [line for line in run.messages.lines if "failed" in line]
    assert (
        line.startswith("track.trackers: fake failed: ConnectionError: no route with ***")
        and "the run continues" in line
    )


def test_what_it_never_takes_does_not_keep_it_from_the_rest(tmp_path: Path) -> None:
    (tmp_path / "raise").touch()
    run = RunOf(tmp_path)
    for step in (1, 2, 3):
        run.step(step)
    until(lambda: run.trackers.stats()["trackers/failed"] == 3)
    (tmp_path / "raise").unlink()
    run.step(4)
    run.end()
    assert [step for _, step, _ in run.told("row")] == [2, 3, 4], "three tries of the first"


def test_one_that_stays_broken_is_opened_again_and_told_all(tmp_path: Path) -> None:
    """As a writer of files after its disk was full."""
    run = RunOf(tmp_path)
    run.step(1)
    until(lambda: run.told("row"))
    (tmp_path / "break").touch()
    for step in range(2, 8):
        run.step(step)
    until(lambda: run.trackers.stats()["trackers/failed"] == 6)
    (tmp_path / "break").unlink()
    run.step(8)
    run.end()  # at the latest; before it no sooner than half a minute after it was opened last
    assert [step for _, step, _ in run.told("row")] == [*range(1, 9)]


def test_one_that_can_be_opened_at_the_end_only_is_told_all_then(tmp_path: Path) -> None:
    (tmp_path / "closed").touch()
    run = RunOf(tmp_path)
    run.step(1)
    until(lambda: not run.tools.adapters[0].num_pending)
    (tmp_path / "closed").unlink()
    run.step(2)
    run.end()
    assert [step for _, step, _ in run.told("row")] == [1, 2] and run.told("close")
    (tmp_path / "closed").touch()
    again = RunOf(tmp_path, cut=2)  # of the finished run: there is nothing to undo
    until(lambda: again.trackers.stats()["trackers/failed"])
    (tmp_path / "closed").unlink()
    again.end()
    assert [what[:2] for what in again.told()] == [["row", 1], ["row", 2], ["close", -1], ["close", -1]]


SECRET = "sk-ABCDEFGH/IJKL MNOP"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 480 + SECRET,
        f"at http://host/?key={quote(SECRET, safe='')} and {quote_plus(SECRET)}",
        "the credential " + repr("{\n " + SECRET + "\n}"),
        "http://user:p@ss/w0rd!@host/x",
    ],
)
def test_a_credential_is_in_no_line_in_whatever_form(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_API_KEY", SECRET)
    monkeypatch.setenv("FAKE_FILE_SECRET", "{\n " + SECRET + "\n}")
    said = explained(ConnectionError(text), redacted)
    assert "***" in said and not any(part in said for part in ("sk-A", "IJKL", "MNOP", "ss/w0rd"))


def test_one_whose_process_ends_is_said_and_counted(tmp_path: Path) -> None:
    run = RunOf(tmp_path)
    run.step(1)
    until(lambda: run.told("row"))
    (tmp_path / "die").touch()
    run.step(2)
    until(lambda: run.trackers.stats()["trackers/failed"])
    run.step(3)
    run.end()
    assert run.trackers.stats() == {"trackers/failed": 1, "trackers/lost": 3}, "steps 2 and 3, and the end"
    assert any("its process ended (out of memory); the run continues without it" in line for line in run.messages.lines)


def test_prints_of_a_library_are_no_replies(tmp_path: Path) -> None:
    (tmp_path / "chatter").touch()
    run = RunOf(tmp_path)
    for step in range(1, 4):
        run.step(step)
    run.end()
    assert run.trackers.stats() == {"trackers/failed": 0, "trackers/lost": 0}
    assert run.told("row") == [["row", step, step / 3] for step in range(1, 4)] and run.told("close")


def leave(folder: Path, *, finished: bool = True) -> None:
    """What a run leaves in its directory."""
    for name, text in {
        "model/config.json": "{}",
        "model/deep/weights.safetensors": "s3cr3t-of-the-user",  # by chance
        "best_model/config.json": "best",
        "rollouts/step-000001.jsonl": "x" * (1 << 22) + "s3cr3t-of-the-user",
        "rollouts/step-000002.jsonl": "of two",
        "rollouts/step-000003.jsonl": QUOTED,
        "checkpoints/step-000002/state": "much",
        "logs/out.txt": "a line",
        "config.resolved.json": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "rollouts" / "elsewhere").symlink_to("/etc/passwd")
    if finished:
        (folder / "finished").write_text("{}")


def test_a_finished_run_leaves_its_artifacts_without_credentials(tmp_path: Path) -> None:
    run = RunOf(tmp_path, artifacts=["model", "best_model", "records"])
    run.step(1)
    until(lambda: not run.tools.adapters[0].num_pending)
    leave(tmp_path)
    (tmp_path / "raise").touch()
    run.end()
    found = {what[0]: what[1] for _, _, what in run.told("artifact")}
    assert found["model"] == {"config.json": "{}", "deep/weights.safetensors": "s3cr3t-of-the-user"}
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert found["records"] == {
        "metrics.jsonl": metrics,
        "rollouts/step-000002.jsonl": "of two",
        "rollouts/step-000003.jsonl": QUOTED,
        "eval.jsonl": "",
    }
    assert "best_model" not in found
    lines = [line for line in run.messages.lines if "did not go there" in line]
    assert "best_model did not go there: OSError: no space for ***" in lines[0] and "tried again" not in lines[0]
    assert "rollouts/step-000001.jsonl of records did not go there: a credential is in it" in lines[1]
    assert len(lines) == 2 and run.told()[-1] == ["close", -1, False], "it goes on"


@pytest.mark.parametrize(("secret", "kept"), [("s3cr3t-of-the-user", False), ("another", True)])
def test_a_credential_in_a_parquet_file_is_found(tmp_path: Path, secret: str, kept: bool) -> None:
    pytest.importorskip("pyarrow")
    recorder = RolloutRecorder(tmp_path / "rollouts", formats=["parquet"])
    text = f"{[n * n for n in range(2000)]} {secret} and more"
    path = recorder.write(1, [RecordedGroup(group(0, [rollout(0, 0, 0.5, [segment([1, 2])])]), [text], [0.5])])
    assert path is not None and secret.encode() not in path.read_bytes(), "it is packed"
    files, left_out = files_of("records", tmp_path)
    assert [*files] == (["rollouts/step-000001.parquet"] if kept else [])
    assert left_out == ([] if kept else ["rollouts/step-000001.parquet"])


def test_a_credential_is_found_as_json_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_API_KEY", 'with "q\u00e9otes" in it')
    leave(tmp_path)
    assert files_of("records", tmp_path)[1] == ["rollouts/step-000003.jsonl"]


@pytest.mark.parametrize(("finished", "phase"), [(False, "done"), (True, "stopped")])
def test_a_run_that_is_not_finished_leaves_none(tmp_path: Path, finished: bool, phase: str) -> None:
    run = RunOf(tmp_path, artifacts=["model"])
    leave(tmp_path, finished=finished)
    run.trackers.on_phase(phase)
    run.trackers.close()
    assert [what[0] for what in run.told()] == ["close"]


def test_artifacts_have_their_own_time_limit(tmp_path: Path) -> None:
    run = RunOf(tmp_path, artifacts=["model"], finish_s=0.2, artifacts_s=0.3)
    run.step(1)
    until(lambda: not run.tools.adapters[0].num_pending)
    leave(tmp_path)
    (tmp_path / "hang").touch()
    run.end()
    assert run.tools.adapters[0].wait(0), "its process is gone"
    waiting, ended = (line for line in run.messages.lines if "model" in line)
    assert "waiting for fake to take model, for 0.3 s (track.artifacts_s)" in waiting
    assert "fake had not taken model 0.3 s later, and was ended" in ended and str(tmp_path) in ended


def test_one_that_is_not_open_says_that_it_took_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(external.ADAPTERS, "fake", AdapterSpec("fake_adapter:Nothing", "json"))
    run = RunOf(tmp_path, artifacts=["model"])
    leave(tmp_path)
    run.end()
    assert any("track.trackers: fake failed: AttributeError" in line for line in run.messages.lines)
    assert any("it is not open, and model did not go there (track.artifacts)" in line for line in run.messages.lines)


def test_hostile_texts_arrive_as_text_and_long_ones_are_cut(tmp_path: Path) -> None:
    texts = [
        "<script>alert(1)</script>",
        "\x1b[2J\x00\x9b1m",
        "a\u202eb\u2066",
        "\ud800 half",
        "x" * (1 << 20),
        "a\tb\nc\U0001f600",
    ]
    of = group(1, [rollout(1, sibling, 0.5, [segment([1, 2])]) for sibling in range(len(texts))])
    run = RunOf(tmp_path, tracker_rollouts=len(texts))
    assert run.tools.wants_groups
    run.trackers.on_groups(1, [RecordedGroup(of, texts, [0.5] * len(texts))])
    run.end()
    ((_, step, rows),) = run.told("rollouts")
    assert step == 1 and [row["completion"] for row in rows] == [
        "<script>alert(1)</script>",
        "\u241b[2J\u2400[U+009B]1m",
        "a[U+202E]b[U+2066]",
        "\ufffd half",
        "x" * 10_000 + " [cut here: 1,048,576 characters]",
        "a\tb\nc\U0001f600",
    ]
    assert rows[0]["score"] == 0.5 and rows[0]["outcome"] == "trained" and rows[0]["tokens"] == 2


def test_a_sample_is_taken_evenly() -> None:
    groups = [
        RecordedGroup(group(n, [rollout(n, s, 0.5, [segment([1])]) for s in range(4)]), ["a"] * 4, [None] * 4)
        for n in (1, 2)
    ]
    ids = [row["rollout_id"] for row in sample_of(3, groups, 4)]
    assert ids == [groups[g].group.rollouts[s].rollout_id for g, s in ((0, 0), (0, 2), (1, 0), (1, 2))]
    assert sample_of(3, groups, 0) == [] and len(sample_of(3, groups, 99)) == 8


def test_the_record_of_a_step_gives_the_same_sample(tmp_path: Path) -> None:
    groups = [
        RecordedGroup(
            group(n, [rollout(n, s, 0.25, [segment([1, 2])]) for s in range(3)]), ["a\x1b"] * 3, [0.5, None, -1]
        )
        for n in (1, 2)
    ]
    path = RolloutRecorder(tmp_path / "rollouts").write(3, groups)
    assert sample_of_records(list(records_of(path)), 4) == sample_of(3, groups, 4) != []


def test_rollouts_of_steps_that_are_told_from_files_are_told_too(tmp_path: Path) -> None:
    def of(step: int) -> list[RecordedGroup]:
        return [RecordedGroup(group(step, [rollout(step, 0, 0.5, [segment([1])])]), [f"of {step}"], [0.5])]

    for step in (1, 2):
        RolloutRecorder(tmp_path / "rollouts").write(step, of(step))
    run = RunOf(tmp_path, cut=None)
    for step in (1, 2):
        run.trackers.named["metrics"].on_step({"step": step, "loss": 0.5})
    run.trackers.truncate(Cut(2))
    run.trackers.on_groups(3, of(3))
    run.step(3)
    run.end()
    told = [(kind, step, what[0]["completion"] if kind == "rollouts" else what) for kind, step, what in run.told()]
    assert told[:-1] == [
        ("rollouts", 1, "of 1"), ("row", 1, 0.5), ("rollouts", 2, "of 2"), ("row", 2, 0.5), ("rollouts", 3, "of 3"),
        ("row", 3, 1.0),
    ]  # fmt: skip


def test_a_damaged_record_is_said_and_costs_no_row(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text("{}\n")
    run = RunOf(tmp_path, cut=None)
    run.trackers.named["metrics"].on_step({"step": 1, "loss": 0.5})
    run.trackers.truncate(Cut(1))
    run.end()
    assert run.told("row") == [["row", 1, 0.5]]
    assert any("step-000001.jsonl:1: not a recorded rollout" in line for line in run.messages.lines)


def test_names_can_be_paths_of_files() -> None:
    values = {"time": 1, "time/a": 2, "x/../y": 3, "": 4, "a//\u202e": 5, "n" * 300: 6, "a.b/c-d e:f": 7}
    assert as_paths(values, 250) == {
        "time_": 1, "time/a": 2, "x/_/y": 3, "_": 4, "a/_/_": 5, "n" * 100 + "..." + "n" * 147: 6, "a.b/c-d e:f": 7,
    }  # fmt: skip


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "abcdefgh")
    monkeypatch.setenv("SOME_PASSWORD", "true")
    assert redacted("abcdefgh is true at http://me:word@host/x") == "*** is true at http://***@host/x"
    assert without_secrets({"a": ["abcdefgh", 1, None], "b": {"c": "ok"}}) == {"a": ["***", 1, None], "b": {"c": "ok"}}


def test_no_group_is_wanted_where_no_rollout_is_shown(tmp_path: Path) -> None:
    assert not ExternalTrackers(["fake"], TrackConfig(trackers=["fake"], tracker_rollouts=0)).wants_groups


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("track.trackers", '["comet"]')], "is none of wandb, tensorboard.*, and no function"),
        ([("track.trackers", '["tensorboard", "tensorboard"]')], "name each once"),
        ([("track.trackers", '["tensorboard"]'), ("track.artifacts", '["model"]')], "TensorBoard keeps no files"),
        ([("track.trackers", '["wandb"]'), ("track.artifacts", '["all"]')], 'expected a list of "model", "best_model"'),
        (
            [*MODEL, ("checkpoint.save_final_model", "false")],
            "track.artifacts has model, and checkpoint.save_final_model = false: there is none",
        ),
        (
            [("track.trackers", '["wandb"]'), ("track.artifacts", '["best_model"]')],
            "track.artifacts has best_model, and checkpoint.save_best_model = false",
        ),
        ([*MODEL, ("backend.type", "tinker")], 'track.artifacts has model, and backend.type = "tinker"'),
    ],
)
def test_options_without_effect_are_refused(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config([], overrides, require_sources=False)


def test_a_missing_tracker_package_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(external.ADAPTERS, "tensorboard", AdapterSpec("x:Y", "no_such_library"))
    config = load_config([], [("track.trackers", '["tensorboard"]')], require_sources=False).config
    said = 'track.trackers: tensorboard is not installed: pip install "rollover[tensorboard]"'
    with pytest.raises(ValueError, match=re.escape(said)):
        build_trackers(config, tmp_path)


def test_each_tool_is_an_option_an_extra_and_a_short_file() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = [name for name in external.ADAPTERS if name != "fake"]
    assert tuple(names) == TOOLS
    for name in names:
        module, _, kind = external.ADAPTERS[name].adapter.partition(":")
        file = REPOSITORY / "src" / f"{module.replace('.', '/')}.py"
        assert len(file.read_text().splitlines()) < 100 and f"class {kind}(Adapter)" in file.read_text()
        assert name in project["optional-dependencies"]


def test_the_options_reach_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(external.AdapterProcess, "start", lambda self: None)
    monkeypatch.setattr(external.AdapterProcess, "send", lambda self, message, always=False: told.append(message))
    options = {"project": "p", "group": "g", "entity": "e", "tags": ["a", "b"]}
    tools = ExternalTrackers(["fake"], TrackConfig(trackers=["fake"], **options))
    tools.on_start(RunInfo("demo", tmp_path, {"key": "s3cr3t-of-the-user"}, resumed=False))
    about = told[0]["about"]
    assert {key: about[key] for key in options} == options and about["config"] == {"key": "***"}
    assert about["name"] == "demo" and about["directory"] == str(tmp_path)
