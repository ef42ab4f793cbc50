"""Agents ask the gateway without the user's proxy, and the environment says afterwards what it said before."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest

from rollover.types import Reward
from rollover.workflows.gateway import without_proxy
from unit.workflows.scripted_host import ScriptedHost

pytest.importorskip("openai")


def said() -> list[str | None]:
    return [os.environ.get(name) for name in ("NO_PROXY", "no_proxy")]


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)


def test_a_proxy_is_not_asked_and_the_environment_is_given_back() -> None:
    within: list[list[str | None]] = []

    async def agent(client: Any, model: str) -> float:
        within.append(said())
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "What is 2+2?"}])
        return 1.0

    host = ScriptedHost(agent, lambda before: "4")
    assert host.run() == {"0-0": Reward(1.0)}
    assert within == [["example.org,127.0.0.1", "127.0.0.1"]]
    assert said() == ["example.org", None]


def test_several_gateways_at_once_give_it_back_with_the_last_one() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_proxy("127.0.0.1"))
    second.enter_context(without_proxy("127.0.0.1"))
    first.close()
    assert said() == ["example.org,127.0.0.1", "127.0.0.1"]
    second.close()
    assert said() == ["example.org", None]


def test_what_somebody_else_has_written_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_proxy("127.0.0.1"):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,example.com")
    assert said() == ["127.0.0.1,example.com", None]
