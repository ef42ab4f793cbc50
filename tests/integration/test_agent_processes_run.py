"""Agents in processes of their own in real runs: trained, evaluated, hostile, and killed with the run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import runs
from test_workflow_run import check_whole_of_agents, of_function

from rollover.cli import main
from unit.rewards.children import alive, wait_until_dead

pytest.importorskip("openai")
AGENTS = """
import json, os, subprocess, sys, time, urllib.request
from pathlib import Path

HERE = Path(__file__).parent

def user(text):
    return {"role": "user", "content": text}

def digits(text):
    return sum(c.isdigit() for c in text) / 20

def talk(task, client, model):
    first = client.chat.completions.create(model=model, messages=task.messages).choices[0].message.content
    messages = [*task.messages, {"role": "assistant", "content": first}, user("more")]
    return digits(first + client.chat.completions.create(model=model, messages=messages).choices[0].message.content)

def hostile(task, client, model):
    first = client.chat.completions.create(model=model, messages=task.messages).choices[0].message.content
    kind = int(task.columns["answer"]) % 6
    if kind == 0:
        os._exit(3)
    if kind == 1:
        raise SystemExit(4)
    if kind == 2:
        time.sleep(1000)
    if kind == 3:
        return float(len(bytearray(2**31)))
    return digits(first)

def started():
    with open(HERE / f"pids.{os.getpid()}", "w") as file:
        print(os.getpid(), subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, file=file)
    time.sleep(1000)

def waits(task):
    started()

def program():
    task, headers = json.load(sys.stdin), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    messages = list(task["messages"])
    for turn in range(2):
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            messages += [json.load(answer)["choices"][0]["message"], user("more")]
    print(json.dumps({"answer": messages[-2]["content"]}))

if __name__ == "__main__":
    program() if sys.argv[1:] == ["program"] else started()
"""


def recipe(folder: Path, agent: str, **tables) -> Path:
    """`agent`: a function, or "program ..." for the words of one."""
    of = {"function": f"{folder}/processes.py:{agent}", "num_processes": 3}
    if agent.startswith("program"):
        of = {"function": None, "command": ["python", f"{folder}/processes.py", *agent.split()[:1]]}
    if agent == "program waits":
        of["command"] = ["python", f"{folder}/processes.py"]
    path = of_function(folder, "talk", workflow=of | tables.pop("workflow", {}), **tables)
    (folder / "processes.py").write_text(AGENTS)
    return path


@pytest.mark.parametrize("agent", ["talk", "program"])
def test_agents_in_processes_are_trained_and_evaluated(tmp_path: Path, agent: str) -> None:
    assert main(["train", str(recipe(tmp_path, agent, steps=1)), "--eval.num_tasks=2"]) == 0
    check_whole_of_agents(tmp_path / "run", 1)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/done"] >= 9 and row["episodes/error"] == 0 and row["turns/continued"] >= 9
    assert row["reward/missing"] == 0 and row["reward/mean"] > 0
    assert len(runs.json_lines(tmp_path / "run" / "eval.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process so")
def test_what_agents_do_to_their_processes_costs_their_episodes_alone(tmp_path: Path) -> None:
    file = recipe(tmp_path, "hostile", steps=2, workflow={"timeout_s": 3.0, "memory_gb": 1.0, "retries": 0})
    assert main(["train", str(file)]) == 0
    check_whole_of_agents(tmp_path / "run", 2)
    row = runs.rows(tmp_path)[-1]
    assert row["episodes/done"] >= 6 and row["episodes/error"] >= 6 and row["episodes/timeout"] >= 3


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what has left the process group is not found")
@pytest.mark.parametrize("agent", ["waits", "program waits"])
def test_nothing_is_left_over_where_the_run_is_killed(tmp_path: Path, agent: str) -> None:
    run = runs.start("train", recipe(tmp_path, agent))
    pids: list[int] = []
    try:
        deadline = time.monotonic() + 300
        while len(pids) < 6:
            assert time.monotonic() < deadline and run.poll() is None, run.err
            time.sleep(0.05)
            pids = [int(pid) for path in tmp_path.glob("pids.*") for pid in path.read_text().split()]
        assert all(map(alive, pids))
        run.send_signal(signal.SIGKILL)
        assert wait_until_dead(pids, 20)
    finally:
        run.kill()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
