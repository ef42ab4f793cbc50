"""Runs of `rollover` in processes of their own that have imported everything: forks of one that has.

A start from nothing costs five seconds of a core, more than what most tests do then. Here a process imports the program
once for all tests, does nothing else, and forks for each run: what is killed, stopped and resumed is as real as before.
The test has a Run for each, which is told its end over a pipe, as it is not its child. Elsewhere than on Linux, where
libraries do not bear to be forked, each run starts from nothing all the same.

    test ──words, output files, pipe──▶ launcher ──fork──▶ run
      ◀─────── exit code, by the pipe ─────┘
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_MAX_MESSAGE = 2**20


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


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
        launcher, _ = _launcher(frozenset((k, v) for k, v in environment().items() if k != "PYTEST_CURRENT_TEST"))
        streams = [own.fileno() if of is None else of for own, of in ((self._out, stdout), (self._err, stderr))]
        socket.send_fds(launcher, [json.dumps(request).encode()], [*streams, told])
        os.close(told)
        self.pid = int(launcher.recv(_MAX_MESSAGE))

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


def _text(file: Any) -> str:
    """What was written to it until now."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


@functools.cache
def _launcher(variables: frozenset[tuple[str, str]]) -> tuple[socket.socket, subprocess.Popen]:
    """The one that forks what has these environment variables: imports may look at them. It ends with this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
    process = subprocess.Popen(command, env=dict(variables), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return ours, process


def serve(requests: socket.socket) -> dict[str, str]:
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
        message, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, 3)
        if not message:
            sys.exit(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(files[0], 1)
            os.dup2(files[1], 2)
            for other in (*files, *ends.values(), woken, wake):
                os.close(other)
            requests.close()
            return json.loads(message)
        ends[pid] = files[2]
        os.close(files[0])
        os.close(files[1])
        requests.send(str(pid).encode())


def _import_everything() -> None:
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator would start one
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    del os.environ["JE_ARROW_MALLOC_CONF"]
    from rollover.run import evaluate, loop  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork does not have"
    gc.collect()
    gc.freeze()  # or a run would look through all of it when it ends


def main() -> None:
    forks = sys.platform == "linux"
    if forks:
        _import_everything()
    request: Any = serve(socket.socket(fileno=int(sys.argv[1])))
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
