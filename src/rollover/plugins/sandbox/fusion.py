"""Client of a Sandbox-Fusion-compatible service: POST /run_code for each test.

Field names and statuses: github.com/bytedance/SandboxFusion, sandbox/server/sandbox_api.py. A request that fails, also
by a SandboxError, is retried (rewards/service.py). After the last try there is no verdict: the reward is missing, and
never 0.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from rollover.plugins.sandbox.cases import Cases, same_text, same_value
from rollover.plugins.sandbox.guest.values import to_json
from rollover.plugins.sandbox.judge import Verdict
from rollover.rewards.service import Service, TransientFailure

SLACK_S = 10.0  # the service's own overhead
# verl prepends the same imports to programs that are called by a function's name.
_PRELUDE = "\n".join(
    f"from {name} import *\nimport {name}"
    for name in (
        "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
        "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
    )
)  # fmt: skip
_CALL = """

import json as _json, sys as _sys
_given = _json.loads(_sys.stdin.read())
_name = _given["name"]
_function = globals()[_name] if _name in globals() else getattr(Solution(), _name)
_result = _function(*_given["arguments"])
print("\\n" + _given["mark"] + _json.dumps(_result, default=list))
"""


class FusionClient:
    """Client of a service at `url` (or its run_code). At most `concurrency` requests at a time."""

    def __init__(self, url: str, timeout_s: float, memory_mb: int, concurrency: int, retries: int) -> None:
        whole = url if url.rstrip("/").endswith("run_code") else url.rstrip("/") + "/run_code"
        self.service = Service(
            'the reward code with sandbox = "http"',
            whole,
            timeout_s=2 * timeout_s + SLACK_S,
            concurrency=concurrency,
            retries=retries,
        )
        self._timeout_s, self._memory_mb = timeout_s, memory_mb

    async def run(self, code: str, stdin: str) -> dict[str, Any]:
        """Run a Python program, and return its run_result, or its compile_result if it did not run.

        ServiceFailed if every try failed.
        """
        request = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": self._timeout_s,
            "run_timeout": self._timeout_s,
            "memory_limit_MB": self._memory_mb,
            "files": {},
            "fetch_files": [],
        }
        return await self.service.post(request, _result_of)


def _result_of(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
        status = answer["status"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise TransientFailure("an answer that is none") from None
    run, compiled = answer.get("run_result"), answer.get("compile_result")
    if status not in ("Success", "Failed"):
        raise TransientFailure(f"{status}: {str(answer.get('message'))[:200]}")
    result = run if isinstance(run, dict) else compiled
    if not isinstance(result, dict) or result.get("status") not in ("Finished", "TimeLimitExceeded"):
        raise TransientFailure(f"an answer without a result ({status})")
    if status == "Success" and not (result is run and result["status"] == "Finished"):
        raise TransientFailure("a success without a program that finished")
    return result


class FusionJudge:
    """A `judge.Judge` with a service instead of local sandboxes.

    Tests as code run in the program's process there, so that a program can fake them; local sandboxes prevent that.
    """

    def __init__(self, client: FusionClient) -> None:
        self._client = client

    async def judge(self, code: str, cases: Cases) -> Verdict:
        """Run all tests concurrently. ServiceFailed: there is no verdict."""
        run = {"stdin": self._text, "calls": self._call, "tests": self._test}[cases.kind]
        ends = await asyncio.gather(*(run(code, cases, index) for index in range(len(cases))))
        return Verdict.from_ends(ends)

    async def _text(self, code: str, cases: Cases, index: int) -> tuple[str, str]:
        result = await self._client.run(code, cases.inputs[index])
        return _end_of(result) or _passed(same_text(str(result.get("stdout") or ""), cases.outputs[index]))

    async def _call(self, code: str, cases: Cases, index: int) -> tuple[str, str]:
        mark = secrets.token_hex(8)
        given = {"name": cases.name, "arguments": cases.inputs[index], "mark": mark}
        head = "" if "__future__" in code else _PRELUDE + "\n"
        result = await self._client.run(head + code + _CALL, json.dumps(given))
        if end := _end_of(result):
            return end
        _, found, value = str(result.get("stdout") or "").rpartition("\n" + mark)
        if not found:
            return "error", "it ended before its result"
        try:
            return _passed(same_value(to_json(json.loads(value)), cases.outputs[index]))
        except (ValueError, RecursionError):
            return "wrong", ""

    async def _test(self, code: str, cases: Cases, index: int) -> tuple[str, str]:
        mark = secrets.token_hex(8)
        parts = (code, cases.setup, cases.tests[index], f"print({mark!r})")
        result = await self._client.run("\n\n".join(parts), "")
        end = _end_of(result)
        if end and "AssertionError" in end[1]:
            return "wrong", end[1]
        return end or (
            ("passed", "") if mark in str(result.get("stdout")) else ("error", "it ended before its test did")
        )


def _passed(right: bool) -> tuple[str, str]:
    return ("passed", "") if right else ("wrong", "")


def _end_of(result: dict[str, Any]) -> tuple[str, str] | None:
    """Return how a program failed; None for a success."""
    if result["status"] == "TimeLimitExceeded":
        return "timeout", ""
    if result.get("return_code") == 0:
        return None
    lines = str(result.get("stderr") or "").strip().splitlines()
    last = lines[-1][:300] if lines else f"exit code {result.get('return_code')}"
    return ("memory" if last.startswith("MemoryError") else "error"), last
