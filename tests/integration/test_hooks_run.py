"""Hooks of the user's own (run.hooks) in a run: called in order, once, and what becomes of one that fails or hangs."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import runs

import rollover
from rollover.cli import main
from rollover.run.hooks import HOOKS

CLASSES = """
import asyncio, json, os
from pathlib import Path

class Told:
    def on_train_start(self, run):
        self.file = run.directory.parent / "told.jsonl"
        self.tell("on_train_start", [run.name, run.resumed])
    def tell(self, name, what):
        with self.file.open("a") as file:
            file.write(json.dumps([name, what]) + "\\n")
    def on_step_start(self, step):
        self.tell("on_step_start", step)
    async def on_publish(self, version):
        await asyncio.sleep(0.01)
        self.tell("on_publish", version)
    def on_step_end(self, row):
        self.tell("on_step_end", row["step"])
        row.clear()
    async def on_evaluate(self, row):
        self.tell("on_evaluate", row["step"])
    def on_train_end(self, error):
        self.tell("on_train_end", error and type(error).__name__)

class Raises(Told):
    def on_step_end(self, row):
        step = row["step"]
        super().on_step_end(row)
        if step == 2:
            raise KeyError("no service")

class Exits(Told):
    async def on_step_end(self, row):
        exit()

class Cancels(Told):
    async def on_publish(self, version):
        raise asyncio.CancelledError

class CancelsItself(Told):
    async def on_publish(self, version):
        asyncio.current_task().cancel()
        await asyncio.sleep(60)

class Evaluates(Told):
    def on_evaluate(self, row):
        if row["step"] == 2:
            raise ValueError("worse")

class Ends(Told):
    def on_train_end(self, error):
        raise OSError("gone")

class Hangs(Told):
    async def on_step_end(self, row):
        super().on_step_end(row)
        os.kill(os.getpid(), 2)
        await asyncio.sleep(60)

class Wrong:
    def on_step_ended(self, row): pass

class Silent: pass

class Arguments:
    def on_step_end(self): pass

def none(): return None
"""
FAST: dict[str, dict[str, Any]] = {
    "rollout": {"max_new_tokens": 8},
    "checkpoint": {"every_steps": 0, "save_final_model": False},
}


def recipe(folder: Path, name: str, **tables: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "hooks.py").write_text(CLASSES)
    return runs.write(folder, steps=3, **{**FAST, **tables, "run": {"hooks": f"{folder}/hooks.py:{name}"}})


def told(folder: Path) -> list[list[Any]]:
    return runs.json_lines(folder / "told.jsonl")


def test_every_hook_is_called_in_order_once(tmp_path: Path) -> None:
    file = recipe(tmp_path, "Told", eval={"num_tasks": 2, "every_steps": 2}, train={"publish_every": 2})
    assert main(["train", str(file)]) == 0
    assert told(tmp_path) == [
        ["on_train_start", ["tiny", False]],
        ["on_evaluate", 0],
        ["on_step_start", 1],
        ["on_step_end", 1],
        ["on_step_start", 2],
        ["on_publish", 2],
        ["on_step_end", 2],
        ["on_evaluate", 2],
        ["on_step_start", 3],
        ["on_step_end", 3],
        ["on_evaluate", 3],
        ["on_train_end", None],
    ]
    assert all(len(row) > 20 for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")), "hooks get copies"


@pytest.mark.parametrize(
    ("name", "hook", "why", "steps"),
    [
        ("Raises", "on_step_end", "KeyError: 'no service'", 2),
        ("Exits", "on_step_end", "SystemExit: None", 1),
        ("Cancels", "on_publish", "CancelledError", 1),
        ("CancelsItself", "on_publish", "CancelledError", 1),
        ("Evaluates", "on_evaluate", "ValueError: worse", 2),
        ("Ends", "on_train_end", "OSError: gone", 3),
    ],
)
def test_one_that_fails_ends_the_run_with_a_checkpoint_and_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, hook: str, why: str, steps: int
) -> None:
    file = recipe(tmp_path, name, eval={"num_tasks": 1, "every_steps": 2})
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    expected = f"rollover: error: run.hooks = '{tmp_path}/hooks.py:{name}.{hook}' failed: {why} ("
    assert error[: len(expected)] == expected
    assert error.endswith("Mend it, and go on with --resume") and "hooks.py:" in error.partition("failed")[2]
    checkpoints = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert checkpoints == [f"step-{steps:06d}"]
    if name != "Ends":
        assert told(tmp_path)[-1] == ["on_train_end", "FunctionError"]
        words = ["--resume", "--run.hooks", f"{tmp_path}/hooks.py:Told"]
        assert main(["train", str(file), *words]) == 0
        assert [what for what in told(tmp_path) if what[0] == "on_step_start"][-1] == ["on_step_start", 3]
    assert [row["step"] for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_one_that_goes_on_after_a_stop_is_cancelled_and_the_run_ends_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, started = recipe(tmp_path, "Hangs", watchdog={"grace_s": 0.2}), time.monotonic()
    assert main(["train", str(file)]) == 130
    assert time.monotonic() - started < 50
    out = capsys.readouterr().out
    assert "its on_step_end was cancelled, as it went on for 0.2 s (watchdog.grace_s) after the run was asked" in out
    assert told(tmp_path)[-2:] == [["on_step_end", 1], ["on_train_end", None]]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Wrong", 'a Wrong with on_step_ended, which is no hook. Did you mean "on_step_end"?; it must return'),
        ("Silent", "a Silent, which has none; it must return an object with some of on_train_start, on_step_start"),
        ("Arguments", "whose on_step_end cannot be called as on_step_end(row); it must return"),
        ("none", "returned a NoneType, which has none"),
        ("Tolt", "did you mean Told"),
    ],
)
def test_what_has_no_hooks_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    file = recipe(tmp_path, name, model={"path": str(tmp_path / "nowhere")})
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"run.hooks = '{tmp_path}/hooks.py:{name}'" in error and why in error, error


def test_the_page_has_every_hook_and_what_it_is_called_with() -> None:
    page = (runs.REPOSITORY / "docs" / "trainer.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(on_\w+)` \| `(\w+)`", page, re.MULTILINE)) == HOOKS


def test_a_class_and_an_object_of_a_program_and_a_killed_run(tmp_path: Path) -> None:
    """No hook is called again for a step that is trained again after a kill: here the last one, from the journal."""
    file = recipe(tmp_path, "Told")
    killed = runs.rollover(
        "rollover.track.live:LiveView.on_step", 2, "train", file, script=Path(__file__).with_name("killed_at.py")
    )
    assert killed.returncode == -signal.SIGKILL
    before = told(tmp_path)
    calls: list[Any] = []

    class Mine:
        def on_train_start(self, run: rollover.RunInfo) -> None:
            calls.append(run.resumed)

        async def on_step_end(self, row: dict[str, float]) -> None:
            await asyncio.sleep(0)
            calls.append(row["step"])

    mine = Mine()
    rollover.train(resume=tmp_path / "run", hooks=lambda: mine, trust=True)
    assert calls == [True, 3] and ["on_step_end", 1] in before and told(tmp_path) == before
