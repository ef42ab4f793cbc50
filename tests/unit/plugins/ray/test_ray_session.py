"""What a driver started ends with it, also what has left its family, and its folder is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollover.process_tree import has_ended, resident_bytes
from rollover.processes import child_environment

LIMIT_S = 60

DRIVER = """
import subprocess, sys, time
from rollover.plugins.ray.session import start_cleanup
start_cleanup(sys.argv[1])
daemon = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
daemon += " start_new_session=True).pid, flush=True); time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_cleanup_kills_descendants_of_a_killed_driver(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline()) for _ in range(2)]
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    orphan = subprocess.Popen([*sleep, f"--socket={folder}/raylet"])  # of no family: its parent has ended
    reader = subprocess.Popen([*sleep, f"{folder}/log"])
    cleanup = next(p for p in psutil.Process(driver.pid).children() if "rollover.plugins.ray.session" in p.cmdline())
    try:
        time.sleep(3)  # so that the cleanup has looked
        os.kill(cleanup.pid, signal.SIGTERM)
        assert not any(map(has_ended, pids)) and resident_bytes(driver.pid) > resident_bytes(pids[1]) > 10**6
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + LIMIT_S
        ended = [*pids, orphan.pid, cleanup.pid]
        while time.monotonic() < deadline and (folder.exists() or not all(map(has_ended, ended))):
            time.sleep(0.05)
        assert not folder.exists() and all(map(has_ended, ended))
        assert reader.poll() is None, "who reads what Ray wrote is not Ray's"
    finally:
        for process in (orphan, reader):
            process.kill()
            process.wait()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
