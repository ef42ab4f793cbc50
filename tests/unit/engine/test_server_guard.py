"""Who may ask a server: the token is the environment's, and without one it is open to this machine alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollover.engine.server.guard import TokenGuard, check_open_to


def status(guard: TokenGuard, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
    """What it answers: 200 where the application was asked."""
    told: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    asyncio.run(guard({"type": kind, "path": "/pause", "headers": list(headers)}, None, send))
    return told[0].get("status", told[0].get("code"))


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


def bearer(text: bytes) -> tuple[bytes, bytes]:
    return (b"Authorization", b"Bearer " + text)


def test_the_environment_s_token_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", "s\u00e9cret")
    guard = TokenGuard(application)
    assert status(guard, bearer("s\u00e9cret".encode())) == 200
    assert status(guard, (b"authorization", b"bearer  s\xc3\xa9cret ")) == 200
    assert status(guard) == status(guard, bearer(b"secret")) == status(guard, bearer(b"")) == 401
    assert status(guard, bearer("s\u00e9cret".encode()), bearer(b"x")) == 401
    assert status(guard, (b"authorization", b"Basic s\xc3\xa9cret")) == 401
    assert status(guard, kind="websocket") == 1008
    assert status(guard, kind="lifespan") == 200


def test_without_one_everyone_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOVER_SERVER_TOKEN", raising=False)
    assert status(TokenGuard(application)) == status(TokenGuard(application), bearer(b"x")) == 200


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
