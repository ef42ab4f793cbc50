"""Episodes of environments and of agent functions in real runs, trained and evaluated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import runs
from runs import check_whole

import rollover
import tiny
from rollover.cli import main

# workflow.environment in runs of the real program: hostile classes, by Python, and evaluated


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
GAMES = """
import sys, threading
from rollover import Observation

class Game:
    turns = 3

    def reset(self, answer):
        self.number, self.said = int(answer), []
        return f" (up to {self.number})"

    def step(self, message):
        self.said.append(message)
        return Observation("more", reward=sum(c.isdigit() for c in message) / 20, done=len(self.said) == self.turns)

class Hostile(Game):  # by the number of the task
    def step(self, message):
        if self.number % 5 == 1:
            sys.exit(3)
        if self.number % 5 == 2:
            threading.Event().wait(60)
        return super().step(message)
"""


def of_environment(folder: Path, name: str, *, steps: int = 2, template: str = TEMPLATE, **tables) -> Path:
    """The tiny model ends a turn after eight tokens in the mean: every twelfth token does."""
    folder.mkdir(exist_ok=True)
    tiny.save(folder / "model", max_position_embeddings=1024)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    (folder / "games.py").write_text(GAMES)
    workflow = {"environment": f"{folder}/games.py:{name}", **tables.pop("workflow", {})}
    rollout = {"stop_token_ids": list(range(2, 14)), "max_new_tokens": 100, **tables.pop("rollout", {})}
    return runs.write(folder, steps=steps, workflow=workflow, rollout=rollout, **tables)


def test_a_step_that_exits_or_hangs_each_time_costs_the_reward(tmp_path: Path) -> None:
    file = of_environment(tmp_path, "Hostile", workflow={"tool_timeout_s": 1.0})
    assert main(["train", str(file)]) == 0
    (*_, row) = runs.rows(tmp_path)
    assert row["dropped/too_few_rewards/groups"] >= 1 and row["dropped/failed/groups"] == 0 and row["episodes/done"] > 0
    assert row["episodes/failed"] >= 3 and row["episodes/retried"] >= 3
    check_whole(tmp_path / "run", 2)


def test_a_class_of_a_program_is_trained_and_evaluated(tmp_path: Path, capsys) -> None:
    names: dict = {"__file__": str(tmp_path / "games.py")}
    exec(GAMES, names)
    file = of_environment(tmp_path, "Game")
    run = rollover.train(config=file, workflow={"environment": names["Game"]}, eval={"num_tasks": 4})
    assert run.config["workflow"]["environment"].startswith("<python>:Game-")
    assert run.metrics[-1]["episodes/done"] > 0
    check_whole(tmp_path / "run", 2)
    capsys.readouterr()
    assert main(["eval", str(file), "--eval.num_tasks=4", "--model", str(run.model_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(run.evaluations[-1]["mean"])


# workflow.function in runs of the real program: by chat and over HTTP, hostile


FUNCTIONS = """
import asyncio, json, threading

import rollover

def user(text):
    return {"role": "user", "content": text}

async def talk(task, episode):
    solver, judge = episode.trajectory("solver"), episode.trajectory("judge")
    first = await solver.chat(task.messages)
    second = await solver.chat([*task.messages, first.message, user("more")])
    verdict = await judge.chat([user(first.text[:3])])
    solver.reward = sum(c.isdigit() for c in first.text + second.text) / 20
    judge.reward = sum(c.isdigit() for c in verdict.text) / 20

def told(task, messages):
    return [{"role": "system", "content": "It is " + task.columns["answer"]}, *messages]

@rollover.distilled(teacher="initial", roles="solver", privileged=told)
async def taught(task, episode):
    solver, judge = episode.trajectory("solver"), episode.trajectory("judge")
    first = await solver.chat(task.messages)
    judge.reward = sum(c.isdigit() for c in (await judge.chat([user(first.text[:3])])).text) / 20

async def advantages(task, episode):
    trajectory = episode.trajectory("solver")
    reply = await trajectory.chat(task.messages)
    trajectory.advantage = ADVANTAGES[0](len(reply.token_ids))
    trajectory.reward = 1.0

ADVANTAGES = [lambda num: float(num)]

async def over_http(task, client, model):
    messages, digits = list(task.messages), 0
    for turn in range(2):
        done = await client.chat.completions.create(model=model, messages=messages)
        message = done.choices[0].message
        messages += [message.model_dump(exclude_none=True), user("more")]
        digits += sum(c.isdigit() for c in message.content)
    return digits / 20

async def late(task, episode):
    reply = await episode.trajectory().chat(task.messages)
    if episode.episode_id.endswith("-0"):
        await asyncio.sleep(60)
    return sum(c.isdigit() for c in reply.text) / 20

async def never_ends(task, episode):
    await episode.trajectory().chat(task.messages)
    threading.Thread(target=threading.Event().wait, name="left").start()
    swallowing.append(asyncio.ensure_future(swallows()))
    return 1.0 if int(task.columns["answer"]) % 2 else 0.0

swallowing = []

async def swallows():
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            pass

async def asks_on(task, episode):
    trajectory = episode.trajectory()
    if episode.episode_id.endswith("-0"):
        while True:  # without an await of its own
            try:
                await trajectory.chat("no messages")
            except BaseException:
                pass
    reply = await trajectory.chat(task.messages)
    return sum(c.isdigit() for c in reply.text) / 20

async def exits(task, episode):
    async def ask(number):
        reply = await episode.trajectory().chat([*task.messages, user(str(number))])
        if number and episode.episode_id.endswith("-0"):
            raise SystemExit(0)
        return sum(c.isdigit() for c in reply.text) / 20
    return sum(await asyncio.gather(ask(0), ask(1)))

async def gives_up(task, episode):
    try:
        await asyncio.wait_for(episode.trajectory().chat(task.messages), 0.001)
    except TimeoutError:
        pass
    reply = await episode.trajectory().chat([*task.messages, user("again")])
    return sum(c.isdigit() for c in reply.text) / 20

async def hangs_up(task, base_url, api_key, episode):
    host, port = base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "policy", "messages": list(task.messages)})
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer {api_key}\\r\\n"
        f"Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode()
    )
    await writer.drain()
    writer.close()
    reply = await episode.trajectory().chat([*task.messages, user("again")])
    return sum(c.isdigit() for c in reply.text) / 20
"""


def check_whole_of_agents(run_dir: Path, steps: int) -> None:
    """An episode has as many rollouts as its agent makes of it."""
    runs.check_whole(run_dir, steps, siblings=0)


def of_function(folder: Path, name: str, *, steps: int = 2, **tables) -> Path:
    workflow = {"environment": None, "function": f"{folder}/agents.py:{name}", **tables.pop("workflow", {})}
    path = of_environment(folder, "Game", steps=steps, workflow=workflow, **tables)
    (folder / "agents.py").write_text(FUNCTIONS)
    return path


def test_a_decorated_workflow_has_one_role_taught_and_the_other_rewarded(tmp_path: Path) -> None:
    """The solver gets no reward at all, and yet each of its tokens has an advantage; the judge's are of its rewards."""
    assert main(["train", str(of_function(tmp_path, "taught"))]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    for row in runs.rows(tmp_path):
        assert row["distill/kl"] != 0 and row["time/teacher_s"] > 0 and row["grad_norm"] > 0
        assert row["roles/solver/reward_mean"] is None and row["roles/judge/reward_mean"] is not None
        assert row["roles/solver/advantage_zero_share"] == 0.0, "each has the teacher's"
        assert row["train/zero_advantage_tokens"] < row["tokens/step_trained"]


def test_where_the_template_cannot_go_on_no_turn_is_merged(tmp_path: Path) -> None:
    """It counts the messages, so that what was sampled after fewer of them is no beginning of what follows."""
    counts = "{{ messages | length }}" + TEMPLATE
    assert main(["train", str(of_function(tmp_path, "talk", steps=1, template=counts))]) == 0
    check_whole_of_agents(tmp_path / "run", 1)
    row = runs.rows(tmp_path)[-1]
    assert row["turns/merged_share"] == 0.0 and row["turns/max"] == 2 and row["turns/breaks/template"] > 0


def test_agents_that_are_cut_off_are_counted_as_a_share_of_those_that_ended(tmp_path: Path) -> None:
    workflow = {"timeout_s": 0.5, "on_timeout": "score"}
    assert main(["train", str(of_function(tmp_path, "late", steps=1, workflow=workflow))]) == 0
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/timeout"] >= 3 and 0.05 < row["episodes/timeout_share"] < 0.6
    assert row["episodes/ended"] == row["episodes/timeout"] + row["episodes/done"]


def test_agents_that_never_end_are_named_and_do_not_hold_up_the_end(tmp_path: Path) -> None:
    file = of_function(tmp_path, "never_ends", steps=1, watchdog={"grace_s": 1.5})
    done = runs.rollover("train", file, timeout=120)
    assert done.returncode == 2 and "nothing was trained: every gradient was 0" in done.stderr, done.stderr
    check_whole_of_agents(tmp_path / "run", 1)
    waits = done.stderr.index("the run is over. It waits for cancelled tasks, 1.5 s at most: ")
    assert "agents.py:" in done.stderr[waits:].splitlines()[0]
    assert "s (watchdog.grace_s): left behind" in done.stderr and "the thread left" in done.stderr
    assert done.stderr.rstrip().endswith("did not end within 1.5 s (watchdog.grace_s): the process ends all the same")


@pytest.mark.parametrize("name", ["gives_up", "hangs_up"])
def test_tokens_of_calls_that_were_given_up_are_abandoned(tmp_path: Path, name: str) -> None:
    pytest.importorskip("openai")
    file = of_function(tmp_path, name, steps=2)
    assert main(["train", str(file)]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    row = runs.rows(tmp_path)[-1]
    given_up = [r for r in runs.records(tmp_path / "run") if r["stop_reason"] == "abandoned"]
    assert given_up and all(r["score"] is None for r in given_up)
    of_trained = [r for r in given_up if r["outcome"] == "dropped:abandoned"]
    tokens = sum(len(r["token_ids"]) for r in of_trained)
    assert row["dropped/abandoned/tokens"] == tokens > 0 and row["dropped/abandoned/groups"] == 0


def test_an_agent_that_asks_on_after_every_refusal_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    file = of_function(
        tmp_path, "asks_on", steps=1, workflow={"timeout_s": 0.5}, rewards={"min_valid": 2}, watchdog={"grace_s": 0.5}
    )
    done = runs.rollover("train", file, timeout=120)
    assert done.returncode == 0, done.stderr
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/timeout"] >= 3 and row["episodes/done"] >= 6


def test_a_branch_that_exits_costs_its_episode_alone(tmp_path: Path) -> None:
    assert main(["train", str(of_function(tmp_path, "exits", steps=1, rewards={"min_valid": 2}))]) == 0
    check_whole_of_agents(tmp_path / "run", 1)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/error"] >= 3 and row["episodes/done"] >= 6


@pytest.mark.parametrize(
    ("given", "brought", "partial"),
    [
        ("float(len(reply.token_ids))", 3, 0),
        ("None if episode.episode_id.endswith('-0') else 7.0", 0, 3),
    ],
    ids=["all", "some"],
)
def test_own_advantages_auto_uses_complete_groups_and_estimates_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, brought: int, partial: int
) -> None:
    file = of_function(tmp_path, "advantages", steps=2, rollout={"max_new_tokens": 16})
    agents = tmp_path / "agents.py"
    varied = agents.read_text().replace("reward = 1.0", "reward = float(len(reply.token_ids) % 3)")
    agents.write_text(varied.replace("ADVANTAGES[0](len(reply.token_ids))", given))
    assert main(["train", str(file), "--workflow.own_advantages", "auto"]) == 0
    rows = runs.rows(tmp_path)
    assert [row["precomputed/groups"] for row in rows] == [brought] * 2
    assert [row["precomputed/partial_groups"] for row in rows] == [partial] * 2
    said = "".join(capsys.readouterr())
    assert said.count("the estimator gives all of that group's advantages") == (1 if partial else 0)
    for record in runs.records(tmp_path / "run"):
        if not brought:
            assert record["advantage"] != 7.0, "an estimate, not what the agent gave"
        else:
            assert record["advantage"] == sum(segment["num_tokens"] for segment in record["segments"]), (
                "what the agent gave, not an estimate"
            )


def test_credit_per_step_is_broadcast_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = of_function(tmp_path, "advantages", steps=1, algorithm={"advantage": "precomputed"})
    with pytest.warns(DeprecationWarning, match='means "broadcast"'):
        assert main(["train", str(file), "--workflow.credit", "per_step"]) == 0
    assert "turn_returns" in capsys.readouterr().err
    (row,) = runs.rows(tmp_path)
    assert row["grad_norm"] > 0 and row["groups/zero_variance"] == 1.0, "the agent's advantages are trained"
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["workflow"]["credit"] == "broadcast"


# Held-out tasks of a workflow in runs of the real program: before, between and after steps, after a kill in the
# middle of an evaluation, by `rollover eval`, over HTTP


KILLED = """
import os, signal
from pathlib import Path

HERE = Path(__file__).parent

async def killed_in_evaluation(task, episode):
    with (HERE / "asked").open("a") as file:
        print(os.getpid(), episode.episode_id, file=file)
    reply = await episode.trajectory("solver").chat(task.messages)
    killed_in_evaluation.num = getattr(killed_in_evaluation, "num", 0) + episode.episode_id.startswith("eval-")
    if killed_in_evaluation.num == 12 and (HERE / "kill").exists():  # the second evaluation's fourth episode
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(c.isdigit() for c in reply.text) / 20
"""
EVAL = {"num_tasks": 4, "samples_per_task": 2, "every_steps": 1}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return runs.json_lines(folder / "run" / "eval.jsonl")


def check_apart(folder: Path, steps: int) -> None:
    """The rows, records and the trace of the run know nothing of its evaluations."""
    check_whole_of_agents(folder / "run", steps)
    assert all(r["group_id"] >= 0 for r in runs.records(folder / "run"))
    assert all(e.group is None or e.group >= 0 for e in runs.trace(folder / "run"))


def test_evaluations_of_roles_before_between_and_after_steps(tmp_path: Path) -> None:
    file = of_function(tmp_path, "talk", eval=EVAL)
    assert main(["train", str(file)]) == 0
    check_apart(tmp_path, 2)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/done"] >= 18 and row["turns/continued"] >= 10, row
    assert row["dropped/restarted/tokens"] == 0 and row["tokens/environment"] > 0
    assert row["turns/merged_share"] == 1.0 and row["turns/max"] == 2 and 1 < row["turns/mean"] < 2
    assert row["episodes/timeout_share"] == 0.0 and {"roles/judge/reward_mean", "roles/solver/reward_std"} <= row.keys()
    rows = evaluations(tmp_path)
    assert [row["policy_version"] for row in rows] == [0, 1, 2]
    for row in rows:
        roles = row["roles"]
        assert row["samples"] and roles["solver"]["samples"] == roles["judge"]["samples"] == 8
        assert row["mean"] == pytest.approx((roles["solver"]["mean"] + roles["judge"]["mean"]) / 2)
        assert row["episodes"] == {"done": 8, "length": 0, "timeout": 0, "error": 0, "restarted": 0}
    model, out = tmp_path / "run" / "model", tmp_path / "out.jsonl"
    assert main(["eval", str(file), "--model", str(model), "--answers", str(out)]) == 0
    answers = runs.json_lines(out)
    again = sum(a["score"] for a in answers) / len(answers)
    assert again == pytest.approx(rows[-1]["mean"]), "the saved model says what the last evaluation heard"
    assert [of["role"] for of in answers[0]["roles"]] == ["solver", "judge"] and "[judge]" in answers[0]["answer"]


def test_an_evaluation_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    file = of_function(tmp_path, "over_http", steps=1, eval={"num_tasks": 3})
    assert main(["train", str(file)]) == 0
    check_apart(tmp_path, 1)
    assert [row["episodes"]["done"] for row in evaluations(tmp_path)] == [3, 3]
    assert "roles" not in evaluations(tmp_path)[0]
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/done"] >= 9 and row["episodes/error"] == 0 and row["turns/continued"] >= 9
    capsys.readouterr()
    assert main(["eval", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(evaluations(tmp_path)[0]["mean"])


def test_a_run_that_was_killed_in_an_evaluation_makes_it_again(tmp_path: Path) -> None:
    file = of_function(tmp_path, "killed_in_evaluation", eval=EVAL, checkpoint={"every_steps": 1, "journal_s": 0.05})
    with (tmp_path / "agents.py").open("a") as agents:
        agents.write(KILLED)
    (tmp_path / "kill").touch()
    assert runs.rollover("train", file).returncode == -9
    assert [row["step"] for row in evaluations(tmp_path)] == [0]
    (tmp_path / "kill").unlink()
    assert main(["train", str(file), "--resume"]) == 0
    check_apart(tmp_path, 2)
    assert [row["step"] for row in evaluations(tmp_path)] == [0, 1, 2]
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    again = [episode for pid, episode in asked if pid != asked[0][0] and episode.startswith("eval-")]
    assert len(again) == 16, "two evaluations, the one that was cut off among them"
