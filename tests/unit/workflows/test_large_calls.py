"""Calls with much text: refused without a look where it cannot fit, and tokenised beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rollover.types import Reward
from rollover.workflows.conversations import LARGE_CHARACTERS, BudgetUsedUp, Call, Conversations
from unit.workflows.scripted_host import ScriptedHost

MORE = {"role": "user", "content": "More"}
LONG = {"role": "user", "content": "a long story " * (LARGE_CHARACTERS // 10)}


def says(text: str):
    return lambda before: text


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each call's place was found: the names of the threads."""
    found: list[str] = []
    place_of = Conversations.place_of

    def told(self: Conversations, *args: Any):
        found.append(threading.current_thread().name)
        return place_of(self, *args)

    monkeypatch.setattr(Conversations, "place_of", told)
    return found


@pytest.mark.parametrize(
    "call",
    [
        Call(messages=({"role": "user", "content": "x" * 10**6},)),
        Call(messages=({"role": "user", "content": [{"type": "text", "text": "x" * 10**6}]},)),
        Call(messages=(MORE,), tools=({"type": "function", "function": {"name": "a" * 10**6}},)),
        Call(messages=(MORE,) * 10**5),
        Call(prompt="x" * 10**6),
        Call(prompt=(7,) * 10**5),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_tokenised(call: Call, threads: list[str]) -> None:
    refused: list[str] = []

    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        try:
            await host.gateway.call(trajectory.api_key, "policy", call)
        except BudgetUsedUp as error:
            refused.append(str(error))
        await trajectory.chat(task.messages)
        return 1.0

    host = ScriptedHost(talk, says("four"))
    assert host.run() == {"0-0": Reward(1.0)}
    assert "do not fit into the" in refused[0] and len(threads) == 1, "the second call's place alone was looked for"


def test_large_texts_are_tokenised_in_a_thread_as_in_the_loop(threads: list[str]) -> None:
    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        first = await trajectory.chat([LONG])
        large, small = await asyncio.gather(
            trajectory.chat([LONG, first.message, LONG]), trajectory.chat([LONG, first.message, MORE])
        )
        assert len(large.prompt_ids) > len(small.prompt_ids)
        return 1.0

    host = ScriptedHost(talk, says("four"), max_prompt_tokens=10**6, max_new_tokens=10**6)
    assert all(reward == Reward(1.0) for reward in host.run().values())
    assert len(threads) == 3 and all(name.startswith("large calls") for name in threads)
    continued, branch = host.rollouts.values()
    assert continued.prompt == host.chats.for_tools(()).prompt([LONG])
    [written] = [s for s in continued.segments if not s.trainable]
    turn = [*continued.segments[0].token_ids]
    assert written.token_ids.tolist() == list(host.chats.for_tools(()).continuation(turn, [LONG]).ids)
    assert branch.prompt.ids[: len(continued.prompt)] == continued.prompt.ids
    assert host.episodes.counts["turns/continued"] == host.episodes.counts["turns/breaks/branch"] == 1
