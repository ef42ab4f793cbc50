"""Requests as a browser sends them for a page of another site are refused by every HTTP server of ours, and the usual
clients are not: over real connections, with the headers as they go over the wire."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import aiohttp
import openai

import tiny
from contract.server_client import Client
from contract.server_contract import asked
from recorded_run import write_run
from rollover.config import Config
from rollover.engine.remote.client import ServerClient
from rollover.engine.remote.vllm import parse_event
from rollover.engine.server.app import make_app, make_service
from rollover.engine.server.service import Service
from rollover.engine.server.texts import TextEndpoints
from rollover.http_server import HttpServer
from rollover.plugins.dashboard import app as view
from rollover.plugins.dashboard.run_data import RunData
from unit.workflows.test_gateway import FakePolicy

CHANGES = {
    "serve": [
        ("/pause?mode=abort", b""),
        ("/abort_requests", b"{}"),
        ("/update_weight_version", b'{"new_version": "evil/1"}'),
        ("/start_weight_update", b""),
        ("/finish_weight_update", b'{"weight_version": "evil/1"}'),
        ("/collective_rpc", b'{"method": "rollover_verify", "args": ["/etc/passwd", "00"]}'),
        ("/reset_prefix_cache?reset_running_requests=true", b""),
        ("/inference/v1/generate", json.dumps(asked([5])).encode()),
        ("/v1/completions", b'{"model": "m", "prompt": "1"}'),
    ],
    "gateway": [("/v1/chat/completions", b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}')],
    "dashboard": [("/api/runs", b"")],
}
READS = {
    "serve": ["/v1/models", "/weight_info", "/metrics", "/health", "/is_paused", "/no_such_path"],
    "gateway": ["/v1/models"],
    "dashboard": ["/api/runs", "/api/runs/0/config", "/api/compare/config"],
}
SERVERS = list(READS)
CROSS = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}


def send(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """The status and body of one request, with exactly these headers besides Host and Content-Length."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Served:
    """The three servers, each on a port, and what of them must not change."""

    def __init__(self, service: Service, policy: FakePolicy, ports: dict[str, int]) -> None:
        self.service, self.policy, self.ports = service, policy, ports

    def unchanged(self) -> None:
        """Nothing that was sent has had an effect."""
        assert not self.service.is_paused and self.service.label == "default" and not self.service.streams
        assert self.service.num_ended_tokens == 0 and not self.policy.calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def service_of(folder: Path) -> Callable[[], Service]:
    tiny.save(folder / "model")
    values = {
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "engine": {"kv_memory_gb": 0.05, "max_running": 8},
        "run": {"threads": 1},
    }
    return lambda: make_service(Config.model_validate(values))


@pytest.fixture
def serve(folder: Path, tmp_path: Path, service_of: Callable[[], Service]) -> Iterator[Callable[..., None]]:
    """Run `body(served)`, in a thread, beside the servers with `token`."""
    run = write_run(tmp_path / "run")

    @asynccontextmanager
    async def all_of(token: str) -> AsyncIterator[Served]:
        service, policy = service_of(), FakePolicy()
        servers = {
            "serve": HttpServer(make_app(service, TextEndpoints(service, service.tokenizer)), token=token),
            "gateway": HttpServer(policy.gateway().app),
            "dashboard": HttpServer(view.make_app([RunData(run)]), token=token, is_public=view.is_of_page),
        }
        for server in servers.values():
            await server.start()
        try:
            yield Served(service, policy, {name: server.port for name, server in servers.items()})
        finally:
            for server in servers.values():
                await server.close()
            await service.engine.close()

    def work(body: Callable[[Served], Any], token: str = "") -> None:
        async def main() -> None:
            async with all_of(token) as served:
                if asyncio.iscoroutinefunction(body):
                    await body(served)
                else:
                    await asyncio.to_thread(body, served)

        asyncio.run(main())

    yield work


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_page_of_another_site_changes_and_reads_nothing(serve: Callable[..., None], token: str) -> None:
    def body(served: Served) -> None:
        for name in SERVERS:
            here = f"127.0.0.1:{served.ports[name]}"
            refused = (401,) if token and name != "gateway" else (403,)
            simple = {"Host": here, "Content-Type": "text/plain", **CROSS}
            for path, content in CHANGES[name]:
                for headers in (
                    simple,
                    simple | {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Mode": "navigate"},
                    simple | {"Origin": "null"},  # of a sandboxed frame, or a file
                    simple | {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},  # of another server
                    {"Host": here, "Content-Type": "text/plain", "Origin": "http://evil.example"},  # an old browser
                    {"Host": here, "Content-Type": "text/plain", "Origin": "null"},
                    {"Host": "evil.example:80", "Origin": "http://evil.example:80", "Sec-Fetch-Site": "same-origin"},
                ):
                    assert send(served.ports[name], "POST", path, headers, content)[0] in refused, (name, path, headers)
                preflight = {"Host": here, "Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
                status, _ = send(served.ports[name], "OPTIONS", path, preflight)
                assert status in refused, (name, path)
            for path in READS[name]:
                for headers in (
                    {"Host": here, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},  # a picture, a script
                    {"Host": here, **CROSS},
                    {"Host": "evil.example"},  # after rebinding, and from a browser without Sec-Fetch-Site
                    {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"},
                    {"Host": "127.0.0.1.evil.example"},
                ):
                    status, _ = send(served.ports[name], "GET", path, headers)
                    assert status in refused, (name, path, headers)
        served.unchanged()

    serve(body, token)


def test_no_answer_permits_another_origin(serve: Callable[..., None]) -> None:
    """Else a page could read what its request was answered."""

    async def body(served: Served) -> None:
        async with aiohttp.ClientSession() as session:
            for name in SERVERS:
                url = f"http://127.0.0.1:{served.ports[name]}"
                for path in (READS[name][0], CHANGES[name][0][0]):
                    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": url}):
                        async with session.options(url + path, headers=headers) as answer:
                            assert not any(of.lower().startswith("access-control") for of in answer.headers)
                        async with session.get(url + path, headers=headers) as answer:
                            assert not any(of.lower().startswith("access-control") for of in answer.headers)

    serve(body)


def test_the_dashboard_s_page_may_be_linked_to(serve: Callable[..., None]) -> None:
    def body(served: Served) -> None:
        port = served.ports["dashboard"]
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert send(port, "GET", "/", {"Host": f"127.0.0.1:{port}", **link})[0] == 200
        assert send(port, "GET", "/", {"Host": "evil.example", **link})[0] == 403
        own = {"Host": f"localhost:{port}", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
        assert send(port, "GET", "/api/runs", own)[0] == 200

    serve(body)


@pytest.mark.parametrize("token", ["", "secret"])
def test_the_usual_clients_are_answered(serve: Callable[..., None], token: str) -> None:
    async def body(served: Served) -> None:
        url, gateway = (f"http://127.0.0.1:{served.ports[name]}" for name in ("serve", "gateway"))
        async with Client(url, token) as client:  # as vLLM's clients ask
            assert len((await client.generate(asked([5, 6]))).tokens) == 12
            assert await client.ok("/pause?mode=keep") == {"status": "paused"}
            await client.ok("/resume")
        ours = ServerClient(url, token)
        events = ours.events("/inference/v1/generate", asked([5, 6]) | {"stream": True})
        chunks = [parse_event(data) async for data in events]
        assert sum(len(chunk.token_ids) for chunk in chunks if chunk is not None) == 12
        assert (await ours.get("/v1/models", limit_s=60))["data"]
        await ours.close()
        name = served.service.model_name
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token or "none") as client:
            assert (await client.completions.create(model=name, prompt="1+1=", max_tokens=3)).choices
        async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="key-1") as client:
            message = {"role": "user", "content": "x"}
            answer = await client.chat.completions.create(model="policy", messages=[message])
            assert answer.choices[0].message.content == "four"
            assert [of.id async for of in client.models.list()][0] == "policy"

    serve(body, token)
