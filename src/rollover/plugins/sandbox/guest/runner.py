"""The first process of a sandbox: it locks itself in, reads one request, runs it in children, and ends.

It is a copy of the template (launch.py), which is told its policy (locks.py) and then of a pair of pipes for each
sandbox. Lines of JSON in these:

                                                        out  {"ready": what locks it has}
    in   {"mode": "stdin", "code", "inputs"}            out  {"test": i, "ended", "detail", "output"} for each
    in   {"mode": "calls", "code", "name", "inputs"}    out  {"test": i, "ended", "detail", "value"} for each
    in   {"mode": "serve", "code"}                      out  what serving.py says, then {"ended", "detail"}
    in   {"mode": "tests", "code", "tests", "name"}     out  what testing.py says, then {"ended", "detail"}

each request with its "limits". "ended": ok, error (an exception, or an exit code that is not 0), timeout, memory,
output (more than allowed) or died (a signal). Each text is a process of its own, which ends with it. Calls follow each
other in one, in which the program is loaded anew for each; where it ends, the next has another. Nothing that the
program could want to know is in this sandbox: expected outputs stay outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from rollover.plugins.sandbox.guest import program, serving, testing
from rollover.plugins.sandbox.guest.locks import lock_program, lock_runner
from rollover.plugins.sandbox.guest.syscalls import prepare_filter

_OUT_OF_MEMORY = 97
_POLL_S = 0.002


class Ended:
    """How a child ended: `ended` as above, with a short text, and what it wrote."""

    def __init__(self, ended: str, detail: str, output: bytes, result: bytes) -> None:
        self.ended, self.detail, self.output, self.result = ended, detail, output, result


def main() -> None:
    """The template: make a sandbox of each pair of pipes that comes, until nobody can send one any more."""
    policy = json.loads(sys.stdin.buffer.readline())
    for name in program.MODULES:  # of which programs then find most loaded
        __import__(name)
    prepare_filter()
    control = socket.socket(fileno=os.dup(0))
    control.send(b"u")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        told, ends, _, _ = socket.recv_fds(control, 1, 2)
        if not told:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, end in enumerate(ends):
                os.dup2(end, number)
            os.closerange(3, 64)
            try:
                _run_one(policy)
            finally:
                os._exit(0)
        for end in ends:
            os.close(end)


def _run_one(policy: dict[str, Any]) -> None:
    """A sandbox, from its locks to its end."""
    requests = open(0, "rb", closefd=False)
    had = lock_runner(policy)
    say({"ready": had})
    line = requests.readline()
    if line:
        request = json.loads(line)
        request["limits"]["count_threads"] = had["own_count"]
        request["until"] = time.monotonic() + request["limits"]["seconds"]
        _MODES[request["mode"]](request, requests)


def say(message: dict[str, Any]) -> None:
    """A line out, which begins a new one: a child that was killed may have left half of its own."""
    data = memoryview(b"\n" + json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _stdin(request: dict[str, Any], _: BinaryIO) -> None:
    loaded = program.Source(request["code"])
    for index, text in enumerate(request["inputs"]):
        ended = run_child(request, lambda _: loaded.run(), text.encode("utf-8", "replace"))
        output = ended.output.decode("utf-8", "replace")
        say({"test": index, "ended": ended.ended, "detail": ended.detail, "output": output})


def _calls(request: dict[str, Any], _: BinaryIO) -> None:
    loaded, rows = program.Source(request["code"]), request["inputs"]
    num_told = 0

    def tell(line: bytes) -> None:
        """What the child says of a call. Of another than the next one, it is nothing."""
        nonlocal num_told
        try:
            said = json.loads(line)
            if num_told < len(rows) and said["test"] == num_told and said["ended"] in ("ok", "error"):
                say({key: said.get(key) for key in ("test", "ended", "detail", "value")})
                num_told += 1
        except (ValueError, RecursionError, KeyError, TypeError):
            return

    while num_told < len(rows):
        first = num_told
        ended = run_child(request, lambda end, at=first: loaded.calls(request["name"], rows, at, end), b"", took=tell)
        if num_told == len(rows) or (num_told > first and ended.ended in ("memory", "died")):
            continue  # what calls before it left in the process is no fault of this one: it has another
        how = ("error", "it gave no value") if ended.ended == "ok" else (ended.ended, ended.detail)
        say({"test": num_told, "ended": how[0], "detail": how[1], "value": None})
        num_told += 1


def _serve(request: dict[str, Any], requests: BinaryIO) -> None:
    loaded = program.Source(request["code"])
    _converse(request, requests, lambda channel: serving.serve(loaded, channel))


def _tests(request: dict[str, Any], requests: BinaryIO) -> None:
    _converse(request, requests, lambda channel: testing.run_tests(request, channel))


def _converse(request: dict[str, Any], requests: BinaryIO, talk: Callable[[program.Channel], None]) -> None:
    """A child that has the sandbox's own input and output, which nobody else reads or writes meanwhile."""
    ended = run_child(request, lambda channel: talk(channel), b"", channel=True)
    say({"ended": ended.ended, "detail": ended.detail})


_MODES: dict[str, Callable[[dict[str, Any], BinaryIO], None]] = {
    "stdin": _stdin,
    "calls": _calls,
    "serve": _serve,
    "tests": _tests,
}


# A child


def run_child(
    request: dict[str, Any],
    body: Callable[[Any], object],
    stdin: bytes,
    channel: bool = False,
    took: Callable[[bytes], None] | None = None,
) -> Ended:
    """Run `body` in a child that is locked in, until it ends or `request["until"]`. It is given the end of the pipe
    that its result goes to, or with `channel` the sandbox's own input and output. `took`: called with each line of the
    result as it comes; what may be written is then that between two lines."""
    if time.monotonic() >= request["until"]:
        return Ended("timeout", "no time was left", b"", b"")
    pipes = {name: os.pipe() for name in ("in", "out", "err", "result")}
    child = os.fork()
    if child == 0:
        _be_child(request["limits"], body, pipes, channel)
    ours = {"in": pipes["in"][1]} | {name: pipes[name][0] for name in ("out", "err", "result")}
    for name, ends in pipes.items():
        os.close(ends[name != "in"])
    if (told := _told_of_end(child)) is not None:
        ours["end"] = told
    try:
        return _watched(child, ours, stdin, request, took)
    finally:
        for end in ours.values():
            with contextlib.suppress(OSError):
                os.close(end)


def _told_of_end(child: int) -> int | None:
    """A descriptor that can be read once the child has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(child)
    except (AttributeError, OSError):
        return None


def _watched(  # noqa: C901 - one loop over one child's pipes and limits
    child: int, ours: dict[str, int], stdin: bytes, request: dict[str, Any], took: Callable[[bytes], None] | None
) -> Ended:
    """Feed the child, read what it writes, and end it where it passes a limit."""
    most, why = request["limits"]["output_bytes"], ""
    texts = {ours[name]: bytearray() for name in ("out", "err", "result")}
    reading, left = set(texts), memoryview(stdin)
    at_end = {ours["end"]} if "end" in ours else set()
    for end in (ours["in"], *texts):
        os.set_blocking(end, False)
    if not left:
        os.close(ours.pop("in"))
    status, outside = None, select.poll()
    outside.register(1, 0)
    while status is None:
        left_s = request["until"] - time.monotonic()
        if left_s <= 0 or outside.poll(0):  # or nobody reads any more
            why = "timeout"
        elif any(len(text) > most for text in texts.values()):
            why = "output"
        if why:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            break
        waiting = reading | at_end
        if not waiting:  # it closed its ends, and may go on
            time.sleep(_POLL_S)
        writable = [ours["in"]] if "in" in ours else []
        readable, ready, _ = select.select(list(waiting), writable, [], min(left_s, 0.05) if waiting else 0)
        if ready:
            try:
                left = left[os.write(ours["in"], left[:65536]) :]
            except BlockingIOError:
                pass
            except OSError:
                left = memoryview(b"")
            if not left:
                os.close(ours.pop("in"))
        found = reading.intersection(readable)
        for end in found:
            data = os.read(end, 65536)
            texts[end] += data
            if not data:
                reading.discard(end)
        if took is not None:
            _pass_on(texts, ours["result"], took)
        if not found:
            pid, ended = os.waitpid(child, os.WNOHANG)
            status = ended if pid else None
    for end in reading:  # what is left of a child that has ended
        with contextlib.suppress(BlockingIOError):
            texts[end] += os.read(end, most)
    if took is not None:
        _pass_on(texts, ours["result"], took)
    detail = _last_line(bytes(texts[ours["err"]]))
    return Ended(*_how(status, why, detail), bytes(texts[ours["out"]][:most]), bytes(texts[ours["result"]]))


def _pass_on(texts: dict[int, bytearray], result: int, took: Callable[[bytes], None]) -> None:
    """The whole lines of the result; with each, what was written beside it is done with."""
    lines = texts[result].split(b"\n")
    texts[result] = lines.pop()
    for line in lines:
        took(bytes(line))
        for end in texts.keys() - {result}:
            texts[end].clear()


def _how(status: int, why: str, detail: str) -> tuple[str, str]:
    if why:
        return why, ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return ("timeout", "CPU time") if number == signal.SIGXCPU else ("died", signal.Signals(number).name)
    code = os.waitstatus_to_exitcode(status)
    if code == _OUT_OF_MEMORY:
        return "memory", ""
    return ("ok", "") if code == 0 else ("error", detail or f"exit code {code}")


def _last_line(text: bytes) -> str:
    lines = text[-2000:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _be_child(limits: dict[str, Any], body: Callable[[Any], object], pipes: dict[str, Any], channel: bool) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        kept = [os.dup(0), os.dup(1)] if channel else []
        for number, (name, end) in enumerate((("in", 0), ("out", 1), ("err", 1))):
            os.dup2(pipes[name][end], number)
        kept = [os.dup2(end, 4 + i) for i, end in enumerate(kept)] if channel else [os.dup2(pipes["result"][1], 4)]
        given = program.Channel(*kept) if channel else kept[0]
        os.closerange(3, 4)
        os.closerange(4 + len(kept), 256)
        program.standard_streams()
        lock_program(limits)
        body(given)
        program.wait_for_threads()
        sys.stdout.flush()
        code = 0
    except SystemExit as exit:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        code = 0 if exit.code in (None, 0) else 1
        program.complain(f"SystemExit: {exit.code!r}"[:300])
    except MemoryError:
        code = _OUT_OF_MEMORY
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        program.complain(program.told(error))
    finally:
        os._exit(code)
