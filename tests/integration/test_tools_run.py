"""Runs that are shown in tools: over a SIGKILL and a resume in one run, and beside a server that never answers."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main
from rollover.plugins.trackers.adapter import numbers_of, numbers_of_eval

KILLED_AT = Path(__file__).with_name("killed_at.py")


def recipe(folder: Path, tool: str, **track: Any) -> Path:
    tables = {"track": {"live": "plain", "trackers": [tool], **track}, "eval": {"num_tasks": 2, "every_steps": 2}}
    in_turns = {"in_flight_groups": 3, "interrupt": "never", "max_staleness": 0}  # the same whatever takes how long
    return runs.write(folder, steps=6, rollout={} if tool == "tensorboard" else in_turns, **tables)


@pytest.mark.parametrize("lost_steps", ["replay", pytest.param("roll_back", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_in_the_same_events(tmp_path: Path, lost_steps: str) -> None:
    """The kill comes after a checkpoint and a step: that is trained again, or rolled back and other ones come."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file, rest = recipe(tmp_path, "tensorboard"), ["--checkpoint.lost_steps", lost_steps]
    killed = runs.rollover("rollover.track.jsonl:MetricsFile.on_step", 4, "train", file, *rest, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL
    assert main(["train", str(file), "--resume", *rest]) == 0
    read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    found = {(e.step, tag): e.value for tag in read.Tags()["scalars"] for e in read.Scalars(tag)}
    assert len(found) == sum(len(read.Scalars(tag)) for tag in read.Tags()["scalars"]), "none is there twice"
    rows, evals = (runs.json_lines(tmp_path / "run" / name) for name in ("metrics.jsonl", "eval.jsonl"))
    want = {(row["step"], key): value for row in rows for key, value in numbers_of(row).items()}
    want |= {(row["step"], key): value for row in evals for key, value in numbers_of_eval(row).items()}
    assert found == pytest.approx(want, rel=1e-6) and [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    texts = [t.tensor_proto.string_val[0].decode() for tag in ("rollouts", "answers") for t in read.Tensors(tag)]
    assert "rollout_id: " in texts[0] and any("answer: " in text for text in texts)


@pytest.fixture
def hanging(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A server that takes every connection, and never answers; the list of those that came."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def take() -> None:
            while True:
                try:
                    came.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        for name in ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL", "SWANLAB_API_HOST"):
            monkeypatch.setenv(name, address)
        for name in ("WANDB", "SWANLAB"):
            monkeypatch.setenv(f"{name}_API_KEY", "f00dfeed" * 5)
            monkeypatch.setenv(f"{name}_MODE", "online")
        monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "f00dfeed" * 5)
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # of the user's, no run's
        yield came
        server.shutdown(socket.SHUT_RDWR)
    for connection, _ in came:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_server_that_never_answers_loses_no_training(tmp_path: Path, tool: str, hanging: list[Any], capsys) -> None:
    pytest.importorskip(tool)
    weights = {}
    for name, trackers in (("with", [tool]), ("without", [])):
        folder = tmp_path / name
        file = recipe(folder, tool, finish_s=5.0 if trackers else None, trackers=trackers)
        assert main(["train", str(file)]) == 0
        rows = runs.rows(folder)
        weights[name] = [(row["step"], row["loss"], row["reward/mean"]) for row in rows]
    assert hanging, "it was asked"
    assert weights["with"] == weights["without"] and len(weights["with"]) == 6
    out = capsys.readouterr().out
    assert f"track.trackers: {tool} had not taken" in out and "5 s after the end (track.finish_s)" in out
    text = json.dumps([path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()])
    assert "f00dfeedf00dfeed" not in text, "a credential is in the run's directory"
