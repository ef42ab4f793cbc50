"""The client of a Sandbox-Fusion-compatible service, against a server that runs what it is asked, and fails as told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from rollover.plugins.sandbox.cases import read_cases
from rollover.plugins.sandbox.fusion import FusionClient, FusionJudge
from rollover.plugins.sandbox.judge import Verdict
from rollover.rewards.service import ServiceFailed

ADDS = {"inputs": ["1", "2"], "outputs": ["2", "3"]}


class Service:
    """`faults`: what the next requests get, used up from the front; then every program is run."""

    def __init__(self, *faults: str) -> None:
        self.faults, self.requests = list(faults), []
        self.running = self.most_running = 0
        self.gone = asyncio.Event()

    async def run_code(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request, body, self.faults.pop(0) if self.faults else "")
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if fault.isdigit():
            return web.Response(status=int(fault), text="not now")
        if fault == "half":
            return web.Response(text='{"status": "Success", "run_res')
        if fault == "sandbox":
            return web.json_response({"status": "SandboxError", "message": "no room"})
        if fault == "empty":
            return web.json_response({"status": "Success", "run_result": None})
        if fault == "error":
            return web.json_response({"status": "Failed", "run_result": {"status": "Error", "return_code": None}})
        if fault == "silent":
            await self.gone.wait()
        if fault == "break":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "cut":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"status": ')
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.json_response(await asyncio.to_thread(_run, body))


def _run(body: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-S", "-c", body["code"]]
    try:
        done = subprocess.run(command, input=body["stdin"], capture_output=True, text=True, timeout=body["run_timeout"])
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None}}
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return {"status": "Failed" if done.returncode else "Success", "compile_result": None, "run_result": result}


def with_service(
    talk: Callable[[FusionClient], Awaitable[Any]], service: Service, timeout_s: float = 20.0, concurrency: int = 4
) -> Any:
    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/run_code", service.run_code)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = FusionClient(f"http://127.0.0.1:{port}", timeout_s, 256, concurrency, 3)
        client.service.first_pause_s = 0.01
        try:
            return await talk(client)
        finally:
            await client.service.close()
            service.gone.set()
            await runner.cleanup()

    return asyncio.run(main())


def judged(code: str, service: Service | None = None, **columns: Any) -> Verdict:
    return with_service(lambda client: FusionJudge(client).judge(code, read_cases(columns)), service or Service())


def test_texts_calls_and_asserts() -> None:
    assert judged("print(int(input()) + 1)", tests=ADDS).ends == ("passed", "passed")
    called = {"fn_name": "f", "inputs": ["[2, 1]", "[]"], "outputs": ["[1, 2]", "[0]"]}
    assert judged("def f(a: List[int]):\n    return sorted(a)", tests=called).ends == ("passed", "wrong")
    assert judged("class Solution:\n    def f(self, a): return tuple(sorted(a))", tests=called).ends[0] == "passed"
    tests = ["assert f(1) == 2", "assert f(1) == 3", "assert g(1)"]
    assert judged("def f(x):\n    return x + 1", test_list=tests).ends == ("passed", "wrong", "error")


def test_how_programs_end() -> None:
    assert judged("import sys; sys.exit(3)", tests=ADDS).ends == ("error", "error")
    assert judged("raise MemoryError", tests=ADDS).ends == ("memory", "memory")
    assert judged("import sys\ndef f(x): sys.exit(0)", test_list=["assert f(1)"]).ends == ("error",)
    loop = with_service(
        lambda client: FusionJudge(client).judge("while True: pass", read_cases({"tests": ADDS})), Service(), 0.5
    )
    assert loop.ends == ("timeout", "timeout")


def test_the_request_is_sandbox_fusions() -> None:
    service = Service()
    judged("print(2)", service, tests={"inputs": ["1"], "outputs": ["2"]})
    assert service.requests == [
        {
            "code": "print(2)",
            "language": "python",
            "stdin": "1",
            "compile_timeout": 20.0,
            "run_timeout": 20.0,
            "memory_limit_MB": 256,
            "files": {},
            "fetch_files": [],
        }
    ]


@pytest.mark.parametrize("fault", ["429", "503", "half", "sandbox", "empty", "error", "break", "cut"])
def test_what_may_pass_is_tried_again(fault: str) -> None:
    service = Service(fault, fault)
    assert judged("print(int(input()) + 1)", service, tests=ADDS).ends == ("passed", "passed")
    assert len(service.requests) == 4


@pytest.mark.parametrize("fault", ["500", "sandbox", "break"])
def test_a_service_that_goes_on_failing_gives_no_verdict(fault: str) -> None:
    service = Service(*[fault] * 8)
    with pytest.raises(ServiceFailed, match="failed 4 times"):
        judged("print(1)", service, tests={"inputs": [""], "outputs": ["1"]})
    assert len(service.requests) == 4


def test_what_will_not_pass_is_not_tried_again() -> None:
    service = Service("401")
    with pytest.raises(ServiceFailed, match="refused: status 401: not now"):
        judged("print(1)", service, tests={"inputs": [""], "outputs": ["1"]})
    assert len(service.requests) == 1


def test_a_service_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.plugins.sandbox.fusion.SLACK_S", 0.1)
    service = Service(*["silent"] * 9)
    with pytest.raises(ServiceFailed, match="no answer in"):
        with_service(lambda client: client.run("print(1)", ""), service, timeout_s=0.05)
    assert len(service.requests) == 4


def test_nobody_there_is_no_verdict() -> None:
    async def main() -> None:
        client = FusionClient("http://127.0.0.1:9/run_code", 1.0, 256, 2, 1)
        client.service.first_pause_s = 0.01
        try:
            with pytest.raises(ServiceFailed, match="failed 2 times: ClientConnector"):
                await client.run("print(1)", "")
        finally:
            await client.service.close()

    asyncio.run(main())


def test_so_many_requests_at_a_time_and_no_more() -> None:
    service = Service()
    rows = {"inputs": ["1"] * 9, "outputs": ["2"] * 9}
    verdict = with_service(
        lambda client: FusionJudge(client).judge("print(2)", read_cases({"tests": rows})), service, concurrency=3
    )
    assert verdict.share == 1
    assert service.most_running == 3


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is no http:// or https:// address"):
        FusionClient("localhost:8080", 1.0, 256, 1, 0)
