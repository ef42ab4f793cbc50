"""A run on servers of its own trains, a server that is killed costs it no token, and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import runs
from runs import check_whole

from rollover.config.load import load_config
from rollover.process_tree import descendants, is_running
from rollover.run.setup import Components

pytest.importorskip("aiohttp")

LIMIT_S = 400  # more than any machine takes


def servers(parent: int) -> list[int]:
    """Processes of `rollover serve` that this process has started, the oldest first."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            with contextlib.suppress(psutil.Error):
                found += [child.pid] if "serve" in child.cmdline() else []
    return sorted(found)


def listened_to(family: set[psutil.Process]) -> set[int]:
    """The TCP ports on which these processes listen."""
    found = [connection for process in family for connection in process.net_connections("tcp4")]
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    """Neither a process, nor a port, nor a file in shared memory."""
    engine = {"kind": "remote", "num_servers": 1, "max_running": 4}
    recipe = runs.write(tmp_path, steps=100, engine=engine, checkpoint={"save_final_model": False})
    run = runs.start("train", recipe, log=tmp_path / "log")
    deadline = time.monotonic() + LIMIT_S
    try:
        while not runs.rows(tmp_path):
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        family = descendants(run.pid) | {psutil.Process(run.pid)}
        ports = listened_to(family)
        opened = [os.readlink(link) for link in Path(f"/proc/{run.pid}/fd").glob("*")]
        (folder,) = {Path(path).parent for path in opened if "/rollover-weights-" in path}
        assert len(servers(run.pid)) == 1 and ports and list(folder.glob("*.safetensors"))
    finally:
        run.kill()
    deadline = time.monotonic() + LIMIT_S
    while left := [
        *filter(is_running, family),
        *filter(answers, ports),
        *folder.parent.glob(folder.name),
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_run_that_waits_for_servers_can_be_cancelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a Ctrl-C does before the run listens to signals: long before it gives up."""
    engine = {"kind": "remote", "urls": ["http://127.0.0.1:9"], "kv_memory_gb": None, "give_up_s": LIMIT_S}
    config = load_config([runs.write(tmp_path, engine=engine)]).config

    async def work() -> None:
        building = asyncio.ensure_future(Components.build(config))
        while "waited for" not in capsys.readouterr().err:
            assert not building.done(), building.exception()
            await asyncio.sleep(0.05)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    asyncio.run(work())  # which waits for its threads


def test_a_run_goes_on_when_one_of_its_servers_is_killed(tmp_path: Path) -> None:
    """Each in turn, while it trains adapters. Weights travel through files that are gone at the end."""
    files = tmp_path / "weights"
    steps = 8
    recipe = runs.write(
        tmp_path,
        steps=steps,
        engine={"kind": "remote", "num_servers": 2, "weights_dir": str(files), "max_running": 4},
        rollout={"interrupt": "on_weight_update", "overlap": True, "max_new_tokens": 96},
        checkpoint={"save_final_model": False},
    )
    run = runs.start("train", recipe, "--model.lora.rank", "4", log=tmp_path / "log")
    killed: list[int] = []
    seen: set[int] = set()
    began = time.monotonic()
    try:
        while run.poll() is None and time.monotonic() - began < LIMIT_S:
            rows = runs.rows(tmp_path)
            there = servers(run.pid)
            seen |= set(there)
            if len(killed) < 2 and len(rows) > 2 * len(killed) and len(there) == 2:
                killed.append(next(pid for pid in there if pid not in killed))
                os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.05)
        assert run.wait(1) == 0, (tmp_path / "log").read_text()
    finally:
        run.kill()
    rows = runs.rows(tmp_path)
    check_whole(tmp_path / "run", steps)
    assert len(killed) == 2 and rows[-1]["engine/ejections"] >= 1
    assert rows[-1]["engine/span_mismatches"] == 0
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(files.iterdir())
    logs = [(tmp_path / "run" / "logs" / f"server-{number}.log").read_text() for number in (0, 1)]
    assert sum(log.count("--- started") for log in logs) >= 3
