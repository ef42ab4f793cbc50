"""Starts our child processes, which end with their parent, and so do their own children.

A child is `python -m rollover.processes PARENT_PID FOLDER BINDING MODULE ARGUMENT...`: it begins in FOLDER and is bound
to its parent first, and only then imports MODULE, which may take seconds, and calls its `main`.

`keep` puts a process, the keeper, between us and a child that runs foreign code:

    trainer ──▶ keeper ──fork──▶ child ──▶ processes of the foreign code
                  └── adopts orphans (Linux), and kills all of them when the child or the trainer ends
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import site
import sys
import threading
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.files import start_folder
from rollover.std_streams import keep_streams

if TYPE_CHECKING:
    from rollover.config import RunConfig

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_MAX_STOPPED_POLLS = 6
_KILL_LIMIT_S = 5.0
_KILL_PAUSE_S = 0.002
# Turns that a thread of OpenMP waits before it sleeps: of the library's own 300,000 (docs/performance.md).
_SPINS = "10000"


def child_command(module: str, *arguments: object, kept: bool = False) -> list[str]:
    """Return the command of a child that calls `module`'s main with `arguments`, as strings.

    It begins in `start_folder`, and dies with this process. `kept`: so do its children, see `keep`.
    """
    binding, ours = "keep" if kept else "die_with", [os.getpid(), start_folder()]
    # -P: a json.py in the working directory must not replace the standard library's in our own imports.
    return [sys.executable, "-P", "-m", "rollover.processes", *map(str, (*ours, binding, module, *arguments))]


ALL = ("*",)


def child_environment(visible: Sequence[str] = ALL, **defaults: str) -> dict[str, str]:
    """Return the environment of a child: our variables over `defaults`, and the same package on its path.

    `visible`: patterns of the names that the child sees (workflow.env); those after a ! are left out.

    An installed package is found without help: its folder on PYTHONPATH would reach whatever Python a child starts.
    """
    root = str(Path(__file__).resolve().parents[1])
    installed = [os.path.realpath(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())]
    path = [*([] if root in installed else [root]), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    hidden = [pattern[1:] for pattern in visible if pattern.startswith("!")]
    ours = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, of) for of in visible) and not any(fnmatchcase(name, of) for of in hidden)
    }
    return {**defaults, **ours, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}


def brief_waiting(run: RunConfig) -> dict[str, str]:
    """Return variables for run.threads = "auto": waiting threads sleep soon, and free their core.

    For processes that have not loaded torch: GNU's OpenMP library reads them at load time. {} where the user has set
    them.
    """
    if run.threads != "auto" or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return {}
    return {"GOMP_SPINCOUNT": _SPINS}


def limit_memory(num_bytes: int) -> None:
    """Limit private memory of this process that can be written, not addresses: what a library only reserves costs
    nothing. 0: no limit. What it starts inherits the limit."""
    if not num_bytes:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def prepare_libraries(run: RunConfig) -> None:
    """Set variables that libraries read at load time, unless the user has set them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the reward worker forks after tokenizers were used
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "torch" not in sys.modules:
        os.environ.update(brief_waiting(run))


def main(parent: str, folder: str, binding: str, module: str, *arguments: str) -> None:
    """Run a child process."""
    keep_streams()
    with contextlib.suppress(OSError):  # removed meanwhile
        os.chdir(folder)
    {"keep": keep, "die_with": die_with}[binding](int(parent))
    importlib.import_module(module).main(*arguments)


def die_with(parent: int) -> None:
    """SIGKILL this process when `parent` dies: by the kernel on Linux, by a thread that watches getppid anywhere."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def keep(parent: int) -> None:
    """Fork: the child continues, and this process becomes its keeper. Returns in the child only.

    When the child ends, when `parent` dies or when it gets SIGTERM, the keeper kills what is left of the child and of
    all that descends from it, wherever that has gone (its own session, its own group, orphans), and ends as the child
    did. A child that was stopped, and does not go on within some seconds, it kills. On other systems than Linux it
    knows the child's process group only. Call it before any thread is started.
    """
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    # They wake the keeper through its pipe. SIGCONT comes when `parent` dies: it reaches a keeper that is stopped.
    wakers = (signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)
    for number in wakers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in wakers:
            signal.signal(number, signal.SIG_DFL)
        for end in (woken, wake):
            os.close(end)
        os.setpgid(0, 0)  # what it sends to its own group must not reach the keeper
        die_with(keeper)
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    from rollover.process_tree import descendants, kill  # not in the child, whose start it would delay

    with open(os.devnull, "r+b") as null:  # its pipes are the child's
        for standard in (0, 1):
            os.dup2(null.fileno(), standard)
    status = _wait_for(child, parent, woken)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < deadline and _has_children():
        kill(descendants(os.getpid()))
        time.sleep(_KILL_PAUSE_S)
    _end_as(status)


def _wait_for(child: int, parent: int, woken: int) -> int | None:
    """Return the child's exit status; None if `parent` died, or on SIGTERM."""
    stopped_by, polls = 0, 0
    while os.getppid() == parent:
        while (changed := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:  # of it, or an adopted orphan
            pid, status = changed
            if pid == child and os.WIFSTOPPED(status):
                stopped_by, polls = os.WSTOPSIG(status), 0
            elif pid == child and os.WIFCONTINUED(status):
                stopped_by = 0
            elif pid == child:
                return status
        if select.select([woken], [], [], _POLL_S)[0]:
            if signal.SIGTERM in os.read(woken, 2**12):
                return None
        elif stopped_by:
            polls += 1  # not seconds: where the keeper was stopped with its child, they go on together
            if polls == _MAX_STOPPED_POLLS:
                name = signal.Signals(stopped_by).name
                os.write(2, f"rollover: process {child} was stopped ({name}) and does not continue: killed\n".encode())
                os.kill(child, signal.SIGKILL)
    return None


def _has_children() -> bool:
    """Reap ended children, also adopted orphans. Returns whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _end_as(status: int | None) -> None:
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(1 if status is None else os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
