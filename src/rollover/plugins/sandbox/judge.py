"""Runs a program against its tests in sandboxes, and says how each test ended. The expected outputs stay here.

    stdin, calls      one sandbox: the inputs go in, outputs and values come out and are compared here
    tests             two: the program in one, the test code in the other; what the tests call goes through us

Owns the sandboxes that wait, started ahead, and the time of a call. Believes nothing that comes out: values are plain
data (inside/values.py), and a test that is not told of has failed.
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
memory, with more output than allowed, or by a signal (died), as a crash of the interpreter is one."""
_START_LIMIT_S = 20.0
_GRACE_S = 1.0
_ANSWER = ("value", "raised", "text", "changed", "none")


class BrokenTests(ValueError):
    """The tests cannot be run, whatever the program is."""


@dataclass(frozen=True)
class Limits:
    """Of all tests of one completion together: seconds. Of each test: memory of its process and what it may print."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """How each test ended, one of ENDS, and a word on the first that did not pass."""

    ends: tuple[str, ...]
    detail: str = ""

    @classmethod
    def of(cls, ends: Sequence[tuple[str, str]]) -> Self:
        """Of the end of each test, and what is to be said of it."""
        detail = next((f"{end}: {text}" if text else end for end, text in ends if end != "passed"), "")
        return cls(tuple(end for end, _ in ends), detail)

    @property
    def share(self) -> float:
        """Of the tests, those passed."""
        return self.ends.count("passed") / len(self.ends)


class Judge:
    """Not for several threads. `stop_at_failure`: tests behind the first that fails are not run, and count as it.
    `ahead`: the sandboxes of the next call are started when one ends."""

    def __init__(
        self, launch: Launch, limits: Limits | None = None, stop_at_failure: bool = False, ahead: bool = True
    ) -> None:
        self._launch, self._limits, self._stop = launch, limits or Limits(), stop_at_failure
        self._ahead = ahead
        self._template: Template | None = None
        self._waiting: list[Sandbox] = []
        self._used = 1

    def judge(self, code: str, cases: Cases) -> Verdict:
        """Run the program against the tests. SandboxFailed and BrokenTests: there is no verdict."""
        self._used = 2 if cases.kind == "tests" else 1
        sandboxes = self._take(self._used)
        trial = _Trial(code, cases, self._limits, self._stop)
        try:
            trial.converse(*sandboxes) if cases.kind == "tests" else trial.compare(*sandboxes)
            self._check_template(trial.ends)
        finally:
            for sandbox in sandboxes:
                sandbox.kill()
            if self._ahead:
                with contextlib.suppress(SandboxFailed):  # the next call will say so
                    self.start_ahead()
        return Verdict.of(trial.ends)

    def close(self) -> None:
        """End the sandboxes that wait, and what makes them."""
        while self._waiting:
            self._waiting.pop().kill()
        if self._template is not None:
            self._template.close()
            self._template = None

    def start_ahead(self) -> None:
        """Start what the next call needs, if it is as the last one."""
        while len(self._waiting) < self._used:
            self._waiting.append(self._made())

    def _check_template(self, ends: list[tuple[str, str]]) -> None:
        """SandboxFailed where sandboxes ended as what made them was killed, which no program can do."""
        lost = ("died", "the sandbox ended") in ends
        if lost and self._template is not None and self._template.has_ended():
            raise SandboxFailed("the sandbox was ended from outside")

    def _made(self) -> Sandbox:
        if self._template is None:
            self._template = Template(self._launch)
        return self._template.sandbox()

    def _take(self, num: int) -> list[Sandbox]:
        """Sandboxes that are ready. One that did not come up is tried once more: memory may have been short."""
        taken: list[Sandbox] = []
        failures = 0
        while len(taken) < num:
            try:
                taken.append(self._waiting.pop() if self._waiting else self._made())
                taken[-1].locks(time.monotonic() + _START_LIMIT_S)
            except SandboxFailed:
                for sandbox in taken:
                    sandbox.kill()
                taken = []
                self.close()
                failures += 1
                if failures > 2:
                    raise
        return taken


class _Trial:
    """A program against its tests: how each of them ended so far."""

    def __init__(self, code: str, cases: Cases, limits: Limits, stop_at_failure: bool) -> None:
        self._code, self._cases, self._limits, self._stop = code, cases, asdict(limits), stop_at_failure
        self._until = time.monotonic() + limits.seconds + _GRACE_S
        self.ends: list[tuple[str, str]] = []

    def compare(self, sandbox: Sandbox) -> None:
        """Give the inputs, and compare what comes out."""
        cases, calls = self._cases, self._cases.kind == "calls"
        inputs = [list(map(to_json, each)) for each in cases.inputs] if calls else list(cases.inputs)
        request = {"mode": cases.kind, "code": self._code, "name": cases.name, "inputs": inputs}
        sandbox.say({**request, "limits": self._limits}, self._until)
        for expected in cases.outputs:
            said = sandbox.hear(self._until)
            if said is None or said.get("test") != len(self.ends):
                break
            end, detail = _end_of(said)
            if end == "passed" and not _is_right(said, expected, calls):
                end, detail = "wrong", ""
            self.ends.append((end, detail))
            if self._is_over:
                break
        self._fill()

    def converse(self, program: Sandbox, tests: Sandbox) -> None:
        """Carry what the tests ask to the program, and what it answers back."""
        cases, until = self._cases, self._until
        program.say({"mode": "serve", "code": self._code, "limits": self._limits}, until)
        request = {"mode": "tests", "code": cases.setup, "tests": list(cases.tests), "name": cases.name}
        tests.say({**request, "limits": self._limits}, until)
        last: tuple[str, str] | None = None
        loaded = False
        while len(self.ends) < len(cases):
            said = tests.hear(until)
            if said is None:
                break
            if "ask" in said:
                # Not before it says so: what comes earlier is read by its parent.
                answer = {} if loaded else _answer(program, until, "loaded")
                loaded = True
                if "ended" not in answer:
                    program.say(said["ask"], until)
                    answer = _answer(program, until)
                if "ended" in answer:  # it asks no more: the program is gone
                    end, detail = _end_of(answer)
                    last = ("error", detail or "it ended before its tests did") if end == "passed" else (end, detail)
                    break
                tests.say(answer, until)
            elif "broken" in said:
                raise BrokenTests(f"the tests of the task cannot be run: {str(said['broken'])[:300]}")
            elif said.get("test") == len(self.ends):
                self.ends.append(_end_of(said))
                if self._is_over:
                    break
            elif "ended" in said:
                end, detail = _end_of(said)
                last = ("error", "the tests ended early") if end == "passed" else (end, detail)
                break
        self._fill(last)

    @property
    def _is_over(self) -> bool:
        """Whether no further test is run, as one failed."""
        return self._stop and bool(self.ends) and self.ends[-1][0] != "passed"

    def _fill(self, last: tuple[str, str] | None = None) -> None:
        """The tests that nothing was said of: out of time, or the sandbox is no more."""
        left = self.ends[-1] if self._is_over else last
        if left is None:
            left = ("timeout", "") if time.monotonic() >= self._until else ("died", "the sandbox ended")
        self.ends += [left] * (len(self._cases) - len(self.ends))


def _is_right(said: dict[str, Any], expected: Any, calls: bool) -> bool:
    if not calls:
        return same_text(str(said.get("output")), expected)
    return same_value(said.get("value"), expected)


def _end_of(said: dict[str, Any]) -> tuple[str, str]:
    """How a test, or a whole sandbox, says that it ended."""
    end = said.get("ended")
    end = "passed" if end == "ok" else end
    return (end if end in ENDS else "died"), str(said.get("detail", ""))[:300]


def _answer(program: Sandbox, until: float, *keys: str) -> dict[str, Any]:
    """What the program says: only what an answer may have, and that it has one of `keys`; or how it ended."""
    keys = keys or ("value", "raised", "none")
    while (said := program.hear(until)) is not None:
        if "ended" in said:
            return {"ended": said["ended"], "detail": said.get("detail", "")}
        if said.keys() & set(keys):
            return {key: said[key] for key in (*_ANSWER, *keys) if key in said}
    return {"ended": "timeout" if time.monotonic() >= until else "died", "detail": ""}
