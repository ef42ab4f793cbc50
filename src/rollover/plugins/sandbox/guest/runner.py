"""The first process of a sandbox: it locks itself in, reads one request, runs it in children, and ends.

It is a fork of the template (launch.py), which receives the policy (locks.py) and a pair of pipes for each sandbox.
Lines of JSON in these:

                                                        out  {"ready": active locks}
    in   {"mode": "stdin", "code", "inputs"}            out  {"test": i, "ended", "detail", "output"} for each
    in   {"mode": "calls", "code", "name", "inputs"}    out  {"test": i, "ended", "detail", "value"} for each
    in   {"mode": "serve", "code"}                      out  answers of program.py, then {"ended", "detail"}
    in   {"mode": "tests", "code", "tests", "name"}     out  messages of testing.py, then {"ended", "detail"}

each request with its "limits". "ended": ok, error (an exception, or an exit code other than 0), timeout, memory, output
(too much) or died (a signal). Each stdin text runs in its own process. Calls share a process, which loads the program
for each; if it dies, the next call gets a new one. Expected outputs stay outside, so that programs cannot find them.
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

from rollover.plugins.sandbox.guest import program, testing
from rollover.plugins.sandbox.guest.locks import lock_program, lock_runner, prepare_filter

_OUT_OF_MEMORY = 97
_POLL_S = 0.002


class ChildResult:
    """How a child ended: `ended` as above, a short text, and its output."""

    def __init__(self, ended: str, detail: str, output: bytes, result: bytes) -> None:
        self.ended, self.detail, self.output, self.result = ended, detail, output, result


def main() -> None:
    """Run the template: fork a sandbox for each pair of pipes, until the socket closes."""
    policy = json.loads(sys.stdin.buffer.readline())
    for name in program.MODULES:  # loaded once for all programs
        __import__(name)
    prepare_filter()
    control = socket.socket(fileno=os.dup(0))
    control.send(b"u")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, ends, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
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
    """Run a sandbox, from its locks to its end."""
    requests = open(0, "rb", closefd=False)
    had = lock_runner(policy)
    send({"ready": had})
    line = requests.readline()
    if line:
        request = json.loads(line)
        request["limits"]["count_threads"] = had["own_count"]
        request["until"] = time.monotonic() + request["limits"]["seconds"]
        _MODES[request["mode"]](request, requests)


def send(message: dict[str, Any]) -> None:
    """Write a line, on a new one: a killed child may have left half a line."""
    data = memoryview(b"\n" + json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _stdin(request: dict[str, Any], _: BinaryIO) -> None:
    loaded = program.Source(request["code"])
    for index, text in enumerate(request["inputs"]):
        ended = run_child(request, lambda _: loaded.run(), text.encode("utf-8", "replace"))
        output = ended.output.decode("utf-8", "replace")
        send({"test": index, "ended": ended.ended, "detail": ended.detail, "output": output})


def _calls(request: dict[str, Any], _: BinaryIO) -> None:
    loaded, rows = program.Source(request["code"]), request["inputs"]
    num_done = 0

    def tell(line: bytes) -> None:
        """Forward the child's result of the next call; ignore others."""
        nonlocal num_done
        try:
            said = json.loads(line)
            if num_done < len(rows) and said["test"] == num_done and said["ended"] in ("ok", "error"):
                send({key: said.get(key) for key in ("test", "ended", "detail", "value")})
                num_done += 1
        except (ValueError, RecursionError, KeyError, TypeError):
            return

    while num_done < len(rows):
        first = num_done
        ended = run_child(
            request, lambda end, at=first: loaded.calls(request["name"], rows, at, end), b"", on_line=tell
        )
        if num_done == len(rows) or (num_done > first and ended.ended in ("memory", "died")):
            continue  # earlier calls of the process may be the cause: retry in a new one
        how = ("error", "it gave no value") if ended.ended == "ok" else (ended.ended, ended.detail)
        send({"test": num_done, "ended": how[0], "detail": how[1], "value": None})
        num_done += 1


def _serve(request: dict[str, Any], requests: BinaryIO) -> None:
    loaded = program.Source(request["code"])
    _converse(request, requests, lambda channel: program.serve(loaded, channel))


def _tests(request: dict[str, Any], requests: BinaryIO) -> None:
    _converse(request, requests, lambda channel: testing.run_tests(request, channel))


def _converse(request: dict[str, Any], requests: BinaryIO, talk: Callable[[program.JsonChannel], None]) -> None:
    """Run a child with the sandbox's input and output."""
    ended = run_child(request, lambda channel: talk(channel), b"", channel=True)
    send({"ended": ended.ended, "detail": ended.detail})


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
    on_line: Callable[[bytes], None] | None = None,
) -> ChildResult:
    """Run `body` in a locked child until it ends or `request["until"]`.

    `body` receives the result pipe's end, or with `channel` the sandbox's input and output. on_line: called with each
    line of the result; the output limit then applies between two lines.
    """
    if time.monotonic() >= request["until"]:
        return ChildResult("timeout", "no time was left", b"", b"")
    pipes = {name: os.pipe() for name in ("in", "out", "err", "result")}
    child = os.fork()
    if child == 0:
        _be_child(request["limits"], body, pipes, channel)
    ours = {"in": pipes["in"][1]} | {name: pipes[name][0] for name in ("out", "err", "result")}
    for name, ends in pipes.items():
        os.close(ends[name != "in"])
    if (pidfd := _open_pidfd(child)) is not None:
        ours["end"] = pidfd
    try:
        return _watch(child, ours, stdin, request, on_line)
    finally:
        for end in ours.values():
            with contextlib.suppress(OSError):
                os.close(end)


def _open_pidfd(child: int) -> int | None:
    """Return a descriptor that becomes readable when the child ends; None if the kernel has none."""
    try:
        return os.pidfd_open(child)
    except (AttributeError, OSError):
        return None


def _watch(  # noqa: C901 - one loop over one child's pipes and limits
    child: int, ours: dict[str, int], stdin: bytes, request: dict[str, Any], on_line: Callable[[bytes], None] | None
) -> ChildResult:
    """Feed the child, read its output, and kill it at a limit."""
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
        if left_s <= 0 or outside.poll(0):  # or the reader has closed the pipe
            why = "timeout"
        elif any(len(text) > most for text in texts.values()):
            why = "output"
        if why:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            break
        waiting = reading | at_end
        if not waiting:  # it closed its pipes, and still runs
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
        if on_line is not None:
            _pass_on(texts, ours["result"], on_line)
        if not found:
            pid, ended = os.waitpid(child, os.WNOHANG)
            status = ended if pid else None
    for end in reading:  # the rest of an ended child's output
        with contextlib.suppress(BlockingIOError):
            texts[end] += os.read(end, most)
    if on_line is not None:
        _pass_on(texts, ours["result"], on_line)
    detail = _last_line(bytes(texts[ours["err"]]))
    return ChildResult(
        *_classify_end(status, why, detail), bytes(texts[ours["out"]][:most]), bytes(texts[ours["result"]])
    )


def _pass_on(texts: dict[int, bytearray], result: int, on_line: Callable[[bytes], None]) -> None:
    """Pass on complete lines of the result, and clear the other output at each."""
    lines = texts[result].split(b"\n")
    texts[result] = lines.pop()
    for line in lines:
        on_line(bytes(line))
        for end in texts.keys() - {result}:
            texts[end].clear()


def _classify_end(status: int, why: str, detail: str) -> tuple[str, str]:
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
        given = program.JsonChannel(*kept) if channel else kept[0]
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
        program.complain(program.describe_error(error))
    finally:
        os._exit(code)
