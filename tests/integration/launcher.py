"""Runs of `rollover` in processes of their own that have imported everything: forks of one that has.

A start from nothing costs five seconds of a core, more than what most tests do then. Here a process imports the program
once for all tests, does nothing else, and forks for each run: what is killed, stopped and resumed is as real as before.
The test has a Run for each, which is told its end over a pipe, as it is not its child. Elsewhere than on Linux, where
libraries do not bear to be forked, each run starts from nothing all the same.

    test ──words, output files, pipe──▶ launcher ──fork──▶ run
      ◀─────── exit code, by the pipe ─────┘

Engine processes, ranks and servers that a run in the test's process starts are forks of the launcher, too (`Forked`).
They are children of the test's process, like those of `subprocess.Popen`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_PYTHON = sys.executable
_MAX_MESSAGE = 2**20
_MAX_FILES = 16
_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
_ABOVE = 1000  # numbers of descriptors that no child inherits
_WORDS = "words of a child".ljust(4000)  # room for its command line, which psutil reads
# Modules that import torch. Others start in a tenth of a second.
_HEAVY = ("rollover.engine.process.child", "rollover.trainer.ranks.process", "rollover.__main__")
_asking = threading.Lock()
_starter = ThreadPoolExecutor(1)  # a child dies with the thread that started the launcher: this one stays


def environment() -> dict[str, str]:
    # TRANSFORMERS_VERBOSITY as a run in this process sets it: another environment would need another launcher.
    ours = {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | ours | {"TRANSFORMERS_VERBOSITY": "error"}


@functools.cache
def _first_environment() -> dict[str, str]:
    return environment()


class Run:
    """One `rollover ...`: the part of subprocess.Popen that tests use. Its output goes to files.

    `log` gets both its outputs; without, they are in `out` and `err`. `script`: what to run with the words in place of
    `python -m rollover`. `stdout`, `stderr`: descriptors that it has in place of them. `folder`: where it starts, in
    place of the working directory. `variables`: of its environment, beside those of this process.
    """

    def __init__(
        self,
        words: list[str],
        log: Path | None = None,
        script: Path | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        folder: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.args, self.returncode = words, None
        self._out = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._err = self._out if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._end, told = os.pipe()
        place = str(folder or os.getcwd())
        request = {"words": words, "script": str(script or ""), "folder": place, "variables": variables or {}}
        streams = [own.fileno() if of is None else of for own, of in ((self._out, stdout), (self._err, stderr))]
        self.pid = _fork(request | {"numbers": [1, 2]}, [*streams, told], environment())
        os.close(told)

    @property
    def out(self) -> str:
        return _text(self._out)

    @property
    def err(self) -> str:
        return _text(self._err)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(os.read(self._end, 100))
            os.close(self._end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(subprocess.Popen):
    """A Popen that forks the launcher for a child that would import torch."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        pass_fds, env, streams, (*_, session, group) = rest[3], rest[5], rest[9:15], rest
        ours = isinstance(args, list) and args[:4] == [_PYTHON, "-P", "-m", "rollover.processes"]
        if not (ours and args[7] in _HEAVY and sys.platform == "linux" and _SYS_CLONE):
            return super()._execute_child(args, *rest)  # type: ignore[misc]
        standard = [streams[0], streams[3], streams[5]]
        files = {number: number if given == -1 else given for number, given in enumerate(standard)}
        files |= {number: number for number in pass_fds}
        request = {"child": args[4:], "line": args, "variables": env, "session": session, "group": group}
        self.pid = _fork(request | {"numbers": list(files)}, list(files.values()), _first_environment())
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def _fork(request: dict[str, Any], files: list[int], variables: dict[str, str]) -> int:
    _first_environment()
    with _asking:
        launcher, _ = _launcher(frozenset((k, v) for k, v in variables.items() if k != "PYTEST_CURRENT_TEST"))
        socket.send_fds(launcher, [json.dumps(request).encode()], files)
        return int(launcher.recv(_MAX_MESSAGE))


def _text(file: Any) -> str:
    """What was written to it until now."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


@functools.cache
def _launcher(variables: frozenset[tuple[str, str]]) -> tuple[socket.socket, subprocess.Popen]:
    """The one that forks what has these environment variables: imports may look at them. It ends with this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), _WORDS]
    started = _starter.submit(
        subprocess.Popen, command, env=dict(variables), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    process = started.result()
    theirs.close()
    return ours, process


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the fork, with what it is to run."""
    ends: dict[int, int] = {}  # by process id: where its end is told
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 2**12)
        while ends and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            told = ends.pop(ended[0])
            with contextlib.suppress(BrokenPipeError):  # the test has gone
                os.write(told, str(os.waitstatus_to_exitcode(ended[1])).encode())
            os.close(told)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, _MAX_FILES)
        if not message:
            sys.exit(0)
        request = json.loads(message)
        end = None if "child" in request else files.pop()
        pid = _fork_sibling() if end is None else os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (*ends.values(), *([] if end is None else [end]), woken, wake, requests.detach()):
                os.close(other)
            _become(request, files)
            return request
        if end is not None:
            ends[pid] = end
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def _fork_sibling() -> int:
    """os.fork of a process with one thread, but the new process is a child of this one's parent."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return pid


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Do what Popen does between fork and exec."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["numbers"], moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    if request.get("session"):
        os.setsid()
    if request.get("group", -1) != -1:
        os.setpgid(0, request["group"])


def _rename(words: list[str]) -> None:
    """Let the system show `words` as the command line of this process."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(map(str.encode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def _import_everything() -> None:
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator would start one
    os.environ["GOMP_SPINCOUNT"] = "10000"  # OpenMP reads it when it is loaded; a run with run.threads = "auto" sets it
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    del os.environ["JE_ARROW_MALLOC_CONF"], os.environ["GOMP_SPINCOUNT"]
    from rollover import processes  # noqa: F401
    from rollover.engine.process import child  # noqa: F401
    from rollover.run import evaluate, loop  # noqa: F401
    from rollover.trainer.ranks import rank  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork does not have"
    gc.collect()
    gc.freeze()  # or a run would look through all of it when it ends


def main() -> None:
    forks = sys.platform == "linux"
    if forks:
        _import_everything()
    request: Any = serve(socket.socket(fileno=int(sys.argv[1])))
    if "child" in request:
        from rollover.processes import main as run

        os.environ.clear()
        os.environ.update(request["variables"])
        sys.path[:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        _rename(request["line"])
        return run(*request["child"])
    os.chdir(request["folder"])
    os.environ.update(request["variables"])
    script, words = request["script"], request["words"]
    if not forks:
        os.execv(sys.executable, [sys.executable, *([script] if script else ["-m", "rollover"]), *words])
    sys.argv[1:] = words
    sys.path[0] = str(Path(script).parent) if script else request["folder"]  # as python has it
    if script:
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module("rollover", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
