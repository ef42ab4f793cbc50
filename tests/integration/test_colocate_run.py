"""A run whose servers and trainer have the same GPUs in turns: servers sleep while it trains, and no token is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
from runs import check_whole

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

LIMIT_S = 120  # more than any machine takes
STEPS = 4
METRICS = '''
"""Called while a step is trained: asks each server whether it sleeps. In step 2 the fault happens, if there is one."""

import json, os, pathlib, psutil, signal, urllib.request

HERE = pathlib.Path(__file__).parent
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def servers():
    """Process ids of the run's servers."""
    return [child.pid for child in psutil.Process().children() if "serve" in child.cmdline()]


def sleeps(pid):
    variables = dict(each.partition("=")[::2] for each in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\\0"))
    inodes = {link.readlink().name for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [row.split() for row in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = (int(row[1][-4:], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/is_sleeping")
    request.add_header("Authorization", "Bearer " + variables["ROLLOVER_SERVER_TOKEN"])
    return json.loads(OPENER.open(request, timeout=60).read())["is_sleeping"]


def metrics(groups):
    pids = servers()
    found = {"servers": len(pids), "asleep": sum(map(sleeps, pids))}
    with (HERE / "calls").open("a") as calls:
        calls.write("x")
    fault = HERE / "fault"
    if fault.exists() and (HERE / "calls").stat().st_size == 2:
        name = fault.read_text()
        os.kill(pids[0] if name == "server" else os.getpid(), signal.SIGINT if name == "stop" else signal.SIGKILL)
    return found
'''


def recipe(folder: Path, fault: str = "", **tables: Any) -> Path:
    (folder / "metrics.py").write_text(METRICS)
    if fault:
        (folder / "fault").write_text(fault)
    return runs.write(
        folder,
        steps=STEPS,
        cluster={"colocate": True},
        engine={"kind": "remote", "num_servers": 1, "max_running": 4, "kv_memory_gb": 0.1},
        track={"live": "plain", "metrics": f"{folder / 'metrics.py'}:metrics"},
        checkpoint={"every_steps": 2, "journal_s": 0.05, "save_final_model": False},
        **tables,
    )


@pytest.mark.parametrize("trainer", ["local", pytest.param("ranks", marks=pytest.mark.slow)])
def test_colocated_servers_sleep_while_each_step_is_trained(tmp_path: Path, trainer: str) -> None:
    """Unfinished rollouts are continued, evaluations find servers awake, and the time is accounted for."""
    path = recipe(
        tmp_path, eval={"every_steps": 2, "num_tasks": 4, "max_new_tokens": 4}, backend={"type": trainer},
        run={"threads": 2 if trainer == "ranks" else 1},
    )  # fmt: skip
    done = runs.rollover("train", path, "--train.publish_every", "2", timeout=LIMIT_S)
    assert done.returncode == 0, done.err
    rows = runs.rows(tmp_path)
    assert [(row["own/servers"], row["own/asleep"]) for row in rows] == [(1, 1)] * STEPS
    assert rows[-1]["rollouts/resumed"] > 0 and rows[-1]["engine/ejections"] == 0
    assert rows[-1]["tokens/generated"] == sum(rows[-1][f"tokens/{k}"] for k in ("trained", "dropped", "held"))
    assert all(row["time/sleep_s"] > 0 and row["time/other_s"] < row["time/step_s"] / 2 for row in rows)
    assert len(runs.json_lines(tmp_path / "run" / "eval.jsonl")) >= 2


def test_colocated_server_killed_asleep_starts_after_the_step(tmp_path: Path) -> None:
    done = runs.rollover("train", recipe(tmp_path, "server"), timeout=LIMIT_S)
    assert done.returncode == 0, done.err
    check_whole(tmp_path / "run", STEPS)
    rows = runs.rows(tmp_path)
    assert [(row["own/servers"], row["own/asleep"]) for row in rows] == [(1, 1)] * STEPS
    assert rows[-1]["engine/ejections"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_colocated_run_ended_while_servers_sleep_resumes_whole(tmp_path: Path, fault: str) -> None:
    path = recipe(tmp_path, fault)
    first = runs.rollover("train", path, timeout=LIMIT_S)
    assert first.returncode == (-9 if fault == "kill" else 130), first.err
    done = runs.rollover("train", path, "--resume", timeout=LIMIT_S)
    assert done.returncode == 0, done.err
    check_whole(tmp_path / "run", STEPS)
    assert runs.rows(tmp_path)[-1]["rollouts/resumed"] > 0
