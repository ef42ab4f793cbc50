"""Child processes: how they start, end with their parent, and are started again."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollover import processes
from rollover.back_off import BackOff
from rollover.config import RunConfig
from rollover.files import paths_begin_in
from rollover.process_tree import is_stopped
from rollover.processes import brief_waiting, child_command, child_environment
from unit.rewards.children import alive, wait_until_dead

# How a child process of ours is started, and that it ends with its parent, stopped or not


SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.mark.parametrize(("kept", "binding"), [(False, "die_with"), (True, "keep")])
def test_a_child_is_bound_to_its_parent_and_gets_words(kept: bool, binding: str) -> None:
    command = child_command("rollover.rewards.child", "/base", 7, kept=kept)
    begin = [sys.executable, "-P", "-m", "rollover.processes", str(os.getpid()), os.getcwd(), binding]
    assert command == [*begin, "rollover.rewards.child", "/base", "7"]


def test_child_starts_where_paths_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told.py").write_text("import os\nmain = lambda: print(os.getcwd())\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with paths_begin_in(str(tmp_path)):
        command = child_command("told")
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert done.stdout.strip() == os.path.realpath(tmp_path)


def test_a_child_may_be_a_verb_of_the_command_line() -> None:
    command = child_command("rollover.__main__", "init", "--list")
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "quickstart" in done.stdout
    assert subprocess.run([*command[:-1], "--lst"], env=child_environment(), capture_output=True).returncode == 2


@pytest.mark.parametrize(("ours", "path"), [(None, SOURCE), ("/mine", os.pathsep.join((SOURCE, "/mine")))])
def test_a_child_imports_this_package_first(monkeypatch: pytest.MonkeyPatch, ours: str | None, path: str) -> None:
    if ours is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", ours)
    assert child_environment()["PYTHONPATH"] == path


@pytest.mark.parametrize("ours", [None, "/mine"])
def test_an_installed_package_is_not_put_on_the_path_of_other_pythons(monkeypatch, ours: str | None) -> None:
    """PYTHONPATH reaches everything that a child starts, an interpreter of another version too."""
    monkeypatch.setattr(processes, "__file__", os.path.join(site.getsitepackages()[0], "rollover", "processes.py"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if ours is not None:
        monkeypatch.setenv("PYTHONPATH", ours)
    assert child_environment().get("PYTHONPATH") == ours


def test_a_variable_that_is_set_wins_over_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in child_environment()
    assert child_environment(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert child_environment(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "3"


def test_child_sees_the_visible_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_TOKEN", "MY_NAME", "HF_TOKEN"):
        monkeypatch.setenv(name, "x")
    assert {"MY_TOKEN", "MY_NAME", "HF_TOKEN"} <= child_environment().keys()
    assert child_environment(["MY_*", "!*_TOKEN"]).keys() - {"PYTHONPATH"} == {"MY_NAME"}
    assert child_environment([], OMP_NUM_THREADS="1").keys() - {"PYTHONPATH"} == {"OMP_NUM_THREADS"}


def test_threads_wait_briefly_with_auto_only_and_the_user_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert int(brief_waiting(RunConfig(threads="auto"))["GOMP_SPINCOUNT"]) > 0
    assert brief_waiting(RunConfig(threads=2)) == {}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert brief_waiting(RunConfig(threads="auto")) == {}
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert brief_waiting(RunConfig(threads="auto")) == {}


# A module that is never done with its import. The keeper of one that is kept is stopped with it, or it would kill it.
NEVER_IMPORTED = """
import os, signal, sys
from pathlib import Path
Path("pids").write_text(f"{os.getpid()} {os.getppid()}")
if "keep" in sys.argv:
    os.kill(os.getppid(), signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = """
import subprocess, sys, time
from rollover.processes import child_command, child_environment
kept = sys.argv[1] == "kept"
subprocess.Popen(child_command("never_imported", kept=kept), env=child_environment(), start_new_session=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no signal reaches what is stopped")
@pytest.mark.parametrize("how", ["kept", "not kept"])
def test_a_child_that_is_stopped_while_it_imports_dies_with_its_parent(tmp_path: Path, monkeypatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "never_imported.py").write_text(NEVER_IMPORTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, str(tmp_path)]))
    pids: list[int] = []
    with subprocess.Popen([sys.executable, "-c", PARENT, how]) as parent:
        try:
            deadline = time.monotonic() + 60
            while not (len(pids) == 2 and all(map(is_stopped, pids if how == "kept" else pids[:1]))):
                assert time.monotonic() < deadline and parent.poll() is None
                time.sleep(0.02)
                if (tmp_path / "pids").exists():
                    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert how == "kept" or pids.pop() == parent.pid
            parent.send_signal(signal.SIGKILL)
            assert wait_until_dead(pids, 20)
        finally:
            parent.kill()
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


# What is started again and again waits ever longer, and says what is news


def test_it_waits_ever_longer_and_as_at_first_after_a_long_life() -> None:
    now = 0.0
    back_off = BackOff(lambda: now)
    found = []
    for lived_s in (1, 1, 1, 30, 1, 1, 1, 1, 31, 1):
        back_off.begin()
        now += lived_s
        found.append(back_off.pause_s())
        now += found[-1]
    assert found == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1]


def test_what_ends_it_in_the_same_way_is_told_once_unless_it_worked_in_between() -> None:
    back_off = BackOff()
    assert [back_off.is_news(why) for why in ("a", "a", "b", "a")] == [True, False, True, True]
    back_off.works()
    assert back_off.is_news("a") and not back_off.is_news("a")
