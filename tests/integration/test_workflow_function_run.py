"""workflow.function in runs of the real program: by chat and over HTTP, hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
from test_workflow_run import TEMPLATE
from test_workflow_run import recipe as of_environment

from rollover.cli import main

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


def check_whole(run_dir: Path, steps: int) -> None:
    """An episode has as many rollouts as its agent makes of it."""
    runs.check_whole(run_dir, steps, siblings=0)


def recipe(folder: Path, name: str, *, steps: int = 2, **tables) -> Path:
    workflow = {"environment": None, "function": f"{folder}/agents.py:{name}", **tables.pop("workflow", {})}
    path = of_environment(folder, "Game", steps=steps, workflow=workflow, **tables)
    (folder / "agents.py").write_text(FUNCTIONS)
    return path


def test_roles_and_turns_of_a_workflow_are_trained(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "talk"))]) == 0
    check_whole(tmp_path / "run", 2)
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/done"] >= 18 and row["turns/continued"] >= 10, row
    assert row["dropped/restarted/tokens"] == 0 and row["tokens/environment"] > 0
    assert row["turns/merged_share"] == 1.0 and row["turns/max"] == 2 and 1 < row["turns/mean"] < 2
    assert row["episodes/timeout_share"] == 0.0 and {"roles/judge/reward_mean", "roles/solver/reward_std"} <= row.keys()


def test_a_decorated_workflow_has_one_role_taught_and_the_other_rewarded(tmp_path: Path) -> None:
    """The solver gets no reward at all, and yet each of its tokens has an advantage; the judge's are of its rewards."""
    assert main(["train", str(recipe(tmp_path, "taught"))]) == 0
    check_whole(tmp_path / "run", 2)
    for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl"):
        assert row["distill/kl"] != 0 and row["time/teacher_s"] > 0 and row["grad_norm"] > 0
        assert row["roles/solver/reward_mean"] is None and row["roles/judge/reward_mean"] is not None
        assert row["roles/solver/advantage_zero_share"] == 0.0, "each has the teacher's"
        assert row["train/zero_advantage_tokens"] < row["tokens/step_trained"]


def test_an_advantage_of_ones_own_is_trained(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "advantages", steps=1, algorithm={"advantage": "precomputed"}))]) == 0
    (row,) = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert row["grad_norm"] > 0 and row["groups/zero_variance"] == 1.0


def test_where_the_template_cannot_go_on_no_turn_is_merged(tmp_path: Path) -> None:
    """It counts the messages, so that what was sampled after fewer of them is no beginning of what follows."""
    counts = "{{ messages | length }}" + TEMPLATE
    assert main(["train", str(recipe(tmp_path, "talk", steps=1, template=counts))]) == 0
    check_whole(tmp_path / "run", 1)
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["turns/merged_share"] == 0.0 and row["turns/max"] == 2 and row["turns/breaks/template"] > 0


def test_agents_that_are_cut_off_are_counted_as_a_share_of_those_that_ended(tmp_path: Path) -> None:
    workflow = {"timeout_s": 0.5, "on_timeout": "score"}
    assert main(["train", str(recipe(tmp_path, "late", steps=1, workflow=workflow))]) == 0
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/timeout"] >= 3 and 0.05 < row["episodes/timeout_share"] < 0.6
    assert row["episodes/ended"] == row["episodes/timeout"] + row["episodes/done"]


def test_an_agent_of_an_openai_client_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    assert main(["train", str(recipe(tmp_path, "over_http", steps=1))]) == 0
    check_whole(tmp_path / "run", 1)
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/done"] >= 9 and row["episodes/error"] == 0 and row["turns/continued"] >= 9


def test_agents_that_never_end_are_named_and_do_not_hold_up_the_end(tmp_path: Path) -> None:
    file = recipe(tmp_path, "never_ends", steps=1, watchdog={"grace_s": 1.5})
    done = runs.rollover("train", file, timeout=120)
    assert done.returncode == 2 and "nothing was trained: every gradient was 0" in done.stderr, done.stderr
    check_whole(tmp_path / "run", 1)
    waits = done.stderr.index("the run is over. It waits for what was cancelled, 1.5 s at most: ")
    assert "agents.py:" in done.stderr[waits:].splitlines()[0]
    assert "s (watchdog.grace_s): left behind" in done.stderr and "the thread left" in done.stderr
    assert done.stderr.rstrip().endswith("did not end within 1.5 s (watchdog.grace_s): the process ends all the same")


@pytest.mark.parametrize("name", ["gives_up", "hangs_up"])
def test_tokens_of_calls_that_were_given_up_are_abandoned(tmp_path: Path, name: str) -> None:
    pytest.importorskip("openai")
    file = recipe(tmp_path, name, steps=2)
    assert main(["train", str(file)]) == 0
    check_whole(tmp_path / "run", 2)
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    given_up = [r for r in runs.records(tmp_path / "run") if r["stop_reason"] == "abandoned"]
    assert given_up and all(r["score"] is None for r in given_up)
    of_trained = [r for r in given_up if r["outcome"] == "dropped:abandoned"]
    tokens = sum(len(r["token_ids"]) for r in of_trained)
    assert row["dropped/abandoned/tokens"] == tokens > 0 and row["dropped/abandoned/groups"] == 0


def test_an_agent_that_asks_on_after_every_refusal_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    file = recipe(
        tmp_path, "asks_on", steps=1, workflow={"timeout_s": 0.5}, rewards={"min_valid": 2}, watchdog={"grace_s": 0.5}
    )
    done = runs.rollover("train", file, timeout=120)
    assert done.returncode == 0, done.stderr
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/timeout"] >= 3 and row["episodes/done"] >= 6


def test_a_branch_that_exits_costs_its_episode_alone(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "exits", steps=1, rewards={"min_valid": 2}))]) == 0
    check_whole(tmp_path / "run", 1)
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/error"] >= 3 and row["episodes/done"] >= 6


@pytest.mark.parametrize(
    ("given", "brought", "partial"),
    [
        ("float(len(reply.token_ids))", 3, 0),
        ("None if episode.episode_id.endswith('-0') else 7.0", 0, 3),
        ("None", 0, 0),
    ],
    ids=["all", "some", "none"],
)
def test_own_advantages_auto_uses_complete_groups_and_estimates_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, brought: int, partial: int
) -> None:
    file = recipe(tmp_path, "advantages", steps=2, rollout={"max_new_tokens": 16})
    agents = tmp_path / "agents.py"
    varied = agents.read_text().replace("reward = 1.0", "reward = float(len(reply.token_ids) % 3)")
    agents.write_text(varied.replace("ADVANTAGES[0](len(reply.token_ids))", given))
    assert main(["train", str(file), "--workflow.own_advantages", "auto"]) == 0
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
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
    file = recipe(tmp_path, "advantages", steps=1, algorithm={"advantage": "precomputed"})
    with pytest.warns(DeprecationWarning, match='means "broadcast"'):
        assert main(["train", str(file), "--workflow.credit", "per_step"]) == 0
    assert "turn_returns" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["workflow"]["credit"] == "broadcast"
