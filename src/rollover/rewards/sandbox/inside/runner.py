"""The first process of a sandbox: it locks itself in, reads one request, runs it in children, and ends.

It is a copy of the template (launch.py), which is told its policy (locks.py) and then of a pair of pipes for each
sandbox. Lines of JSON in these:

                                                        out  {"ready": what locks it has}
    in   {"mode": "stdin", "code", "inputs"}            out  {"test": i, "ended", "detail", "output"} for each
    in   {"mode": "calls", "code", "name", "inputs"}    out  {"test": i, "ended", "detail", "value"} for each
    in   {"mode": "serve", "code"}                      out  what serving.py says, then {"ended", "detail"}
    in   {"mode": "tests", "code", "tests", "name"}     out  what testing.py says, then {"ended", "detail"}

each request with its "limits". "ended": ok, error (an exception, or an exit code that is not 0), timeout, memory,
output (more than allowed) or died (a signal). Each test of the first two is a process of its own, which
ends with it. Nothing that the program could want to know is in this sandbox: expected outputs stay outside.
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

from rollover.rewards.sandbox.inside import program, serving, testing
from rollover.rewards.sandbox.inside.locks import lock_program, lock_runner
from rollover.rewards.sandbox.inside.syscalls import prepare_filter

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
    loaded = program.Source(request["code"])
    for index, arguments in enumerate(request["inputs"]):

        def call(result: int, arguments: Any = arguments) -> None:
            program.write(result, loaded.call(request["name"], arguments))

        ended = run_child(request, call, b"")
        try:
            value = json.loads(ended.result) if ended.ended == "ok" else None
        except (ValueError, RecursionError):
            ended.ended, ended.detail, value = "error", "it gave no value", None
        say({"test": index, "ended": ended.ended, "detail": ended.detail, "value": value})


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


def run_child(request: dict[str, Any], body: Callable[[Any], object], stdin: bytes, channel: bool = False) -> Ended:
    """Run `body` in a child that is locked in, until it ends or `request["until"]`. It is given the end of the pipe
    that its result goes to, or with `channel` the sandbox's own input and output."""
    if time.monotonic() >= request["until"]:
        return Ended("timeout", "no time was left", b"", b"")
    pipes = {name: os.pipe() for name in ("in", "out", "err", "result")}
    child = os.fork()
    if child == 0:
        _be_child(request["limits"], body, pipes, channel)
    ours = {"in": pipes["in"][1]} | {name: pipes[name][0] for name in ("out", "err", "result")}
    for name, ends in pipes.items():
        os.close(ends[name != "in"])
    try:
        return _watched(child, ours, stdin, request)
    finally:
        for end in ours.values():
            with contextlib.suppress(OSError):
                os.close(end)


def _watched(child: int, ours: dict[str, int], stdin: bytes, request: dict[str, Any]) -> Ended:
    """Feed the child, read what it writes, and end it where it passes a limit."""
    most, why = request["limits"]["output_bytes"], ""
    texts = {ours[name]: bytearray() for name in ("out", "err", "result")}
    reading, left = set(texts), memoryview(stdin)
    for end in ours.values():
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
        if not reading:  # it closed its ends, and may go on
            time.sleep(_POLL_S)
        writable = [ours["in"]] if "in" in ours else []
        readable, ready, _ = select.select(list(reading), writable, [], min(left_s, 0.05) if reading else 0)
        if ready:
            try:
                left = left[os.write(ours["in"], left[:65536]) :]
            except BlockingIOError:
                pass
            except OSError:
                left = memoryview(b"")
            if not left:
                os.close(ours.pop("in"))
        for end in readable:
            data = os.read(end, 65536)
            texts[end] += data
            if not data:
                reading.discard(end)
        if not readable:
            pid, ended = os.waitpid(child, os.WNOHANG)
            status = ended if pid else None
    for end in reading:  # what is left of a child that has ended
        with contextlib.suppress(BlockingIOError):
            texts[end] += os.read(end, most)
    detail = _last_line(bytes(texts[ours["err"]]))
    return Ended(*_how(status, why, detail), bytes(texts[ours["out"]][:most]), bytes(texts[ours["result"]]))


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
