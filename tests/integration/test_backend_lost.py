"""Where the trainer's backend is lost, the run goes on in the same command, as after a kill and --resume."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import runs
from endings import before_step, train
from runs import check_whole
from test_workflow_run import check_whole_of_agents
from test_workflow_run import of_function as of_agents

import rollover
from rollover import cli
from rollover.run.loop import Run
from rollover.run.setup import Components
from rollover.trainer.backend import BackendLost

BACKEND = Path(__file__).with_name("losing_backend.py")
SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}
OVERLAP = {"overlap": True, "interrupt": "on_weight_update"}
# What differs from run to run, or says how many losses there were.
NOT_TOLD = ("time/", "time", "speed/", "perf/", "memory/", "journal/", "state/", "wait/", "train/restarts")
# What a step trained, and the accounts: who generated for it, and when, was lost with the process, or was not.
OF_TRAINING = (
    "step", "loss", "grad_norm", "entropy", "learning_rate", "reward/mean", "length/mean", "staleness/mean",
    "tokens/generated", "tokens/trained", "tokens/dropped", "tokens/held", "groups/admitted", "groups/consumed",
)  # fmt: skip


TRACKER = """
import json, rollover

class Table(rollover.Tracker):
    def on_start(self, run):
        self.path, self.rows = run.directory / "table.jsonl", []

    def truncate(self, cut):
        self.rows = [row for row in self.rows if row["step"] <= cut.step]

    def on_step(self, row):
        self.rows.append({"step": row["step"], "loss": row["loss"]})

    def close(self):
        self.path.write_text("".join(json.dumps(row) + chr(10) for row in self.rows))
"""


def write(folder: Path, *losses: str, **tables: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(BACKEND, folder)
    (folder / "losses.txt").write_text("\n".join(losses))
    tables["backend"] = {"type": f"{folder / BACKEND.name}:make"}
    tables["checkpoint"] = {"every_steps": 2, "save_final_model": False} | tables.get("checkpoint", {})
    tables["rollout"] = {"max_new_tokens": 12} | tables.get("rollout", {})
    return runs.write(folder, **{"steps": 5, **tables})  # type: ignore[arg-type]


def told(folder: Path) -> list[dict[str, Any]]:
    """The rows, without what differs from run to run."""
    return [
        {k: v for k, v in row.items() if not k.startswith(NOT_TOLD) and not k.endswith("_s")}
        for row in runs.rows(folder)
    ]


def trained(folder: Path) -> list[dict[str, Any]]:
    return [{k: row[k] for k in OF_TRAINING} for row in runs.rows(folder)]


def answers(folder: Path) -> dict[str, list[int]]:
    return {record["rollout_id"]: record["token_ids"] for record in runs.records(folder / "run")}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its fourth step, and resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    recipe = write(folder, "forward_backward 3 kill", rollout=SYNC)
    assert cli.main(["train", str(recipe)]) == 130
    assert cli.main(["train", str(recipe), "--resume"]) == 0
    return folder


def test_a_run_that_lost_its_backend_is_as_one_that_was_killed_and_resumed(tmp_path, capsys, resumed: Path) -> None:
    code, text = train(capsys, write(tmp_path, "forward_backward 3", rollout=SYNC))
    assert code == 0 and "restart 1 of 3 without a step in between" in text, text
    assert told(tmp_path) == told(resumed)
    assert answers(tmp_path) == answers(resumed)
    assert [row["train/restarts"] for row in runs.rows(tmp_path)] == [0, 0, 0, 1, 1]


def test_backend_may_be_lost_in_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], resumed: Path) -> None:
    losses = (
        "make 0", "forward_backward 1", "load_state 0", "optim_step 2", "publish 3", "weights 4", "make 0",
        "save_state 4", "weights 5",
    )  # fmt: skip
    (tmp_path / "table.py").write_text(TRACKER)
    (tmp_path / "held.txt").touch()
    tables = {"eval": {"num_tasks": 3, "every_steps": 2}, "track": {"trackers": [f"{tmp_path}/table.py:Table"]}}
    code, text = train(capsys, write(tmp_path, *losses, rollout=SYNC, **tables))
    assert code == 0, text
    assert not (tmp_path / "losses.txt").read_text(), text
    assert trained(tmp_path) == trained(resumed) and answers(tmp_path) == answers(resumed)
    assert [row["step"] for row in runs.json_lines(tmp_path / "run" / "eval.jsonl")] == [0, 2, 4, 5]
    kept = runs.json_lines(tmp_path / "run" / "table.jsonl")
    assert kept == [{"step": row["step"], "loss": row["loss"]} for row in runs.rows(tmp_path)]
    # On a GPU there might be no room for what is lost beside what comes.
    assert set((tmp_path / "held.txt").read_text().split()) == {"0"}
    # Each of them was closed: what was lost while it was made is none.
    closed = (tmp_path / "closed.txt").read_text().split()
    assert closed.count("lost") == len(losses) - 2 and closed.count("whole") == 1


@pytest.mark.parametrize(("kind", "rollout"), [("process", {}), ("embedded", OVERLAP)], ids=["partial", "overlap"])
def test_run_goes_on_exactly_after_a_loss(tmp_path, capsys, monkeypatch, kind: str, rollout: dict[str, Any]) -> None:
    pids: list[tuple[int, ...]] = []

    def look(run: Run, version: int) -> None:
        if version:
            workers = (health.pid for health in run.components.rewarder.health() if health.pid is not None)
            pids.append((getattr(run.components.engine, "pid", id(run.components.engine)), *workers))

    before_step(monkeypatch, look)
    losses = ("forward_backward 0", "forward_backward 1", "optim_step 2", "weights 3", "save_state 4")
    recipe = write(
        tmp_path, *losses, rollout={**rollout, "max_new_tokens": 24}, engine={"kind": kind},
        rewards={"num_workers": 1},
    )  # fmt: skip
    code, text = train(capsys, recipe)
    assert code == 0 and text.count("the trainer's backend is lost: ") == len(losses), text
    check_whole(tmp_path / "run", 5)
    assert len(pids) >= 5 and len(set(pids)) == 1 and len(pids[0]) == 2, pids


def test_after_too_many_losses_without_a_step_the_run_ends_and_can_be_resumed(tmp_path: Path, capsys) -> None:
    """Steps that are made again are no steps in between: it would go on for ever."""
    recipe = write(
        tmp_path, "forward_backward 1", *3 * ["optim_step 3"], rollout=SYNC, cluster={"max_restarts": 2},
        checkpoint={"lost_steps": "roll_back", "every_steps": 3},
    )  # fmt: skip
    code, text = train(capsys, recipe)
    assert code == 1, text
    assert "lost 3 times without a step in between (cluster.max_restarts = 2), the last time: its process ended" in text
    assert f"--run.dir={tmp_path / 'run'} --resume" in text.partition("rollover: error: ")[2]
    code, text = train(capsys, recipe, "--resume")
    assert code == 0, text
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert {row["train/restarts"] for row in runs.rows(tmp_path)[1:]} == {1}  # the others are in no row


def test_what_a_resumed_run_began_with_is_not_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither which settings changed before it, nor from which checkpoint it was to go on."""
    recipe = write(tmp_path, rollout=SYNC)
    assert train(capsys, recipe, "--train.num_steps", "3")[0] == 0
    (tmp_path / "losses.txt").write_text("forward_backward 3\nforward_backward 4")
    words = ("--train.learning_rate", "5e-4", "--checkpoint.resume_from", "step-000002")
    code, text = train(capsys, recipe, "--resume", *words)
    assert code == 0 and text.count("settings that changed since") == 1 and "rolled back" not in text, text
    assert [line.split()[2].rstrip(":") for line in text.splitlines() if line.startswith("resumed from ")] == [
        "step-000002", "step-000002", "step-000004",
    ], text  # fmt: skip
    check_whole(tmp_path / "run", 5)


def test_run_without_journal_and_checkpoint_begins_again(tmp_path: Path, capsys, resumed: Path) -> None:
    recipe = write(tmp_path, "optim_step 2", rollout=SYNC, checkpoint={"every_steps": 0, "journal_s": 0})
    code, text = train(capsys, recipe)
    assert code == 0 and "no journal tells of its 2 steps, which are lost: it begins again" in text, text
    assert trained(tmp_path) == trained(resumed) and answers(tmp_path) == answers(resumed)


@pytest.mark.parametrize("when", ["before the loss", "while the model is loaded"])
def test_a_stop_ends_a_run_that_lost_its_backend(tmp_path: Path, capsys, monkeypatch, when: str) -> None:
    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    build, builds = Components.build, []

    async def build_and_press(*args: Any) -> Components:
        builds.append(args)
        if len(builds) == 2:
            press()
        return await build(*args)

    if when == "before the loss":
        recipe = write(tmp_path, "save_state 3")
        before_step(monkeypatch, lambda run, version: press() if version == 3 else None)
        says = "stopped without a checkpoint, as there is no backend; continue with:"
    else:
        recipe = write(tmp_path, "optim_step 3")
        monkeypatch.setattr(Components, "build", build_and_press)
        says = "stopped after step 3; continue with:"
    code, text = train(capsys, recipe)
    assert code == 130 and says in text, text
    monkeypatch.undo()
    code, text = train(capsys, recipe, "--resume")
    assert code == 0, text
    check_whole(tmp_path / "run", 5)


def test_agents_begin_again_at_the_same_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shutil.copy(BACKEND, tmp_path)
    (tmp_path / "losses.txt").write_text("forward_backward 1\nweights 2")
    backend = {"type": f"{tmp_path / BACKEND.name}:make"}
    recipe = of_agents(tmp_path, "over_http", steps=3, workflow={"port": port}, backend=backend, rollout=OVERLAP)
    code, text = train(capsys, recipe)
    assert code == 0 and text.count("the trainer's backend is lost") == 2, text
    check_whole_of_agents(tmp_path / "run", 3)


def walked(recipe: Path, do: Any = None, **changes: Any) -> list[rollover.Step]:
    """The steps that a session of the user's own sees; `do(session, step)` in its loop."""

    async def walk() -> list[rollover.Step]:
        seen: list[rollover.Step] = []
        async with rollover.Session(config=recipe, **changes) as session:
            async for step in session.steps():
                assert session.policy_version == step.number
                seen.append(step)
                if do is not None:
                    await do(session, step)
        return seen

    return asyncio.run(walk())


def test_who_walks_through_the_steps_sees_each_once(tmp_path: Path, resumed: Path) -> None:
    """Also the one whose weights were lost on their way to the engine: it was trained again, and is told then."""
    seen = walked(write(tmp_path, "optim_step 1", "weights 3", "save_state 4", rollout=SYNC))
    assert [step.number for step in seen] == [1, 2, 3, 4, 5]
    ids = {r.rollout_id for step in seen for group in step.groups for r in group.rollouts}
    assert ids == answers(resumed).keys()
    assert [step.metrics["loss"] for step in seen] == [row["loss"] for row in runs.rows(resumed)]
    # The second was lost after its groups were there; the row of the third is written where it is trained again.
    assert ["perf/generate_flops" in row for row in runs.rows(tmp_path)] == [True, False, False, True, True]


def test_who_walks_through_the_steps_sees_those_again_that_were_rolled_back(tmp_path: Path) -> None:
    asked: list[int] = []

    async def do(session: rollover.Session, step: rollover.Step) -> None:
        """Lost in a checkpoint of the user's own: what was asked for before that is done after it."""
        if step.number == 3 and not asked:
            asked.append(3)
            session.set("train.learning_rate", 5e-4)
            await session.checkpoint()
            assert session.policy_version == 2

    (tmp_path / "held.txt").touch()
    checkpoint = {"lost_steps": "roll_back"}
    seen = walked(write(tmp_path, "save_state 3", checkpoint=checkpoint), do)
    assert [step.number for step in seen] == [1, 2, 3, 3, 4, 5]
    assert (tmp_path / "held.txt").read_text().split() == ["0", "0"]
    rates = [row["learning_rate"] for row in runs.rows(tmp_path)]
    assert rates[1] != rates[2] and math.isclose(rates[1], 2 * rates[2])
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_the_loop_of_a_user_gets_the_error_in_the_end(tmp_path: Path) -> None:
    recipe = write(tmp_path, *2 * ["optim_step 1"], cluster={"max_restarts": 1})
    with pytest.raises(BackendLost, match="lost 2 times without a step in between"):
        walked(recipe)
    assert [step.number for step in walked(recipe, resume=tmp_path / "run")] == [2, 3, 4, 5]
