"""The scripts and recipes of examples/ run, with a tiny model in place of SmolLM2 and fewer, smaller steps."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

import rollover
from rollover.rewards.llm_judge import llm_judge
from unit.test_examples import EXAMPLES, FOLDERS, commands, load

SMALL: dict[str, Any] = {
    "num_steps": 3, "groups_per_step": 4, "group_size": 4, "in_flight_groups": 4, "max_new_tokens": 40,
    "micro_batch_tokens": 256, "run.threads": 1, "track.live": "plain", "eval": {"num_tasks": 2, "samples_per_task": 1},
}  # fmt: skip
Enter = Callable[[str], Path]
SUPERVISED = ("sft_then_rl", "vision")  # with models of their own
# Without a second terminal.
ALONE = [f for f in FOLDERS if (f / "recipe.toml").exists() and f.name not in ("judge", "remote_engine", *SUPERVISED)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The toy that the examples themselves write."""
    folder = tmp_path_factory.mktemp("examples") / "toy"
    load(EXAMPLES / "toy.py").write(folder)
    return str(folder)


@pytest.fixture
def enter(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Goes to a copy of an example's folder in which toy/ lies, as after the first command of its page."""

    def to(name: str) -> Path:
        shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("toy", "runs"))
        here = tmp_path / "examples" / name
        shutil.copytree(model, here / "toy")
        monkeypatch.chdir(here)
        return here

    return to


@pytest.fixture
def judge() -> Iterator[str]:
    """The URL of the stand-in of examples/judge, on a free port."""
    server = load(EXAMPLES / "judge" / "judge_server.py").server(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def small(model: str, directory: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "model": {"path": model, "dtype": "float32"}, "run.dir": str(directory), **changes}


def test_rewards_of_your_own(model: str, tmp_path: Path) -> None:
    run = load(EXAMPLES / "own_reward" / "train.py").main(**small(model, tmp_path / "run"))
    assert run.finished and len(run.metrics) == 3
    row = run.metrics[-1]
    assert row["reward/mean"] == pytest.approx(row["reward/extra/right"] + row["reward/extra/brief"])


@pytest.mark.slow
def test_a_script_for_trl(model: str, tmp_path: Path) -> None:
    trainer = load(EXAMPLES / "trl_script" / "train.py").main(
        model, output_dir=str(tmp_path / "out"), max_steps=2, num_generations=4, per_device_train_batch_size=8
    )
    assert [row["step"] for row in trainer.state.log_history if "reward" in row] == [1, 2]


def test_the_stand_in_of_a_judge_is_read_by_the_reward(judge: str) -> None:
    score = llm_judge(url=judge, model="judge", prompt="judge.txt", highest=10, base_dir=str(EXAMPLES / "judge"))

    async def ask() -> list[float]:
        said = ("4711", "47ab")
        items = [{"prompt": "write a", "completion": text, "columns": {}} for text in said]
        return [(await score(item))["score"] for item in items]

    good, bad = asyncio.run(ask())
    assert (good, bad) == (1.0, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ALONE, ids=lambda folder: folder.name)
def test_a_recipe_runs(folder: Path, model: str, tmp_path: Path, enter: Enter) -> None:
    enter(folder.name)
    files = [words[2:] for words in commands(folder) if words[:2] == ["rollover", "train"]]
    changes = {"distill.teacher": model} if folder.name == "distillation" else {}
    run = rollover.train(config=files[-1] if files else ["recipe.toml"], **small(model, tmp_path / "run", **changes))
    assert run.finished and len(run.metrics) == 3 and run.metrics[-1]["tokens/trained"] > 0
    if changes:
        assert run.metrics[0]["distill/kl"] == pytest.approx(0, abs=1e-4)  # the student begins as this teacher


@pytest.mark.slow
@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_training_comes_before_rl(name: str, enter: Enter) -> None:
    """The commands of the page, with fewer steps."""
    here, few = (
        enter(name),
        {"sft": ["--sft.epochs", "1"], "train": ["--train.num_steps", "3", "--eval.num_tasks", "2"]},
    )
    for program, *words in commands(EXAMPLES / name):
        if program == "python":
            subprocess.run([sys.executable, *words], check=True, cwd=here, env=runs.environment())
            continue
        done = runs.rollover(*words, *few[words[0]])
        taught = words[0] == "sft" or (here / "runs" / "sft" / "model").exists()
        assert done.returncode == (0 if taught else 2), done.stderr
    assert len(rollover.open(here / "runs" / ("after" if name == "sft_then_rl" else "train")).metrics) == 3


@pytest.mark.slow
def test_a_judge_gives_the_reward(judge: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "judge" / "recipe.toml").read_text().replace("http://127.0.0.1:8124/v1", judge)
    (tmp_path / "mine.toml").write_text(text.replace('"toy/tasks.jsonl"', json.dumps(f"{model}/tasks.jsonl")))
    (tmp_path / "judge.txt").write_text((EXAMPLES / "judge" / "judge.txt").read_text())
    monkeypatch.chdir(tmp_path)
    run = rollover.train(config="mine.toml", **small(model, tmp_path / "run"))
    assert run.finished and run.metrics[-1]["rewards/errors"] == 0 and 0 <= run.metrics[-1]["reward/mean"] <= 1


@pytest.mark.slow
def test_a_server_generates(model: str, tmp_path: Path, enter: Enter) -> None:
    pytest.importorskip("uvicorn")
    enter("remote_engine")
    flags = ["--model.path", model, "--model.dtype", "float32", "--run.threads", "1"]
    serve = runs.start("serve", "quickstart", "recipe.toml", "--port", 0, *flags)
    try:
        while "url" not in serve.out:
            assert serve.poll() is None, serve.err
            time.sleep(0.1)
        url = serve.out.partition('"url": "')[2].partition('"')[0]
        flags += ["--train.num_steps", "2", "--rollout.max_new_tokens", "24", "--engine.urls", json.dumps([url])]
        flags += ["--rewards.overlong_buffer_tokens", "24"]
        words = ["quickstart", "recipe.toml", *flags, "--eval.num_tasks", "0", "--run.dir", str(tmp_path / "run")]
        train = runs.rollover("train", *words)
        assert train.returncode == 0, train.stderr
        assert len(rollover.open(tmp_path / "run").metrics) == 2
    finally:
        serve.kill()


@pytest.mark.slow
def test_a_killed_run_is_the_one_that_was_left_alone(model: str, tmp_path: Path, enter: Enter) -> None:
    kill = load(enter("kill_and_resume") / "kill.py")
    assert kill.main("--model.path", model, "--train.num_steps", "40", folder=str(tmp_path))
    assert [row["step"] for row in rollover.open(tmp_path / "killed").metrics] == list(range(1, 41))
