"""Trackers: what every one does, and what their stores hold."""

from __future__ import annotations

import importlib
import json
import math
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.parquet import read_table

from heard import hear
from rollover.config import TrackConfig
from rollover.config.load import load_config
from rollover.plugins.trackers.adapter import About, numbers_of, numbers_of_eval
from rollover.plugins.trackers.external import ADAPTERS, ExternalTrackers
from rollover.track.build import TRACKERS, build_trackers
from rollover.track.jsonl import EvalFile, MetricsFile, read_rows
from rollover.track.metric_keys import METRICS
from rollover.track.trace import Trace
from rollover.track.tracker import Cut, RecordedGroup, RunInfo, Tracker, Trackers
from samples import group, rollout, segment

# What every tracker of a run keeps to: ours by the table, and one of the user's own


OWN = """
from rollover.track.tracker import Tracker

class Last(Tracker):
    def on_step(self, row):
        row["step"] = 99  # a copy: nobody else sees that
"""
EVENTS = [name for name in vars(Tracker) if not name.startswith("_") and name != "wants_groups"]


@pytest.fixture
def built(tmp_path: Path) -> Callable[[], Trackers]:
    """The trackers of a process of one run; each call is the next process."""
    (tmp_path / "own.py").write_text(OWN)
    overrides = [
        ("track.trackers", f'["{tmp_path}/own.py:Last"]'),
        ("track.live", "plain"),
        ("track.format", '["jsonl", "parquet"]'),
    ]
    config = load_config([], overrides, require_sources=False).config
    return lambda: build_trackers(config, tmp_path)


def recorded(number: int) -> RecordedGroup:
    of = group(number, [rollout(number, sibling, 0.5, [segment([1, 2])]) for sibling in range(2)])
    return RecordedGroup(of, ["text"] * len(of.rollouts), [0.5] * len(of.rollouts))


def tell(tracker: Tracker, step: int) -> None:
    """Everything that happens around a step."""
    tracker.on_phase("training")
    groups = [recorded(step)]
    tracker.on_groups(step, groups)
    tracker.on_step({"step": step, "reward/mean": 0.5, "loss": None})
    tracker.on_message("a line")
    tracker.on_eval({"step": step, "mean": 0.5})


def files(folder: Path) -> dict[str, Any]:
    """What is in them: bytes, or rows where bytes say when something was written."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {
        str(path.relative_to(folder)): read_table(path).to_pylist() if path.suffix == ".parquet" else path.read_bytes()
        for path in found
    }


def info(folder: Path, *, resumed: bool = False) -> RunInfo:
    return RunInfo("demo", folder, {}, resumed)


NAMES = [*TRACKERS, "own"]


def of_name(trackers: Trackers, name: str) -> Tracker:
    return trackers.named[name] if name in TRACKERS else next(iter(trackers.named.values()))


# The table of metrics is made again from the file of them: tests/integration/test_parquet_run.py.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "metrics table"])
def test_a_run_that_goes_on_leaves_what_a_whole_one_leaves(built: Callable[[], Trackers], name: str, tmp_path) -> None:
    """Steps 1 to 3, where a process that was killed after its second step is followed by one that goes on after the
    first. Groups that come again are those of the step that was lost."""
    left = {}
    for way in ("whole", "killed"):
        tracker = of_name(built(), name)
        tracker.on_start(info(tmp_path))
        tracker.truncate(Cut(-1))
        tell(tracker, 1)
        if way == "killed":
            tracker.on_groups(1, [recorded(5)])  # dropped after the checkpoint
        tell(tracker, 2)
        if way == "killed":
            tracker.close()
            tracker = of_name(built(), name)
            tracker.on_start(info(tmp_path, resumed=True))
            tracker.truncate(Cut(1, next_group_id=2))
            tell(tracker, 2)
        tell(tracker, 3)
        tracker.close()
        left[way] = files(tmp_path)
    assert left["whole"] == left["killed"]


def test_the_protocol_is_taken_as_a_whole_by_the_list(built: Callable[[], Trackers]) -> None:
    """An event that the list, or the guard around an own tracker, did not hand on would be told to nobody."""
    trackers = built()
    for kind in (Trackers, type(of_name(trackers, "own"))):
        assert {*EVENTS, "wants_groups"} <= vars(kind).keys(), kind


def test_each_hears_of_each_event_once_in_the_order_of_the_list() -> None:
    heard: list[tuple[str, str]] = []

    def listening(name: str) -> Tracker:
        def hear(event: str):
            return lambda self, *arguments: heard.append((event, name))

        return type("Listening", (Tracker,), {event: hear(event) for event in EVENTS})()

    trackers = Trackers()
    for name in ("first", "second"):
        trackers.add(name, listening(name))
    trackers.on_start(info(Path(".")))
    trackers.truncate(Cut(-1))
    tell(trackers, 1)
    trackers.close()
    events = ["on_start", "truncate", "on_phase", "on_groups", "on_step", "on_message", "on_eval"]
    assert heard[:-2] == [(event, name) for event in events for name in ("first", "second")]
    assert set(heard[-2:]) == {("close", "first"), ("close", "second")}


def test_the_table_names_them_and_a_row_is_its_writers_alone(built: Callable[[], Trackers], tmp_path: Path) -> None:
    trackers = built()
    first, *rest = trackers.named
    assert rest == list(TRACKERS) and first.endswith("own.py:Last"), "a step that our files have was told to it"
    row = {"step": 1}
    trackers.on_step(row)
    assert row == {"step": 1} and (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert trackers.of_type(Trace) is trackers.named["trace"] and trackers.stats() == {"trackers/failed": 0}


def test_all_are_closed_though_one_fails() -> None:
    closed: list[str] = []

    class Closing(Tracker):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise OSError("full")

    trackers = Trackers()
    for name in "abc":
        trackers.add(name, Closing(name))
    with pytest.raises(OSError, match="full"):
        trackers.close()
    assert sorted(closed) == ["a", "b", "c"]


# Each tool of `track.trackers` with its real library, without a network: what it stores is what the run's files
# have


SECRET = "f00dfeedf00dfeedf00dfeedf00dfeedf00dfeed"
HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[2J\x00",
    "a\u202eb",
    "\ud800 half",
    "y" * (1 << 20),
    "plain \u00e9\nlines",
]
SHOWN = ["<script>alert(1)</script>", "\u241b[2J\u2400", "a[U+202E]b", "\ufffd half", "[cut here: 1,048,576", "lines"]
Points = dict[tuple[int, str], float]


@dataclass
class Stored:
    """What a tool has of all runs: the values of each point (several, where a step is there twice), and texts."""

    runs: int
    points: dict[tuple[int, str], list[float]]
    texts: str
    config: str


def read_tensorboard(folder: Path) -> Stored:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder / "run" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    points: dict[tuple[int, str], list[float]] = {}
    texts = {tag: [t.tensor_proto.string_val[0].decode() for t in read.Tensors(tag)] for tag in read.Tags()["tensors"]}
    assert {"config", "rollouts"} <= texts.keys() <= {"config", "rollouts", "answers"}
    for tag in read.Tags()["scalars"]:
        for point in read.Scalars(tag):
            points.setdefault((point.step, tag), []).append(point.value)
    return Stored(1, points, "\n".join(texts["rollouts"] + texts.get("answers", [])), texts["config"][0])


def records(file: Path, record_type: Any) -> Iterator[Any]:
    """Of an offline file of W&B or SwanLab: LevelDB's log format behind a header of 7 bytes."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record_type.FromString(parts)
            parts = b""


def read_wandb(folder: Path) -> Stored:
    (file,) = (folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    points: dict[tuple[int, str], list[float]] = {}
    runs, config = set(), ""
    for record in records(file, pytest.importorskip("wandb.proto.wandb_internal_pb2").Record):
        if record.HasField("run"):
            runs.add(record.run.run_id)
            assert (record.run.project, record.run.display_name, record.run.run_group) == ("shown", "demo run", "g")
            config += str(record.run.config)
        elif record.HasField("history"):
            values = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            for key, value in values.items():
                if not key.startswith("_") and isinstance(value, int | float):
                    points.setdefault((values["_step"], key), []).append(value)
    tables = [json.loads(path.read_text()) for path in file.parent.glob("files/media/table/*.json")]
    cells = [str(cell) for table in tables for row in table["data"] for cell in row]
    return Stored(len(runs), points, "\n".join(cells), config)


def read_trackio(folder: Path) -> Stored:
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as store:
        ids = {run for (run,) in store.execute("SELECT DISTINCT run_id FROM metrics")}
        points: dict[tuple[int, str], list[float]] = {}
        for step, values in store.execute("SELECT step, metrics FROM metrics"):
            for key, value in json.loads(values).items():
                if isinstance(value, int | float):
                    points.setdefault((step, key), []).append(value)
        texts = [text for row in store.execute("SELECT messages FROM traces") for text in _leaves(json.loads(row[0]))]
        config = "".join(str(row[0]) for row in store.execute("SELECT config FROM configs"))
    return Stored(len(ids), points, "\n".join(texts), config)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value if isinstance(value, list) else value.values():
            yield from _leaves(item)


def read_mlflow(folder: Path) -> Stored:
    client = pytest.importorskip("mlflow").MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("shown").experiment_id])
    points: dict[tuple[int, str], list[float]] = {}
    for key in runs[0].data.metrics:
        for point in client.get_metric_history(runs[0].info.run_id, key):
            points.setdefault((point.step, key), []).append(point.value)
    assert runs[0].data.tags["a"] == "true" and runs[0].info.run_name == "demo run"
    place = Path(runs[0].info.artifact_uri.removeprefix("file://"))
    tables = [json.loads(path.read_text()) for path in place.glob("*/step-*.json")]
    cells = [str(cell) for table in tables for row in table["data"] for cell in row]
    assert "learning_rate" in (place / "config.json").read_text()
    return Stored(len(runs), points, "\n".join(cells), str(runs[0].data.params))


def read_swanlab(folder: Path) -> Stored:
    (file,) = (folder / "run" / "swanlog").glob("run-*/run-*.swanlab")
    points: dict[tuple[int, str], list[float]] = {}
    runs = set()
    for record in records(file, pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2").Record):
        if record.HasField("start"):
            runs.add(record.start.id)
            assert (record.start.project, record.start.name, record.start.group) == ("shown", "demo run", "g")
        elif record.HasField("scalar") and not record.scalar.key.startswith("__swanlab__"):
            points.setdefault((record.scalar.step, record.scalar.key), []).append(record.scalar.value.number)
    texts = [path.read_text() for path in file.parent.glob("media/text/*")]
    return Stored(len(runs), points, "\n".join(texts), (file.parent / "files" / "config.yaml").read_text())


READ: dict[str, Callable[[Path], Stored]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
}


# The others take seconds to be imported, in every process of a run.
PARAMS = [pytest.param(name, marks=[] if name == "tensorboard" else pytest.mark.slow) for name in READ]


@pytest.fixture(params=PARAMS)
def tool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip(ADAPTERS[request.param].library, reason=f'pip install "rollover[{request.param}]"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    return request.param


class RunOf:
    """A process of the run in `folder`/run: its files, and one tool."""

    def __init__(
        self, tool: str, folder: Path, *, resumed: bool, cut: int, name: str = "demo run", project: str = "shown"
    ) -> None:
        self.path, self.messages = folder / "run", hear([])
        self.path.mkdir(exist_ok=True)
        config = TrackConfig(
            trackers=[tool], project=project, group="g", tags=["a"], finish_s=300.0, tracker_rollouts=len(HOSTILE),
            artifacts=["model", "records"],
        )  # fmt: skip
        self.files, self.tools = Trackers(), ExternalTrackers([tool], config)
        self.files.add("metrics", MetricsFile(self.path / "metrics.jsonl"))
        self.files.add("evals", EvalFile(self.path / "eval.jsonl"))
        for trackers in (self.files, self.tools):
            trackers.on_start(RunInfo(name, self.path, {"train": {"learning_rate": 1e-3}}, resumed=resumed))
            trackers.truncate(Cut(cut))

    def step(self, step: int, salt: float = 0.0) -> None:
        row = {metric.key: step + n / 7 for n, metric in enumerate(METRICS) if "{" not in metric.key} | {
            "reward/../up \x1b/mean": 0.5, "step": step, "policy_version": step, "reward/mean": step / 3 + salt,
            "loss": -1.5 * step, "entropy": math.nan, "tokens/generated": 10**9 + step, "grad_norm": None,
        }  # fmt: skip
        for trackers in (self.files, self.tools):
            of = group(step, [rollout(step, s, 0.5, [segment([1, 2])]) for s in range(len(HOSTILE))])
            trackers.on_groups(step, [RecordedGroup(of, HOSTILE, [0.5] * len(HOSTILE))])
            trackers.on_step(row)

    def evaluate(self, step: int) -> None:
        folder = self.path / "evaluations"
        folder.mkdir(exist_ok=True)
        answer = {"task_id": "t", "prompt": "two and two", "answer": f"answer after {step}\x1b[1m", "score": 0.5}
        (folder / f"step-{step:06d}.jsonl").write_text(json.dumps(answer) + "\n")
        row = {
            "step": step,
            "policy_version": step,
            "mean": step / 7,
            "ci": [0.1, None],
            "sources": {"a b": {"mean": 1}},
        }
        for trackers in (self.files, self.tools):
            trackers.on_eval(row)

    def end(self, *, finished: bool = False) -> None:
        if finished:
            (self.path / "finished").write_text("{}")
        self.tools.on_phase("done")
        for trackers in (self.files, self.tools):
            trackers.close()
        assert self.tools.stats() == {"trackers/failed": 0, "trackers/lost": 0}, self.messages

    def kill(self) -> None:
        self.until_taken()
        for tool in self.tools.adapters:
            tool.kill()
        self.files.close()

    def until_taken(self) -> None:
        deadline = time.monotonic() + 300
        while self.tools.adapters[0].num_pending:
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.05)


def expected(folder: Path) -> Points:
    points: Points = {}
    for row in read_rows(folder / "run" / "metrics.jsonl"):
        points |= {(row["step"], key): value for key, value in numbers_of(row).items()}
    for row in read_rows(folder / "run" / "eval.jsonl"):
        points |= {(row["step"], key): value for key, value in numbers_of_eval(row).items()}
    return points


def check(tool: str, folder: Path) -> Stored:
    stored, want = READ[tool](folder), expected(folder)
    names = {
        "mlflow": {"time": "time_", "reward/../up \u241b/mean": "reward/_/up _/mean"},  # there they are paths
        "trackio": {"time": "time_"},
    }.get(tool, {})
    want = {(step, names.get(key, key)): value for (step, key), value in want.items()}
    assert stored.runs == 1
    single = 1e-6 if tool == "tensorboard" else 0.0  # its numbers are of single precision
    for point, value in want.items():
        assert [pytest.approx(value, rel=single, abs=0)] == stored.points.get(point), point
    ours = {key for _, key in want}
    assert {point for point in stored.points if point[1] in ours} == set(want)
    return stored


def test_it_has_what_the_files_have(tool: str, tmp_path: Path) -> None:
    run = RunOf(tool, tmp_path, resumed=False, cut=-1)
    run.evaluate(0)
    for step in (1, 2, 3):
        run.step(step)
    run.evaluate(3)
    run.end()
    stored = check(tool, tmp_path)
    assert "learning_rate" in stored.config
    for text in ("answer after 0\u241b[1m", "answer after 3", *SHOWN):
        assert text in stored.texts, text
    assert not any(character in stored.texts for character in "\x1b\x00\u202e\ud800")
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not leaks, "a credential is in a file"


@pytest.mark.slow
def test_a_row_that_a_kill_cut_off_in_mlflow_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store of files takes one number after the other."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = RunOf("mlflow", tmp_path, resumed=False, cut=-1)
    run.step(1)
    run.evaluate(1)
    run.kill()
    client = mlflow.MlflowClient()
    (stored,) = client.search_runs([client.get_experiment_by_name("shown").experiment_id])
    client.log_metric(stored.info.run_id, "reward/mean", 9.0, step=2)
    again = RunOf("mlflow", tmp_path, resumed=True, cut=1)
    again.step(2)
    again.end()
    check("mlflow", tmp_path)


def artifacts_of(tool: str, folder: Path) -> dict[str, bytes]:
    """What a tool has of model and records: the files' paths there, and what is in them."""
    if tool == "mlflow":
        client = pytest.importorskip("mlflow").MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("shown").experiment_id])
        place = Path(run.info.artifact_uri.removeprefix("file://"))
        return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    if tool == "swanlab":
        (place,) = (folder / "run" / "swanlog").glob("run-*/files")
        return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    if tool == "trackio":
        (file,) = (folder / "trackio").glob("*.db")
        kept = "SELECT name, type, manifest FROM artifacts JOIN artifact_versions ON artifacts.id = artifact_id"
        with sqlite3.connect(file) as store:
            found = {}
            for name, kind, manifest in store.execute(kept):
                assert name.startswith("demo-run-") and kind == name.rpartition("-")[2]
                for entry in json.loads(manifest):
                    (blob,) = (folder / "trackio").rglob(entry["digest"])
                    found[f"{kind}/{entry['path']}"] = blob.read_bytes()
        return found
    (file,) = (folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    found = {}
    for record in records(file, pytest.importorskip("wandb.proto.wandb_internal_pb2").Record):
        artifact = record.artifact if record.HasField("artifact") else record.request.log_artifact.artifact
        for entry in artifact.manifest.contents:
            found[f"{artifact.type}/{entry.path}"] = Path(entry.local_path).read_bytes()
    return found


def test_it_keeps_what_a_finished_run_leaves(tool: str, tmp_path: Path) -> None:
    run = RunOf(tool, tmp_path, resumed=False, cut=-1)
    run.step(1)
    left = {"model/config.json": b"{}", "model/deep/tokens.json": b"[1]", "rollouts/step-000001.jsonl": b"[]\n"}
    for name, content in left.items():
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_bytes(content)
    left["metrics.jsonl"] = (run.path / "metrics.jsonl").read_bytes()
    run.end(finished=True)
    if tool == "tensorboard":
        return  # keeps no files: refused where it stands alone
    found = artifacts_of(tool, tmp_path)
    for name, content in left.items():
        places = [place for place in found if place.endswith(name.removeprefix("model/"))]
        assert any(found[place] == content for place in places), (name, sorted(found))
    check(tool, tmp_path)


@pytest.mark.parametrize("cut", [2, 4], ids=["back", "on"])
def test_a_run_that_was_killed_goes_on_as_one_run(tool: str, tmp_path: Path, cut: int) -> None:
    """Back: two steps are undone, and come again with other values. On: one step is in the files alone."""
    first = RunOf(tool, tmp_path, resumed=False, cut=-1)
    first.evaluate(0)
    for step in (1, 2):
        first.step(step)
    first.evaluate(2)
    first.step(3)
    if cut == 2:
        first.step(4)
    first.kill()
    if cut == 4:
        late = MetricsFile(tmp_path / "run" / "metrics.jsonl")
        late.on_step({"step": 4, "reward/mean": 0.75})
        late.close()
    second = RunOf(tool, tmp_path, resumed=True, cut=cut)
    for step in range(cut + 1, 7):
        second.step(step, salt=0.01)
    second.evaluate(6)
    second.end()
    stored = check(tool, tmp_path)
    assert {step for step, _ in stored.points if step > 0} == {1, 2, 3, 4, 5, 6}
    third = RunOf(tool, tmp_path, resumed=True, cut=6)
    third.step(7)
    third.end()
    check(tool, tmp_path)


STORES = ["../../up", "/etc/x", "a//b", "\x1b[2J\x00", "\u202ename", "", ".", "n" * 400, "\U0001f600", "half \ud800"]


def test_a_source_may_be_called_anything(tool: str, tmp_path: Path) -> None:
    """Data may give the name: no row is lost for it."""
    run = RunOf(tool, tmp_path, resumed=False, cut=-1)
    run.step(1)
    sources = {name: {"mean": 0.25} for name in STORES} | {"plain": {"mean": 0.75}}
    for trackers in (run.files, run.tools):
        trackers.on_eval({"step": 1, "policy_version": 1, "mean": 0.5, "sources": sources})
    run.step(2)
    run.end()
    stored = READ[tool](tmp_path)
    found = {key: stored.points[1, key] for key in ("eval/mean", "eval/sources/plain/mean", "loss")}
    assert found == {"eval/mean": [0.5], "eval/sources/plain/mean": [0.75], "loss": [-1.5]}
    found = sum(key.startswith("eval/sources/") for _, key in stored.points)
    assert found == len(STORES) + 1 or (tool == "mlflow" and found > 6), "there several become _"
    assert all(character not in key for _, key in stored.points for character in "\x1b\x00\u202e\ud800")


def test_a_run_may_be_called_as_a_path_is(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where the name leads."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "shared"))
    run = RunOf(tool, folder, resumed=False, cut=-1, name="../../up \x1b[1m")
    run.step(1)
    run.end()
    (folder / "run" / "tracked_as").unlink()
    run = RunOf(tool, folder, resumed=False, cut=-1, project="../../up")
    run.step(1)
    for trackers in (run.files, run.tools):
        trackers.close()
    failed = run.tools.stats()["trackers/failed"]
    assert not failed or any("roject" in line and "../../up" in line for line in run.messages), "it may refuse that one"
    assert not [path for path in (tmp_path / "a").rglob("up*") if folder not in path.parents]
    assert not list(tmp_path.parent.glob("up*"))


class Server:
    """What W&B's server knows of one run, and `wandb.init` beside it. `rewinds`: whether it can."""

    def __init__(self, last: int, rewinds: bool) -> None:
        self.last, self.rewinds, self.asked = last, rewinds, []

    def init(self, **how: Any) -> Any:
        self.asked.append({key: how[key] for key in ("id", "resume", "resume_from") if key in how})
        if "resume_from" in how:
            if not self.rewinds:
                raise RuntimeError("rewind is not enabled")
            self.last = int(how["resume_from"].partition("=")[2])
        return SimpleNamespace(step=self.last + 1, url="https://host/run", finish=lambda exit_code=0: None)


@pytest.mark.parametrize(
    ("last", "cut", "rewinds", "last_steps", "calls"),
    [
        (-1, -1, True, -1, 1),  # a new run
        (5, 5, True, 5, 1),  # all is there
        (4, 5, True, 4, 1),  # one step is told from the files
        (7, 5, True, 5, 2),  # two steps are undone
        (7, 5, False, 7, 3),  # they stay, where the server does not rewind
    ],
)
def test_a_run_of_wandb_online_is_rewound_where_its_server_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, cut: int, rewinds: bool, last_steps: int, calls: int
) -> None:
    pytest.importorskip("wandb", reason='pip install "rollover[wandb]"')
    ours = importlib.import_module("rollover.plugins.trackers.wandb_adapter")
    server = Server(last, rewinds)
    settings = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    fake = SimpleNamespace(init=server.init, setup=lambda: settings, Settings=dict)
    monkeypatch.setattr(ours, "wandb", fake)
    tool = ours.Wandb(About("1d", "demo", tmp_path, "p", "", "", (), {}))
    tool.truncate(Cut(cut))
    assert tool.last_steps == (last_steps, last_steps) and len(server.asked) == calls
    assert {asked["id"] for asked in server.asked} == {"1d"} and server.asked[0]["resume"] == "allow"


def test_the_backend_is_lost_in_the_midst(tool: str, tmp_path: Path) -> None:
    run = RunOf(tool, tmp_path, resumed=False, cut=-1)
    for step in (1, 2, 3):
        run.step(step)
    run.until_taken()
    for trackers in (run.files, run.tools):
        trackers.truncate(Cut(1))
    for step in (2, 3):
        run.step(step, salt=0.01)
    run.end()
    check(tool, tmp_path)
