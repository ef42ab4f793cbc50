"""Runs a program against its tests in sandboxes, and returns each test's result. Expected outputs stay here.

    stdin, calls      one sandbox: inputs go in; outputs and values come out and are compared here
    tests             two: the program in one, the test code in the other; the judge forwards calls between them

Owns the prestarted sandboxes and the time limit. Sandbox output is untrusted: values are plain data (guest/values.py),
and a test without a result has failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rollover.plugins.sandbox.cases import Cases, same_text, same_value
from rollover.plugins.sandbox.guest.values import to_json
from rollover.plugins.sandbox.launch import Launch, Sandbox, SandboxFailed, Template

ENDS = ("passed", "wrong", "error", "timeout", "memory", "output", "died")
"""How a test ends: with another output than expected (wrong), an exception or an exit code (error), out of time, out of
memory, with too much output, or by a signal (died), such as a crash of the interpreter."""
_START_LIMIT_S = 20.0
_GRACE_S = 1.0
_ANSWER = ("value", "raised", "text", "changed", "none")


class BrokenTests(ValueError):
    """The tests cannot be run, whatever the program is."""


@dataclass(frozen=True)
class RunLimits:
    """seconds: for all tests of a completion. memory_bytes, output_bytes: per test."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """The end of each test, one of ENDS, and a detail of the first failure."""

    ends: tuple[str, ...]
    detail: str = ""

    @classmethod
    def from_ends(cls, ends: Sequence[tuple[str, str]]) -> Self:
        """Create a verdict from (end, detail) of each test."""
        detail = next((f"{end}: {text}" if text else end for end, text in ends if end != "passed"), "")
        return cls(tuple(end for end, _ in ends), detail)

    @property
    def share(self) -> float:
        """The share of passed tests."""
        return self.ends.count("passed") / len(self.ends)


class Judge:
    """Runs programs one at a time; not thread-safe.

    stop_at_failure: tests after the first failure do not run, and count as failed alike. ahead: start the next call's
    sandboxes at the end of a call.
    """

    def __init__(
        self, launch: Launch, limits: RunLimits | None = None, stop_at_failure: bool = False, ahead: bool = True
    ) -> None:
        self._launch, self._limits, self._stop = launch, limits or RunLimits(), stop_at_failure
        self._ahead = ahead
        self._template: Template | None = None
        self._waiting: list[Sandbox] = []
        self._used = 1

    def judge(self, code: str, cases: Cases) -> Verdict:
        """Run the program against the tests. SandboxFailed and BrokenTests: there is no verdict."""
        self._used = 2 if cases.kind == "tests" else 1
        sandboxes = self._take(self._used)
        trial = _ProgramRun(code, cases, self._limits, self._stop)
        try:
            trial.converse(*sandboxes) if cases.kind == "tests" else trial.compare(*sandboxes)
            self._check_template(trial.ends)
        finally:
            for sandbox in sandboxes:
                sandbox.kill()
            if self._ahead:
                with contextlib.suppress(SandboxFailed):  # the next call reports it
                    self.prestart()
        return Verdict.from_ends(trial.ends)

    def close(self) -> None:
        """End the prestarted sandboxes and their template."""
        while self._waiting:
            self._waiting.pop().kill()
        if self._template is not None:
            self._template.close()
            self._template = None

    def prestart(self) -> None:
        """Start the sandboxes of the next call, assuming it is like the last one."""
        while len(self._waiting) < self._used:
            self._waiting.append(self._create())

    def _check_template(self, ends: list[tuple[str, str]]) -> None:
        """Raise SandboxFailed if sandboxes died with their template, which no program can kill."""
        lost = ("died", "the sandbox ended") in ends
        if lost and self._template is not None and self._template.has_ended():
            raise SandboxFailed("the sandbox was ended from outside")

    def _create(self) -> Sandbox:
        if self._template is None:
            self._template = Template(self._launch)
        return self._template.sandbox()

    def _take(self, num: int) -> list[Sandbox]:
        """Return ready sandboxes. Retries failed starts, as memory may have been short."""
        taken: list[Sandbox] = []
        failures = 0
        while len(taken) < num:
            try:
                taken.append(self._waiting.pop() if self._waiting else self._create())
                taken[-1].wait_ready(time.monotonic() + _START_LIMIT_S)
            except SandboxFailed:
                for sandbox in taken:
                    sandbox.kill()
                taken = []
                self.close()
                failures += 1
                if failures > 2:
                    raise
        return taken


class _ProgramRun:
    """One program, and the results of its tests so far."""

    def __init__(self, code: str, cases: Cases, limits: RunLimits, stop_at_failure: bool) -> None:
        self._code, self._cases, self._limits, self._stop = code, cases, asdict(limits), stop_at_failure
        self._until = time.monotonic() + limits.seconds + _GRACE_S
        self.ends: list[tuple[str, str]] = []

    def compare(self, sandbox: Sandbox) -> None:
        """Send the inputs, and compare the outputs."""
        cases, calls = self._cases, self._cases.kind == "calls"
        inputs = [list(map(to_json, each)) for each in cases.inputs] if calls else list(cases.inputs)
        request = {"mode": cases.kind, "code": self._code, "name": cases.name, "inputs": inputs}
        sandbox.send({**request, "limits": self._limits}, self._until)
        for expected in cases.outputs:
            reply = sandbox.receive(self._until)
            if reply is None or reply.get("test") != len(self.ends):
                break
            end, detail = _end_of(reply)
            if end == "passed" and not _is_right(reply, expected, calls):
                end, detail = "wrong", ""
            self.ends.append((end, detail))
            if self._is_over:
                break
        self._fill()

    def converse(self, program: Sandbox, tests: Sandbox) -> None:
        """Forward requests of the tests to the program, and its answers back."""
        cases, until = self._cases, self._until
        program.send({"mode": "serve", "code": self._code, "limits": self._limits}, until)
        request = {"mode": "tests", "code": cases.setup, "tests": list(cases.tests), "name": cases.name}
        tests.send({**request, "limits": self._limits}, until)
        last: tuple[str, str] | None = None
        loaded = False
        while len(self.ends) < len(cases):
            reply = tests.receive(until)
            if reply is None:
                break
            if "ask" in reply:
                # Its parent reads what arrives before "loaded".
                answer = {} if loaded else _answer(program, until, "loaded")
                loaded = True
                if "ended" not in answer:
                    program.send(reply["ask"], until)
                    answer = _answer(program, until)
                if "ended" in answer:  # the program has ended
                    end, detail = _end_of(answer)
                    last = ("error", detail or "it ended before its tests did") if end == "passed" else (end, detail)
                    break
                tests.send(answer, until)
            elif "broken" in reply:
                raise BrokenTests(f"the tests of the task cannot be run: {str(reply['broken'])[:300]}")
            elif reply.get("test") == len(self.ends):
                self.ends.append(_end_of(reply))
                if self._is_over:
                    break
            elif "ended" in reply:
                end, detail = _end_of(reply)
                last = ("error", "the tests ended early") if end == "passed" else (end, detail)
                break
        self._fill(last)

    @property
    def _is_over(self) -> bool:
        """Whether to stop after a failure."""
        return self._stop and bool(self.ends) and self.ends[-1][0] != "passed"

    def _fill(self, last: tuple[str, str] | None = None) -> None:
        """Fill in tests without a result: timeout, or the sandbox ended."""
        left = self.ends[-1] if self._is_over else last
        if left is None:
            left = ("timeout", "") if time.monotonic() >= self._until else ("died", "the sandbox ended")
        self.ends += [left] * (len(self._cases) - len(self.ends))


def _is_right(reply: dict[str, Any], expected: Any, calls: bool) -> bool:
    if not calls:
        return same_text(str(reply.get("output")), expected)
    return same_value(reply.get("value"), expected)


def _end_of(reply: dict[str, Any]) -> tuple[str, str]:
    """Return (end, detail) of a test's or sandbox's message."""
    end = reply.get("ended")
    end = "passed" if end == "ok" else end
    return (end if end in ENDS else "died"), str(reply.get("detail", ""))[:300]


def _answer(program: Sandbox, until: float, *keys: str) -> dict[str, Any]:
    """Return the program's next message with one of `keys`, reduced to known keys; or how it ended."""
    keys = keys or ("value", "raised", "none")
    while (reply := program.receive(until)) is not None:
        if "ended" in reply:
            return {"ended": reply["ended"], "detail": reply.get("detail", "")}
        if reply.keys() & set(keys):
            return {key: reply[key] for key in (*_ANSWER, *keys) if key in reply}
    return {"ended": "timeout" if time.monotonic() >= until else "died", "detail": ""}
