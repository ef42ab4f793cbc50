"""The reward `code`: the share of a row's tests that the completion's program passes in a sandbox.

A failed completion scores 0. Without a verdict (the sandbox does not start, the service does not answer, the row has no
valid tests) the reward is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollover.config.rewards import CODE_TIMEOUT_S
from rollover.plugins.sandbox.cases import Cases, extract_code, read_cases
from rollover.plugins.sandbox.fusion import FusionClient, FusionJudge
from rollover.plugins.sandbox.guarantees import choose_sandbox
from rollover.plugins.sandbox.judge import ENDS, Judge, RunLimits, Verdict

KINDS = ("auto", "bubblewrap", "process", "http")


def code(  # noqa: PLR0913 - the parameters of the reward
    sandbox: str = "auto",
    allow_weak: bool = False,
    all_or_nothing: bool = False,
    max_tests: int = 0,
    timeout_s: float = CODE_TIMEOUT_S,
    memory_mb: int = 1024,
    output_kb: int = 1024,
    url: str = "",
    concurrency: int = 16,
    retries: int = 4,
) -> Callable[[dict[str, Any]], Any]:
    """Return the reward function. ValueError for invalid parameters, or if no sandbox keeps its guarantees.

    sandbox: auto, bubblewrap, process, or http (a service at `url`, with `concurrency` requests at a time per worker
    and `retries` per request). allow_weak: run programs even if the sandbox breaks guarantees. all_or_nothing: 1 for
    all tests, else 0. max_tests: only the first tests of a row; 0 = all. timeout_s: for all tests of a completion; with
    http for each. memory_mb: limit per test. output_kb: printed output per test.
    """
    for name, value in (("timeout_s", timeout_s), ("memory_mb", memory_mb), ("output_kb", output_kb)):
        if not value > 0:
            raise ValueError(f"the reward code: {name} = {value}: it must be above 0")
    if max_tests < 0 or retries < 0 or concurrency < 1:
        raise ValueError("the reward code: max_tests and retries are at least 0, concurrency at least 1")
    if sandbox not in KINDS:
        raise ValueError(f"the reward code: sandbox = {sandbox!r}: expected one of {', '.join(KINDS)}")
    if (sandbox == "http") != bool(url):
        raise ValueError('the reward code: sandbox = "http" and url go together: set both, or none')
    if sandbox == "http":
        client = FusionClient(url, timeout_s, memory_mb, concurrency, retries)
        return _remote(FusionJudge(client), all_or_nothing, max_tests)
    launch, _ = choose_sandbox(sandbox, allow_weak)
    judge = Judge(launch, RunLimits(timeout_s, memory_mb << 20, output_kb << 10), stop_at_failure=all_or_nothing)
    judge.prestart()
    return _local(judge, all_or_nothing, max_tests)


def describe(sandbox: str = "auto", allow_weak: bool = False, url: str = "", **_: Any) -> str:
    """Return a line on the guarantees of this reward on this machine. ValueError as `code`."""
    if sandbox == "http":
        return f"programs run at {url}: what that service guarantees, it has to say"
    return f"programs run in a sandbox: {choose_sandbox(sandbox, allow_weak)[1]}"


def _local(judge: Judge, all_or_nothing: bool, max_tests: int) -> Callable[[dict[str, Any]], Any]:
    def score(item: dict[str, Any]) -> dict[str, float]:
        program, cases = _parts(item, max_tests)
        return _scored(judge.judge(program, cases) if program else None, all_or_nothing)

    return score


def _remote(judge: FusionJudge, all_or_nothing: bool, max_tests: int) -> Callable[[dict[str, Any]], Any]:
    async def score(item: dict[str, Any]) -> dict[str, float]:
        program, cases = _parts(item, max_tests)
        return _scored(await judge.judge(program, cases) if program else None, all_or_nothing)

    return score


def _parts(item: dict[str, Any], max_tests: int) -> tuple[str | None, Cases]:
    """Return the program and its tests. Tests are always read, so that a row without tests never scores 0."""
    cases = read_cases(item["columns"])
    return extract_code(item["completion"]), cases.first(max_tests) if max_tests else cases


def _scored(verdict: Verdict | None, all_or_nothing: bool) -> dict[str, float]:
    """Return the score, and the share of tests per result. None: there was no program."""
    if verdict is None:
        return {"score": 0.0, "no_code": 1.0, **{f"code_{end}": 0.0 for end in ENDS}}
    shares = {f"code_{end}": verdict.ends.count(end) / len(verdict.ends) for end in ENDS}
    return {"score": float(verdict.share == 1) if all_or_nothing else verdict.share, "no_code": 0.0, **shares}
