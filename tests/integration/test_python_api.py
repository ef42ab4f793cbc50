"""The Python API in real runs, and what is wrong to ask of a session."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from reward_functions import digits
from runs import check_whole

import rollover
from rollover import cli
from rollover.config import ConfigError
from rollover.track.tracker import Tracker

# `import rollover` on the tiny model: whole runs, own loops, interrupts, other event loops


# Synchronous: which groups a partial mode trains depends on when their scores arrive.
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "groups_per_step": 3,
    "group_size": 3,
    "max_new_tokens": 16,
    "engine": {"max_running": 8, "kv_memory_gb": 0.1},
    "train": {"num_steps": 4, "learning_rate": 1e-3, "micro_batch_tokens": 256},
    "checkpoint": {"every_steps": 2, "keep": 2},
    "track": {"live": "plain"},
}
SYNC: dict[str, Any] = {"in_flight_groups": None, "interrupt": None, "max_staleness": None}
ROWS = [{"prompt": f"count to {i}", "answer": str(i)} for i in range(400)]


def of_train(folder: Path) -> dict[str, Any]:
    """Of `rollover.train`, for the run that runs.write describes."""
    runs.write(folder)
    model = {"path": str(folder / "model"), "dtype": "float32"}
    return {**SETTINGS, "model": model, "tasks": ROWS, "run.dir": str(folder / "python")}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return of_train(tmp_path)


def tokens(folder: Path) -> dict[str, list[int]]:
    return {record["rollout_id"]: record["token_ids"] for record in runs.records(folder)}


def press_at(version: int) -> Callable[..., Any]:
    """A before_produce that presses Ctrl-C when the trainer has that version."""
    pressed: list[int] = []

    def press(task, at):
        if at == version and not pressed:
            pressed.append(at)
            signal.raise_signal(signal.SIGINT)
        return task

    return press


def test_the_same_keys_give_the_same_tokens_as_the_command_line(tmp_path: Path, settings: dict[str, Any]) -> None:
    recipe = runs.write(tmp_path, rollout=SYNC)
    # The label of the rows is part of the ids of tasks, which seed the rollouts.
    with recipe.open("a") as file:
        file.write('name = "tasks"\n')
    assert cli.main(["train", str(recipe)]) == 0
    run = rollover.train(**settings, reward=digits)
    assert tokens(run.directory) == tokens(tmp_path / "run") and len(tokens(run.directory)) >= 36
    mine, theirs = run.metrics, runs.rows(tmp_path)
    assert [row["grad_norm"] for row in mine] == [row["grad_norm"] for row in theirs]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rollover.Run:
    """A finished run, evaluated twice."""
    return rollover.train(**of_train(tmp_path_factory.mktemp("run")), eval={"num_tasks": 5},
                          reward=lambda completions, **_: [len(c) / 48 for c in completions])  # fmt: skip


def test_a_run_can_be_looked_at(run: rollover.Run) -> None:
    assert run.finished and [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert [e["step"] for e in run.evaluations] == [0, 4]
    groups, everything = list(run.rollouts()), list(run.rollouts(dropped=True))
    assert len(groups) == 12 and all(group.ready for group in groups) and len(everything) >= 12
    records = [record for record in run.records() if record["outcome"] == "trained"]
    assert len(records) == 36 and all(r["prompt"] or r["messages"] for r in records)
    assert {r["columns"]["answer"] for r in records} <= {row["answer"] for row in ROWS}
    assert run.model_path.is_dir() and run.trace and "finished" in repr(run) and "4 of 4 steps" in repr(run)
    assert run.config["rewards"]["function"].startswith("<python>:lambda-")
    again = rollover.open(run.directory)
    assert again.metrics == run.metrics
    with pytest.raises(ValueError, match="is not the directory of a run"):
        rollover.open(run.directory / "rollouts")


def test_frames_and_figures(run: rollover.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert list(frame["step"]) == [1, 2, 3, 4] and len(run.to_pandas("rollouts")) >= 36
    assert isinstance(frame, pandas.DataFrame)
    with pytest.raises(ValueError, match="expected one of metrics, evaluations, rollouts"):
        run.to_pandas("groups")  # type: ignore[arg-type]
    pytest.importorskip("matplotlib").use("Agg")
    figure = run.plot("reward/mean", "time/step_s")
    assert [axis.get_ylabel() for axis in figure.axes] == ["reward/mean", "time/step_s"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [row["reward/mean"] for row in run.metrics]
    with pytest.raises(ValueError, match="no step has the metric 'reward/maen'"):
        run.plot("reward/maen")
    for name in ("pandas", "matplotlib.pyplot"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match="Run.to_pandas needs the package pandas: pip install pandas"):
        run.to_pandas()
    with pytest.raises(ImportError, match="Run.plot needs the package matplotlib"):
        run.plot()


def test_it_works_inside_a_running_event_loop(settings: dict[str, Any]) -> None:
    async def cell() -> rollover.Run:
        return rollover.train(**settings, reward=digits)

    async def awaited() -> rollover.Run:
        return await rollover.train_async(**{**settings, "run.dir": settings["run.dir"] + "-2"}, reward=digits)

    first, second = asyncio.run(cell()), asyncio.run(awaited())
    assert first.finished and tokens(first.directory) == tokens(second.directory)
    assert not [t for t in threading.enumerate() if t.name.startswith("rollover")]


@pytest.mark.parametrize("inside", [False, True], ids=["a script", "a running loop"])
def test_an_interrupt_parks_and_the_run_goes_on(settings: dict[str, Any], capsys, inside: bool) -> None:
    """Inside a loop the signal reaches the run from another thread, so it may take some steps."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def train() -> rollover.Run:
        return rollover.train(**{**settings, "num_steps": 100}, reward=digits, before_produce=press_at(2))

    async def cell() -> rollover.Run:
        return train()

    run = asyncio.run(cell()) if inside else train()
    num = len(run.metrics)
    assert not run.finished and [row["step"] for row in run.metrics] == list(range(1, num + 1))
    assert 2 <= num < 100 and (inside or num == 2)
    assert "not finished: run.resume() goes on" in repr(run) and repr(run) in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"not finished; run.resume\(\) goes on"):
        _ = run.model_path
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = run.resume(num_steps=num + 2)
    assert again.finished and [row["step"] for row in again.metrics] == list(range(1, num + 3))
    settings_changed = capsys.readouterr().out
    assert f"train.num_steps: 100 -> {num + 2}" in settings_changed and "rewards.function" not in settings_changed


def test_a_run_of_objects_goes_on_only_with_them(tmp_path: Path, settings: dict[str, Any], capsys) -> None:
    run = rollover.train(**settings, reward=digits, before_produce=press_at(2))
    with pytest.raises(ConfigError, match="names an object of a Python program.*Hand it over again"):
        rollover.train(resume=run.directory)
    recipe = runs.write(tmp_path, rewards={"function": None})
    capsys.readouterr()
    assert cli.main(["train", str(recipe), f"--run.dir={run.directory}", "--resume"]) == 2
    error = capsys.readouterr().err
    assert "--resume without rewards.function: it was an object of a Python program (<python>:digits-" in error
    again = rollover.train(resume=run.directory, tasks=ROWS, reward=digits, before_produce=lambda task, version: task)
    assert again.finished and "settings that changed since:\n  tasks.before_produce: " in capsys.readouterr().out


def test_what_fails_raises(settings: dict[str, Any]) -> None:
    def broken(completions, **_):
        raise KeyError("nothing here")

    with pytest.raises(ValueError, match="failed its start-up call: KeyError: 'nothing here'"):
        rollover.train(**settings, reward=broken)
    with pytest.raises(ConfigError, match="there is no option num_step"):
        rollover.train(**settings, reward=digits, num_step=3)
    assert rollover.train(**settings, reward=digits).finished, "the directory was given back"


def test_a_loop_of_one_s_own(settings: dict[str, Any]) -> None:
    async def loop() -> tuple[Path, list[rollover.Step]]:
        steps = []
        async with rollover.Session(**settings, reward=digits, eval={"num_tasks": 4}) as session:
            async for step in session.steps():
                assert session.policy_version == step.number == len(steps) + 1
                assert len(step.groups) == 3 and step.metrics["step"] == step.number
                steps.append(step)
                if step.number == 2:
                    row = await session.evaluate()
                    assert row is not None and row["step"] == 2 and await session.evaluate() == row
                    session.set("train.learning_rate", 5e-4)
                    session.set("checkpoint.every_steps", 0)
                    with pytest.raises(ConfigError, match="rollout.group_size cannot change during a run"):
                        session.set("rollout.group_size", 4)
                    with pytest.raises(ConfigError, match="run.seed cannot change.*it is fixed: tasks"):
                        session.set("run.seed", 4)
                    with pytest.raises(ConfigError, match="train.learning_rate = 'fast': expected a number"):
                        session.set("train.learning_rate", "fast")
                    with pytest.raises(ConfigError, match="Did you mean train.learning_rate"):
                        session.set("train.learning_rat", 1)
                if step.number == 3:
                    await session.checkpoint()
        with pytest.raises(RuntimeError, match="not open"):
            await session.checkpoint()
        return session.directory, steps

    folder, steps = asyncio.run(loop())
    run = rollover.open(folder)
    assert [step.metrics["learning_rate"] for step in steps] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert run.finished and run.config["train"]["learning_rate"] == 5e-4
    assert [e["step"] for e in run.evaluations] == [0, 2, 4]
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith("step")) == [
        "step-000003",
        "step-000004",
    ]


def test_a_loop_that_is_left_early_goes_on_later(settings: dict[str, Any]) -> None:
    async def leave(error: bool = False, **arguments: Any) -> Path:
        async with rollover.Session(**arguments) as session:
            async for _ in session.steps():
                break
            if error:
                raise LookupError("mine")
        return session.directory

    plain = {**settings, "run.dir": settings["run.dir"] + "-whole"}
    whole = rollover.train(**plain, reward=digits)
    folder = asyncio.run(leave(**settings, reward=digits))
    with pytest.raises(LookupError, match="mine"):
        asyncio.run(leave(error=True, resume=folder, tasks=ROWS, reward=digits))
    run = rollover.train(resume=folder, tasks=ROWS, reward=digits)
    assert run.finished and [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert tokens(run.directory) == tokens(whole.directory), "the same tokens, however often it was left"


def test_a_pause_between_two_loops_belongs_to_no_step(settings: dict[str, Any]) -> None:
    async def loop() -> rollover.Step:
        async with rollover.Session(**settings, reward=digits, eval={"num_tasks": 4}) as session:
            async for _ in session.steps():
                break
            await session.evaluate()
            return await anext(session.steps())

    assert asyncio.run(loop()).metrics["time/eval_s"] == 0


def test_keys_that_change_in_a_run_act(settings: dict[str, Any]) -> None:
    """Those of the table in config/resume.py: steps are others, from the first one on that can be."""
    trained = {**settings["train"], "schedule": "linear", "max_grad_norm": 100.0}
    plain = {**settings, "train": trained, "algorithm": {"entropy_coef": 0.01}, "checkpoint": {"journal_s": 0}}

    async def norms(name: str, key: str, value: Any) -> list[float]:
        own = {**plain, "run.dir": f"{settings['run.dir']}-{name}"}
        steps = []
        async with rollover.Session(**own, reward=digits, eval={"num_tasks": 2}) as session:
            async for step in session.steps():
                steps.append(step.metrics["grad_norm"])
                if step.number == 2:
                    session.set(key, value)
        return steps

    expected = asyncio.run(norms("plain", "eval.every_steps", 3))
    for key, value, first in (
        ("train.learning_rate", 1e-5, 4),
        ("train.min_lr_ratio", 1.0, 4),
        ("train.max_grad_norm", 1e-9, 4),
        ("algorithm.entropy_coef", 0.0, 3),
    ):
        found = asyncio.run(norms(key, key, value))
        same = [a == b for a, b in zip(found, expected, strict=True)]
        assert same == [number < first for number in (1, 2, 3, 4)], key
    assert [e["step"] for e in rollover.open(f"{settings['run.dir']}-plain").evaluations] == [0, 3, 4]


def test_an_endless_iterable_with_eval_tasks(settings: dict[str, Any]) -> None:
    def problems():
        number = 0
        while True:
            yield {"prompt": f"count to {number}", "answer": str(number)}
            number += 1

    run = rollover.train(
        **{**settings, "tasks": problems()}, eval_tasks=ROWS[:5], reward=digits, eval={"num_tasks": 4},
        before_produce=press_at(2),
    )  # fmt: skip
    assert not run.finished
    run = rollover.train(resume=run.directory, tasks=problems(), eval_tasks=ROWS[:5], reward=digits,
                         before_produce=lambda task, version: task)  # fmt: skip
    assert run.finished and len(run.evaluations) == 2
    ids = [int(group.task.task_id.removeprefix("tasks/")) for group in run.rollouts(dropped=True)]
    assert len(set(ids)) == len(ids) and min(ids) >= 5, "what is held out is not trained"


def test_inference_alone(tmp_path: Path) -> None:
    runs.write(tmp_path)
    settings = {"threads": 1, "max_new_tokens": 8, "model": {"path": str(tmp_path / "model"), "dtype": "float32"}}
    prompts = ["count to 3", [{"role": "user", "content": "count to 3"}]]
    with rollover.Engine(**settings) as engine:
        answers = engine.generate(prompts, num=2)
        assert [a.prompt for a in answers] == [prompts[0], prompts[0], prompts[1], prompts[1]]
        assert all(1 <= len(a.token_ids) == len(a.logprobs) <= 8 for a in answers)
        assert answers[0].token_ids != answers[1].token_ids

        async def cell() -> list[rollover.Completion]:
            assert engine.generate(prompts[0])[0].token_ids == answers[0].token_ids
            return await engine.generate_async(prompts[0], num=2)

        assert [a.token_ids for a in asyncio.run(cell())] == [a.token_ids for a in answers[:2]]
        assert engine.generate(prompts[1])[0].prompt == prompts[1]
        with pytest.raises(ValueError, match="a prompt is a int"):
            engine.generate([3])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="2005 tokens, its prompt included, and the model 1024 positions"):
            engine.generate("x" * 2000)
    with pytest.raises(RuntimeError, match="this Engine is closed"):
        engine.generate("x")
    engine.close()


def test_a_plan_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {
        "groups_per_step": 4,
        "group_size": 4,
        "max_staleness": 1,
        "in_flight_groups": 8,
        "interrupt": "when_enough",
        "plan": {"steps": 6},
    }
    plan = rollover.plan(**keys)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        "[rollout]\ngroups_per_step = 4\ngroup_size = 4\nmax_staleness = 1\nin_flight_groups = 8\n"
        'interrupt = "when_enough"\n[plan]\nsteps = 6\n'
    )
    assert cli.main(["plan", str(recipe), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    told.pop("sources")
    assert json.loads(json.dumps(plan.as_json())) == told and plan.speedup > 0


# A session used as it is not meant to be: by several tasks at once, twice, or after its end


def of_session(folder: Path, **changes: Any) -> dict[str, Any]:
    rollout = {"groups_per_step": 2, "group_size": 3, "max_new_tokens": 8, "in_flight_groups": 4}
    recipe = runs.write(folder, steps=4, rollout=rollout)
    return {"config": recipe, "num_tasks": 2, **changes}


def test_what_other_tasks_ask_for_waits_for_the_end_of_the_step(tmp_path: Path) -> None:
    """A checkpoint in the middle of a step would hold rollouts that the engine still extends."""
    made: list[int] = []

    async def walk(session: rollover.Session) -> None:
        async for step in session.steps():
            made.append(step.number)
            await asyncio.sleep(0)

    async def save(session: rollover.Session) -> None:
        for _ in range(4):
            await asyncio.sleep(0.01)
            await session.checkpoint()
            await session.evaluate()

    async def main() -> None:
        async with rollover.Session(**of_session(tmp_path)) as session:
            await asyncio.gather(walk(session), walk(session), save(session))

    asyncio.run(main())
    assert sorted(made) == [1, 2, 3, 4]
    check_whole(tmp_path / "run", 4)


def test_steps_of_a_session_that_has_ended_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with rollover.Session(**of_session(tmp_path)) as session:
            steps = session.steps()
            assert (await anext(steps)).number == 1
        with pytest.raises(RuntimeError, match="not open"):
            await anext(steps)

    asyncio.run(main())
    assert rollover.train(resume=tmp_path / "run", trust=True).finished


@pytest.mark.parametrize("used", ["inside", "entered", "closed"])
def test_a_session_is_entered_once(tmp_path: Path, used: str) -> None:
    async def main() -> None:
        session = rollover.Session(**of_session(tmp_path))
        if used == "inside":
            async with session:
                with pytest.raises(RuntimeError, match="entered once"):
                    await session.__aenter__()
                assert [step.number async for step in session.steps()] == [1, 2, 3, 4]
            return
        if used == "entered":
            async with session:
                pass
        session.close()
        with pytest.raises(RuntimeError, match="entered once"):
            await session.__aenter__()

    asyncio.run(main())


def test_a_directory_is_free_again_where_a_run_could_not_begin(tmp_path: Path) -> None:
    """The error is kept, as a notebook keeps the last one, and with it whoever raised it."""

    def fails() -> Tracker:
        raise RuntimeError("no network")

    with pytest.raises(ValueError, match="no network") as kept:
        rollover.train(**of_session(tmp_path, trackers=[fails]))
    assert rollover.train(**of_session(tmp_path, trackers=[Tracker])).finished and kept.value


@pytest.mark.parametrize("text", ['{"run": {', "[1]", '{"algorithm": 3}'])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.resolved.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="config.resolved.json is damaged"):
        rollover.open(tmp_path).config  # noqa: B018
    with pytest.raises(ValueError, match="config.resolved.json is damaged"):
        rollover.train(resume=tmp_path)


def test_sessions_that_end_in_the_order_in_which_they_began_give_the_signals_back(tmp_path: Path) -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        first, second = (rollover.Session(**of_session(tmp_path / name)) for name in ("first", "second"))
        for session in (first, second):
            await session.__aenter__()
        await first.__aexit__(None, None, None)
        os.kill(os.getpid(), signal.SIGINT)
        assert second.interrupted and not first.interrupted
        await second.__aexit__(None, None, None)
        assert signal.getsignal(signal.SIGINT) is before

    asyncio.run(main())
