"""The guard of every HTTP server: with a token only who has it, without one no web page of another site."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollover
from rollover.http_guard import Guard, check_open_to

HERE = (b"host", b"127.0.0.1:8000")
PACKAGE = Path(rollover.__file__).parent


def status(guard: Guard, *headers: tuple[bytes, bytes], kind: str = "http", path: str = "/pause") -> Any:
    """What it answers: 200 where the application was asked."""
    told: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    asyncio.run(guard({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return told[0].get("status", told[0].get("code"))


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


def bearer(text: bytes) -> tuple[bytes, bytes]:
    return (b"Authorization", b"Bearer " + text)


def test_the_environment_s_token_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", "s\u00e9cret")
    guard = Guard(application)
    assert status(guard, bearer("s\u00e9cret".encode())) == 200
    assert status(guard, (b"authorization", b"bearer  s\xc3\xa9cret ")) == 200
    assert status(guard) == status(guard, bearer(b"secret")) == status(guard, bearer(b"")) == 401
    assert status(guard, bearer("s\u00e9cret".encode()), bearer(b"x")) == 401
    assert status(guard, (b"authorization", b"Basic s\xc3\xa9cret")) == 401
    assert status(guard, kind="websocket") == 1008
    assert status(guard, kind="lifespan") == 200


@pytest.mark.parametrize("host", [b"node-7:8000", b"gpu.cluster.example", b"10.0.0.7:8000"])
def test_a_client_with_the_token_may_name_any_host(host: bytes) -> None:
    """Nodes of a cluster have names, and no web page has the token."""
    guard = Guard(application, "secret")
    assert status(guard, (b"host", host), bearer(b"secret")) == 200
    assert status(guard, (b"host", host)) == status(guard, (b"host", host), bearer(b"x")) == 401


def test_without_a_token_programs_of_this_machine_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOVER_SERVER_TOKEN", raising=False)
    guard = Guard(application)
    assert status(guard, HERE) == status(guard, HERE, bearer(b"x")) == 200
    for host in (b"localhost", b"LOCALHOST:8000", b"[::1]:8000", b"[::1]", b"127.0.0.1", b"10.0.0.7:1"):
        assert status(guard, (b"Host", host)) == 200, host


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"evil.example:8000", b"127.0.0.1.evil.example", b"localhost.evil.example:8000", b"", b":8000"],
)
def test_without_a_token_other_names_of_this_machine_are_refused(host: bytes) -> None:
    assert status(Guard(application, ""), (b"host", host)) == 403
    assert status(Guard(application, ""), (b"host", host), kind="websocket") == 1008


def test_a_request_needs_exactly_one_host() -> None:
    assert status(Guard(application, "")) == 403
    assert status(Guard(application, ""), HERE, (b"host", b"evil.example")) == 403


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        (b"origin", b"http://127.0.0.1:8000", 200),
        (b"origin", b"https://127.0.0.1:8000", 200),
        (b"origin", b"http://127.0.0.1:3000", 403),
        (b"origin", b"http://evil.example", 403),
        (b"origin", b"null", 403),
        (b"origin", b"", 403),
        (b"Origin", b"file://", 403),
        (b"sec-fetch-site", b"same-origin", 200),
        (b"sec-fetch-site", b"none", 200),
        (b"sec-fetch-site", b"same-site", 403),
        (b"Sec-Fetch-Site", b"cross-site", 403),
        (b"sec-fetch-site", b"", 403),
    ],
)
def test_only_the_server_s_own_pages_may_ask(header: bytes, value: bytes, code: int) -> None:
    guard = Guard(application, "")
    assert status(guard, HERE, (header, value)) == code
    assert status(guard, HERE, (header, value), kind="websocket") == (1008 if code == 403 else 200)
    assert status(Guard(application, "secret"), HERE, (header, value), bearer(b"secret")) == 200


def test_a_public_path_may_be_linked_to_and_needs_no_token() -> None:
    link, rebound = (b"sec-fetch-site", b"cross-site"), (b"host", b"evil.example")
    for token in ("", "secret"):
        guard = Guard(application, token, lambda path: path == "/")
        assert status(guard, HERE, link, path="/") == 200
        assert status(guard, HERE, link, path="/api") == (401 if token else 403)
    assert status(Guard(application, "", lambda path: True), rebound) == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_needs_none(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.delenv("ROLLOVER_SERVER_TOKEN", raising=False)
    check_open_to(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-3", ""])
def test_others_do(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", "")
    with pytest.raises(ValueError, match="set a token in the environment variable ROLLOVER_SERVER_TOKEN"):
        check_open_to(host)
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", "t")
    check_open_to(host)


def test_every_server_of_the_package_is_behind_the_guard() -> None:
    """Only HttpServer listens for HTTP, and it puts the guard before its application."""
    listens = (
        "uvicorn.Server",
        "uvicorn.Config",
        "uvicorn.run",
        "aiohttp.web",
        "import web",
        "http.server",
        "ASGIServer",
    )
    listens += ("start_server", "socketserver", "hypercorn", "wsgiref", "HTTPServer(")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in listens)
    }
    assert found == {"http_server.py"}


def test_it_needs_the_standard_library_alone() -> None:
    """vLLM's environment has neither our dependencies nor those of the server."""
    script = (
        "import sys, rollover.http_guard\nprint({n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert {"starlette", "uvicorn", "aiohttp", "torch", "pydantic"}.isdisjoint(eval(found.stdout)), found.stdout
