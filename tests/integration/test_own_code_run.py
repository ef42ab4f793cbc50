"""Engines, environments, functions, trackers, hooks and producers of the user in real runs."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from endings import train
from runs import check_whole

import rollover
from rollover.cli import main
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.run.hooks import HOOKS

# An engine of the user's own that breaks the contract in a run: a sentence names it, and nothing wrong is trained


ENGINES = """
from dataclasses import replace
import numpy as np
from fake_engine import FakeEngine

class Right(FakeEngine):
    def __init__(self, setup):
        super().__init__(lambda seed: 3 + seed % 9, vocab_size=100, turns_between_steps=4)

def answering(answer):
    class Answering(Right):
        async def extend(self, request):
            return answer(await super().extend(request))
    return Answering

Outside = answering(lambda segments: [replace(s, token_ids=s.token_ids + np.int32(70000)) for s in segments])

def failing(name):
    async def fail(self, *args):
        raise KeyError("gpu")
    return type("Failing", (Right,), {name: fail})

Weights, Closes = failing("load_weights"), failing("close")

"""
REWARD = "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"


def of_engine(folder: Path, name: str) -> Path:
    (folder / "mine.py").write_text(ENGINES)
    file = runs.write(
        folder,
        steps=2,
        engine={"kind": f"{folder}/mine.py:{name}"},
        watchdog={"max_failures": 2, "retry_s": 0.01},
        checkpoint={"save_final_model": False},
    )
    # All advantages are 0, so that a micro-batch is never computed in which a wrong id would be noticed.
    (folder / "reward.py").write_text(REWARD)
    return file


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Outside", "is refused, as its token 0 has the id 700"),
        ("Weights", "its load_weights failed: KeyError: 'gpu'"),
    ],
)
def test_a_broken_engine_is_named_and_the_run_goes_on_with_a_right_one(tmp_path, capsys, name: str, why: str) -> None:
    file = of_engine(tmp_path, name)
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("rollover: error: ") and why in error, error
    assert f"engine.kind = '{tmp_path}/mine.py:{name}'" in error
    rows = runs.rows(tmp_path)
    assert all(row["tokens/trained"] == 0 for row in rows[: name != "Weights"])
    assert main(["train", str(file), "--resume", f"--engine.kind={tmp_path}/mine.py:Right"]) == 2
    assert "nothing was trained: every gradient was 0" in capsys.readouterr().err, "all rewards are equal"
    if name != "Weights":  # the weights that it did not take are told as live nowhere
        check_whole(tmp_path / "run", 2)


def test_an_engine_that_fails_at_its_close_loses_nothing_of_the_run(tmp_path: Path, capsys) -> None:
    assert main(["train", str(of_engine(tmp_path, "Closes"))]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Closes': its close failed: KeyError: 'gpu' (" in error and error.endswith("(engine/protocol.py)")
    check_whole(tmp_path / "run", 2)


# An environment of the user's own that breaks in a run: words that name it, nothing wrong trained, no traceback


ENVIRONMENTS = """
import asyncio, sys
from rollover.envs.protocol import written
from rollover.types import Reward

class Quiet:
    def __init__(self, setup):
        self.ours, self.scores_singly = setup.score, setup.scores_singly

    async def next(self, rollout):
        return None

    async def score(self, rollouts):
        return await self.ours(rollouts)

def scoring(score):
    class Scoring(Quiet):
        async def score(self, rollouts):
            return [score(rollout) for rollout in rollouts]
    return Scoring

class Exits(Quiet):
    async def next(self, rollout):
        if rollout.group_id < 2:
            sys.exit(7)

class CancelsItself(Quiet):
    async def next(self, rollout):
        if rollout.group_id < 2:
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    async def score(self, rollouts):
        if rollouts[0].group_id == 2:
            asyncio.current_task().cancel()
            await asyncio.sleep(60)
        return await super().score(rollouts)

class Hangs(Quiet):  # at one rollout of three in the first groups; the others are told something
    async def next(self, rollout):
        if rollout.group_id < 3 and rollout.sibling == 0:
            await asyncio.get_running_loop().create_future()
        return written(rollout, [7, 8]) if len(rollout.segments) == 1 else None

class Singly(Quiet):
    def __init__(self, setup):
        super().__init__(setup)
        self.scores_singly = None

class Few(Quiet):
    async def score(self, rollouts):
        return []

class Fails(Quiet):
    async def score(self, rollouts):
        if rollouts[0].group_id == 1:
            raise KeyError("no judge")
        return await self.ours(rollouts)

class Told(Quiet):  # the policy is told two tokens; only here are there negative scores: how many turns there were
    async def next(self, rollout):
        return written(rollout, [7, 8]) if len(rollout.segments) == 1 else None

    async def score(self, rollouts):
        return [Reward(-float(sum(s.trainable for s in r.segments))) for r in rollouts]

NotANumber = scoring(lambda rollout: Reward(float("nan")))
Bare = scoring(lambda rollout: 1.0)
Extras = scoring(lambda rollout: Reward(1.0, {"a": "b"}))
Name = scoring(lambda rollout: Reward(1.0, {"a\\nb": 1.0}))
"""


def of_environment(folder: Path, name: str, steps: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(ENVIRONMENTS)
    environment = f"{folder}/mine.py:{name}"
    return runs.write(folder, steps=steps, rollout={"environment": environment, "max_new_tokens": 48})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Few", "there are 0 for 3 rollouts"),
        ("NotANumber", "nan is no score: give a number within 1e30"),
        ("Bare", "no list of Reward"),
        ("Extras", "'b' for 'a'"),
        ("Name", "1.0 for 'a\\nb'"),
        ("Singly", "failed at scores_singly: TypeError"),
    ],
)
def test_wrong_answer_ends_the_run_until_it_is_mended(tmp_path: Path, capsys, name: str, why: str) -> None:
    file = of_environment(tmp_path, name)
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert "error: rollout.environment" in error and why in error, error
    if name != "NotANumber":
        return
    (tmp_path / "mine.py").write_text(f"{ENVIRONMENTS}\n{name} = Quiet\n")
    assert main(["train", str(file), "--resume"]) == 0
    check_whole(tmp_path / "run", 2)


@pytest.mark.parametrize("name", ["Exits", "CancelsItself"])
def test_one_that_fails_at_a_turn_each_time_costs_the_reward(tmp_path: Path, capsys, name: str) -> None:
    assert main(["train", str(of_environment(tmp_path, name))]) == 0
    assert "the environment failed at rollout" in capsys.readouterr().out
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/failed"] == row["episodes/retried"] >= 1 and row["dropped/failed/groups"] == 0
    failed = [r for r in runs.records(tmp_path / "run") if r["stop_reason"] == "error"]
    assert failed and all("the environment failed at rollout" in r["error"] for r in failed)
    check_whole(tmp_path / "run", 2)


def test_one_that_hangs_costs_its_rollouts_and_the_run_goes_on(tmp_path: Path, capsys) -> None:
    words = ["--workflow.timeout_s=0.3", "--workflow.on_timeout=score"]
    words += ["--rollout.interrupt=never", "--rollout.in_flight_groups=3", "--rollout.max_staleness=0"]
    words += [f"--rollout.stop_token_ids={list(range(2, 14))}"]  # turns of eight tokens in the mean
    assert main(["train", str(of_environment(tmp_path, "Hangs")), *words]) == 0
    out = capsys.readouterr().out
    assert out.count("exceeded workflow.timeout_s = 0.3 s: the rollout ends") == 1, "said once"
    assert "health: episodes/timeout_share" in out
    check_whole(tmp_path / "run", 2)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/timeout"] == 3 and row["turns/max"] == 2 and row["tokens/environment"] > 0
    late = [r for r in runs.records(tmp_path / "run") if r["stop_reason"] == "timeout"]
    assert late and {r["score"] for r in late} == {0.0}
    assert main(["trace", str(tmp_path / "run")]) == 0
    assert "environments and agents worked" in capsys.readouterr().out


def test_where_it_fails_at_scoring_rewards_are_missing(tmp_path: Path) -> None:
    assert main(["train", str(of_environment(tmp_path, "Fails"))]) == 0
    assert runs.rows(tmp_path)[-1]["dropped/too_few_rewards/groups"] == 1
    errors = {r["error"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:too_few_rewards"}
    assert len(errors) == 1 and errors.pop().startswith("rollout.environment failed: KeyError: 'no judge' (")
    check_whole(tmp_path / "run", 2)


def test_evaluations_are_played_with_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = of_environment(tmp_path, "Told", 1)
    words = [str(file), "--eval.num_tasks=4", "--rollout.stop_token_ids=[2,3,4,5,6,7,8,9]"]
    assert main(["train", *words]) in (0, 2), "2 if all rewards of its one step are equal"
    before, after = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    assert -2.0 <= before["mean"] < -1.0 and after["mean"] < -1.0, "most answers went on after they were told"
    capsys.readouterr()
    assert main(["eval", *words, "--model", str(tmp_path / "run" / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(after["mean"])


DIALOGUE = """
from rollover.envs.protocol import written

class Dialogue:
    def __init__(self, setup):
        self.score, self.scores_singly = setup.score, setup.scores_singly

    async def next(self, rollout):
        turn = sum(not segment.trainable for segment in rollout.segments)
        return written(rollout, [7, 8]) if turn < 2 else None
"""


def dialogue(folder: Path) -> Path:
    folder.mkdir()
    (folder / "mine.py").write_text(DIALOGUE)
    # Turns of eight tokens in the mean: every twelfth token ends one.
    rollout = {"environment": f"{folder}/mine.py:Dialogue", "stop_token_ids": list(range(2, 14)), "max_new_tokens": 48}
    return runs.write(folder, steps=2, rollout=rollout, checkpoint={"every_steps": 0})


def test_a_run_does_not_go_on_without_the_environment_of_what_it_holds(tmp_path: Path, capsys) -> None:
    file = dialogue(tmp_path / "one")
    assert main(["train", str(file), "--train.num_steps=1"]) == 0
    environment = f"{file.parent}/mine.py:Dialogue"
    for other in ("single_turn", f"{file.parent}/mine.py:Other"):
        (file.parent / "mine.py").write_text(DIALOGUE + "\nOther = Dialogue\n")
        assert main(["train", str(file), "--resume", f"--rollout.environment={other}"]) == 2
        error = capsys.readouterr().err
        assert (
            '--resume with rollout.environment = "' in error and "begun in it, and would continue in another" in error
        )
        assert f'Set rollout.environment = "{environment}", or start a new run in another run.dir' in error
    assert main(["train", str(file), "--resume"]) == 0
    check_whole(file.parent / "run", 2)


def test_a_class_that_a_program_handed_over_is_mended_and_the_run_goes_on(tmp_path: Path) -> None:
    def environment(answer: str | None) -> type:
        source = f"class Mine(Quiet):\n    async def next(self, rollout):\n        return {answer!r}\n"
        names: dict[str, type] = {}
        exec(ENVIRONMENTS + source, names)
        return names["Mine"]

    file = runs.write(tmp_path, steps=2, checkpoint={"save_final_model": False})
    with pytest.raises(ValueError, match="it is a str, and no Segment. Fix it, and resume with --resume"):
        rollover.train(config=file, environment=environment("an answer"))
    rollover.train(resume=tmp_path / "run", environment=environment(None), trust=True)
    check_whole(tmp_path / "run", 2)


# Functions of the user's own that go wrong in a run: the console says which, where, and what is wrong


SOMETIMES = """
def reward(prompts, completions, answer, **columns):
    if len(answer) == 3 and int(answer[0]) % 3 == 0:  # not at start-up, where there are one and two
        raise KeyError("nothing for " + answer[0])
    return [sum(c.isdigit() for c in text) / 48 for text in completions]

def zero(prompts, completions, answer, **columns):
    return [float(text == answer[0] + "!") for text in completions]
"""


# option -> (parameters, what is right, when it goes wrong, what is wrong then, what is said of it). How often a
# function is called in a step may depend on timing; groups from 8 on are there after the first step alone.
FAILING: dict[str, tuple[str, str, str, str, str]] = {
    "algorithm.loss": (
        "t",
        "(-t.ratio_BT * t.advantages_BT, t.mask_BT & False)",
        "len(calls) >= 4",
        "(t.logprobs_BT * float('nan'), t.mask_BT)",
        "returned a loss that is nan at",
    ),
    "filters.custom": (
        "group",
        "None",
        "group.group_id >= 8",
        "1 / 0",
        "failed: ZeroDivisionError: division by zero (mine.py:5)",
    ),
    "rollout.order": ("view", "(view.remaining,)", "view.group_id >= 8", "None", "returned None"),
    "tasks.before_produce": (
        "task, version",
        "task",
        "len(calls) >= 12",
        "[][0]",
        "failed: IndexError: list index out of range",
    ),
}


def own(parameters: str, right: str, when: str, wrong: str) -> str:
    lines = ["calls = []", f"def own({parameters}):", "    calls.append(1)", f"    if {when}:"]
    return "\n".join([*lines, f"        return {wrong}", f"    return {right}", ""])


def of_functions(folder: Path, **tables: dict[str, Any]) -> Path:
    file = runs.write(folder, steps=4, **{"rollout": {"max_new_tokens": 12}, **tables})
    (folder / "reward.py").write_text(SOMETIMES)
    return file


def test_a_reward_that_sometimes_raises_is_told_at_once_and_in_the_summary(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = train(capsys, of_functions(tmp_path, rewards={"function": "reward.py:reward"}))
    lines = [" ".join(line.split()) for line in said.splitlines()]
    first = [line for line in lines if "reward reward.py:reward failed for task tasks/" in line]
    assert code == 0 and len(first) == 1
    assert re.fullmatch(
        r"reward reward\.py:reward failed for task tasks/\d+: KeyError: 'nothing for \d+' \(reward\.py:4\)\. Its reward"
        r" is missing; later failures are counted \(rewards/\*\)",
        first[0],
    )
    (last,) = [line for line in lines if line.startswith("Rewards: ")]
    assert " rewards failed; " in last and "KeyError: 'nothing for " in last and last.endswith("(reward.py:4)")


def test_rewards_that_are_all_the_same_are_told_with_an_example(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = of_functions(tmp_path, rewards={"function": "reward.py:zero"})
    code, said = train(capsys, file)
    (line,) = [line for line in said.splitlines() if "every reward of" in line]
    assert code == 2 and "nothing was trained: every gradient was 0" in said
    assert "every reward of reward.py:zero so far is 0 (18 of them)" in line
    assert "prompts and completions as strings" in line and "and answer = '" in line
    assert "learning_rate" not in said, "another rate would not help"
    assert "in 100% of the groups all rewards were equal" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").exists(), "its outputs are whole all the same"
    assert main(["train", str(file), "--resume"]) == 2, "nothing is trained still"


ASYNC = {"overlap": True, "interrupt": "on_weight_update"}
GOES_ON = ("algorithm.loss", "filters.custom")


@pytest.mark.parametrize("option", FAILING)
def test_function_that_fails_later_ends_the_run_with_one_line(option: str, tmp_path: Path, capsys, monkeypatch) -> None:
    """And with the function mended, the run goes on to its end: one of the trainer, one of the rollouts."""
    monkeypatch.chdir(tmp_path)
    parameters, right, when, wrong, text = FAILING[option]
    mode = ASYNC if option in GOES_ON else {}
    file = runs.write(
        tmp_path,
        steps=5,
        rollout={"max_new_tokens": 16, **mode},
        checkpoint={"every_steps": 0, "save_final_model": False},
    )
    (tmp_path / "mine.py").write_text(own(parameters, right, when, wrong))
    words = [file, f"--{option}", "mine.py:own"]
    code, said = train(capsys, *words)
    rows = runs.rows(tmp_path)
    assert code == 2 and 0 < len(rows) < 5, said
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"rollover: error: {option} = 'mine.py:own'") and text in last, said
    assert "mine.py:" in last and "it must return" in last and "learning_rate" not in said
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == [f"step-{len(rows):06d}"]
    if option not in GOES_ON:
        return
    (tmp_path / "mine.py").write_text(own(parameters, right, "False", wrong))
    code, said = train(capsys, *words, "--resume")
    rows = runs.rows(tmp_path)
    assert code == 0 and [row["step"] for row in rows] == [1, 2, 3, 4, 5], said
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["groups/admitted"] == row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]


ENGINE = """
from fake_engine import FakeEngine
from rollover.engine.protocol import Engine

class Own:
    def __init__(self, setup):
        self._fake = FakeEngine(lambda seed: 3 + seed % 9, vocab_size=100, turns_between_steps=4)

    def __getattr__(self, name):
        if name not in vars(Engine):
            raise AttributeError(f"a run asks for {name}, which is not in the protocol of an engine")
        return getattr(self._fake, name)
"""


def test_an_engine_of_ones_own_generates_for_training_and_evaluation(tmp_path: Path, capsys, monkeypatch) -> None:
    """It has what is in the protocol, and nothing more."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENGINE)
    file = runs.write(tmp_path, engine={"kind": "mine.py:Own"}, eval={"num_tasks": 4})
    code, said = train(capsys, file)
    assert code == 0, said
    rows = runs.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["tokens/step_trained"] > 0 for row in rows)
    lengths = {r["num_tokens"] for r in runs.records(tmp_path / "run")}
    assert lengths <= set(range(3, 12)) and len(lengths) > 1, "those of that engine"
    code, said = train(capsys, file, "--model", tmp_path / "model", verb="eval")
    assert code == 0 and "mean" in said, said


COUNTED = """
from rollover.engine.build import embedded_engine

class Counted:
    def __init__(self, setup):
        self.inside = embedded_engine(setup.model(), setup.config, copies=setup.beside_trainer)
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.inside, name)

    async def extend(self, request):
        self.calls += 1
        return await self.inside.extend(request)

    def stats(self):
        return {**self.inside.stats(), "engine/calls": self.calls, "engine/name": "mine", "loss": 0.0}
"""


def test_what_an_engine_of_ones_own_counts_is_a_metric_and_what_is_none_ends_no_run(tmp_path: Path, capsys) -> None:
    """Nor does what a process reports that was started again from another version of this package."""
    of_functions = runs.write(tmp_path, steps=2, engine={"kind": f"{tmp_path / 'engine.py'}:Counted"})
    (tmp_path / "engine.py").write_text(COUNTED)
    code = main(["train", str(of_functions)])
    out = capsys.readouterr()
    assert code == 0, out.err
    for line in ("the engine reports engine/name = 'mine', which is left out", "the engine reports loss = 0.0, which"):
        assert (out.out + out.err).count(line) == 1
    rows = runs.rows(tmp_path)
    assert 0 < rows[0]["engine/calls"] < rows[1]["engine/calls"] and rows[0]["loss"] != 0.0


# A tracker of the user's own (track.trackers) in a run: told of all of it once, over a kill too, and never its end


KILLED_AT = Path(__file__).with_name("killed_at.py")
TRACKERS = """
import json
from rollover.track.tracker import Tracker

class Kept(Tracker):
    '''Everything by step, in a file beside the run's own.'''

    def on_start(self, run):
        self.path = run.directory / "kept.json"
        self.told = json.loads(self.path.read_text()) if run.resumed else {"rows": {}, "groups": {}, "evals": {}}
        self.told["starts"] = self.told.get("starts", 0) + 1
        self.told["name"] = run.config["run"]["name"]

    def truncate(self, cut):
        for kind in ("rows", "groups", "evals"):
            of = self.told[kind]
            self.told[kind] = {step: what for step, what in of.items() if int(step) <= cut.step}
        groups = self.told["groups"]
        for step in groups:
            if int(step) == cut.step:
                groups[step] = [group for group in groups[step] if not cut.is_repeated(group[0])]

    def on_step(self, row):
        self.told["rows"][str(row["step"])] = row["reward/mean"]
        row.clear()  # a copy
        self.path.write_text(json.dumps(self.told))

    def on_eval(self, row):
        self.told["evals"][str(row["step"])] = row["mean"]

    def on_groups(self, step, groups):
        told = [[g.group.group_id, g.dropped and g.dropped.value, len(g.completions)] for g in groups]
        self.told["groups"].setdefault(str(step), []).extend(told)

    def close(self):
        self.path.write_text(json.dumps(self.told))

class Broken(Tracker):
    def on_step(self, row):
        raise KeyError("no project")
"""


def of_trackers(folder: Path, *names: str, **tables: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(TRACKERS)
    trackers = [f"{folder}/mine.py:{name}" for name in names]
    return runs.write(folder, **{"track": {"live": "plain", "trackers": trackers}} | tables)


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "kept.json").read_text())


def check(folder: Path) -> None:
    """It was told what the run's own files hold."""
    told, rows = kept(folder), runs.rows(folder)
    assert told["rows"] == {str(row["step"]): row["reward/mean"] for row in rows}
    assert told["evals"] == {str(row["step"]): row["mean"] for row in runs.json_lines(folder / "run" / "eval.jsonl")}
    recorded: dict[str, list[list[Any]]] = {}
    for record in runs.records(folder / "run"):
        if record["sibling"] == 0:
            dropped = record["outcome"].removeprefix("dropped:") if record["outcome"] != "trained" else None
            recorded.setdefault(str(record["step"]), []).append([record["group_id"], dropped, record["group_size"]])
    assert told["groups"] == recorded and told["name"] == "tiny"


def test_it_is_told_what_the_files_of_the_run_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = of_trackers(tmp_path, "Broken", "Kept", eval={"num_tasks": 2, "every_steps": 2})
    assert main(["train", str(file)]) == 0
    check(tmp_path)
    out = capsys.readouterr().out
    assert out.count("failed: KeyError: 'no project' (") == 1 and out.count("step 4/4") == 1
    rows = runs.rows(tmp_path)
    assert [row["trackers/failed"] for row in rows] == [0, 1, 2, 3], "counted in the row after"


def test_one_that_goes_on_with_a_killed_run_has_each_step_once(tmp_path: Path) -> None:
    """The kill comes before the fourth row, which it has been told, and is told again."""
    journal = ["--checkpoint.journal_s", "0"]
    file = of_trackers(tmp_path, "Kept", steps=6)
    killed = runs.rollover("rollover.track.jsonl:JsonlSink.write", 4, "train", file, *journal, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL and list(kept(tmp_path)["rows"]) == ["1", "2", "3", "4"]
    assert main(["train", str(file), "--resume", *journal]) == 0
    assert list(kept(tmp_path)["rows"]) == ["1", "2", "3", "4", "5", "6"] and kept(tmp_path)["starts"] == 2
    check(tmp_path)


def test_a_step_whose_row_is_written_has_been_told(tmp_path: Path) -> None:
    """The kill comes right behind the third row: that step is not told again."""
    journal = ["--checkpoint.journal_s", "0.2"]
    file = of_trackers(tmp_path, "Kept")
    killed = runs.rollover("rollover.track.live:LiveView.on_step", 3, "train", file, *journal, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL and len(runs.rows(tmp_path)) == 3
    assert main(["train", str(file), "--resume", *journal]) == 0
    assert list(kept(tmp_path)["rows"]) == ["1", "2", "3", "4"]
    check(tmp_path)


def test_the_row_of_a_step_that_is_trained_again_has_the_users_own_metrics(tmp_path: Path) -> None:
    (tmp_path / "metric.py").write_text("def sizes(groups):\n    return {'groups': len(groups)}\n")
    file = of_trackers(tmp_path, track={"live": "plain", "metrics": f"{tmp_path}/metric.py:sizes"})
    killed = runs.rollover("rollover.track.jsonl:JsonlSink.write", 3, "train", file, script=KILLED_AT)
    assert killed.returncode == -signal.SIGKILL
    assert main(["train", str(file), "--resume"]) == 0
    assert [row["own/groups"] for row in runs.rows(tmp_path)] == [3, 3, 3, 3]


def test_groups_are_told_where_none_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "off"
    file = of_trackers(folder, "Kept", steps=1, track={"rollouts": False, "trackers": [f"{folder}/mine.py:Kept"]})
    assert main(["train", str(file)]) == 0
    assert len([g for g in kept(folder)["groups"]["1"] if g[1] is None]) == 3
    assert not list((folder / "run" / "rollouts").iterdir())


# Hooks of the user's own (run.hooks) in a run: called in order, once, and what becomes of one that fails or hangs


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

class Arguments:
    def on_step_end(self): pass

def none(): return None
"""
FAST: dict[str, dict[str, Any]] = {
    "rollout": {"max_new_tokens": 8},
    "checkpoint": {"every_steps": 0, "save_final_model": False},
}


def of_hooks(folder: Path, name: str, **tables: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "hooks.py").write_text(CLASSES)
    return runs.write(folder, steps=3, **{**FAST, **tables, "run": {"hooks": f"{folder}/hooks.py:{name}"}})


def told(folder: Path) -> list[list[Any]]:
    return runs.json_lines(folder / "told.jsonl")


def test_every_hook_is_called_in_order_once(tmp_path: Path) -> None:
    file = of_hooks(tmp_path, "Told", eval={"num_tasks": 2, "every_steps": 2}, train={"publish_every": 2})
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
    assert all(len(row) > 20 for row in runs.rows(tmp_path)), "hooks get copies"


@pytest.mark.parametrize(
    ("name", "hook", "why", "steps"),
    [
        ("Raises", "on_step_end", "KeyError: 'no service'", 2),
        ("Exits", "on_step_end", "SystemExit: None", 1),
        ("Ends", "on_train_end", "OSError: gone", 3),
    ],
)
def test_failed_code_ends_run_and_it_goes_on(tmp_path, capsys, name: str, hook: str, why: str, steps: int) -> None:
    file = of_hooks(tmp_path, name, eval={"num_tasks": 1, "every_steps": 2})
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    expected = f"rollover: error: run.hooks = '{tmp_path}/hooks.py:{name}.{hook}' failed: {why} ("
    assert error[: len(expected)] == expected
    assert error.endswith("Fix it, and resume with --resume") and "hooks.py:" in error.partition("failed")[2]
    checkpoints = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert checkpoints == [f"step-{steps:06d}"]
    if name != "Ends":
        assert told(tmp_path)[-1] == ["on_train_end", "FunctionError"]
        words = ["--resume", "--run.hooks", f"{tmp_path}/hooks.py:Told"]
        assert main(["train", str(file), *words]) == 0
        assert [what for what in told(tmp_path) if what[0] == "on_step_start"][-1] == ["on_step_start", 3]
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2, 3]


def test_one_that_goes_on_after_a_stop_is_cancelled_and_the_run_ends_in_order(tmp_path: Path, capsys) -> None:
    file, started = of_hooks(tmp_path, "Hangs", watchdog={"grace_s": 0.2}), time.monotonic()
    assert main(["train", str(file)]) == 130
    assert time.monotonic() - started < 50
    out = capsys.readouterr().out
    assert "its on_step_end was cancelled, as it ran for 0.2 s (watchdog.grace_s) after the run was asked" in out
    assert told(tmp_path)[-2:] == [["on_step_end", 1], ["on_train_end", None]]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Wrong", 'a Wrong with on_step_ended, which is no hook. Did you mean "on_step_end"?; it must return'),
        ("Arguments", "whose on_step_end cannot be called as on_step_end(row); it must return"),
        ("none", "returned a NoneType, which has none"),
    ],
)
def test_what_has_no_hooks_is_refused_before_anything_is_loaded(tmp_path: Path, capsys, name: str, why: str) -> None:
    file = of_hooks(tmp_path, name, model={"path": str(tmp_path / "nowhere")})
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"run.hooks = '{tmp_path}/hooks.py:{name}'" in error and why in error, error


def test_the_page_has_every_hook_and_what_it_is_called_with() -> None:
    page = (runs.REPOSITORY / "docs" / "trainer.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(on_\w+)` \| `(\w+)`", page, re.MULTILINE)) == HOOKS


def test_a_class_and_an_object_of_a_program_and_a_killed_run(tmp_path: Path) -> None:
    """No hook is called again for a step that is trained again after a kill: here the last one, from the journal."""
    file = of_hooks(tmp_path, "Told")
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


# tasks.producer in the real loop: a class of the user's own makes the groups, with the run's engine


MINE = '''
from rollover.engine.protocol import ExtendRequest
from rollover.run.producer import ready_group
from rollover.types import Prompt, Reward, SamplingParams, Task, rollout_seed

class Mine:
    """Half of each step is one version old: it is generated a step before."""

    def __init__(self, config, tokenizer, engine):
        self.tokenizer, self.engine, self.left = tokenizer, engine, []

    async def produce(self, step, version):
        print("PRODUCE", step, version, flush=True)
        groups, self.left = self.left, []
        while len(groups) < 2:
            groups.append(await self.group(4 * step + len(groups)))
        self.left = [await self.group(4 * step + 2)]
        return groups

    async def group(self, group_id):
        task = Task(f"t{group_id}", "mine", "mine", prompt=f"count to {group_id}")
        prompt_ids = tuple(self.tokenizer(task.prompt)["input_ids"])
        segments = []
        for sibling in range(3):
            seed = rollout_seed(0, task.task_id, 0, sibling)
            request = ExtendRequest(f"{group_id}-{sibling}", Prompt(prompt_ids), (), 12, seed, SamplingParams())
            segments.append(await self.engine.extend(request))
        texts = [self.tokenizer.decode(s[0].token_ids) for s in segments]
        rewards = [Reward(sum(c.isdigit() for c in text) / 12) for text in texts]
        return ready_group(group_id, task, prompt_ids, segments, rewards)
'''


def test_a_run_with_a_producer_of_its_own(tmp_path: Path) -> None:
    rollout = {
        "max_new_tokens": 12,
        **dict.fromkeys(("groups_per_step", "group_size", "in_flight_groups", "interrupt")),
    }
    recipe = runs.write(
        tmp_path,
        steps=6,
        rollout=rollout | {"max_staleness": 1},
        tasks={"producer": f"{tmp_path / 'mine.py'}:Mine"},
        checkpoint={"every_steps": 3, "save_final_model": False},
    )
    (tmp_path / "mine.py").write_text(MINE)
    first = runs.rollover("train", recipe, "--train.num_steps", "4")
    assert first.returncode == 0, first.stderr
    rows = runs.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1], "the engine has the new weights, the old group not"
    assert all(row["tokens/step_trained"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert {r["group_id"] for r in runs.records(tmp_path / "run")} == {4, 5, 6, 9, 10, 13, 14, 17}
    resumed = runs.rollover("train", recipe, "--resume", "--train.num_steps", "6")
    assert resumed.returncode == 0, resumed.stderr
    assert "PRODUCE 5 4" in resumed.stdout and "PRODUCE 4 3" not in resumed.stdout
    assert len(runs.rows(tmp_path)) == 6


def test_a_producer_that_cannot_be_used_leaves_no_engine_open(tmp_path: Path, capsys, monkeypatch) -> None:
    """In a notebook the process goes on, and the engine's own process would, too."""
    closed: list[EmbeddedEngine] = []
    close = EmbeddedEngine.close

    async def closing(engine: EmbeddedEngine) -> None:
        closed.append(engine)
        await close(engine)

    monkeypatch.setattr(EmbeddedEngine, "close", closing)
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, *args):\n        pass\n")
    recipe = runs.write(
        tmp_path,
        rollout=dict.fromkeys(("groups_per_step", "group_size", "in_flight_groups", "interrupt")),
        tasks={"producer": f"{tmp_path / 'mine.py'}:Mine"},
    )
    code, text = train(capsys, recipe)
    assert code == 2 and "has no method produce" in text, text
    assert len(closed) == 1
