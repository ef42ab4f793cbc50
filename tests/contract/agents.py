"""Agents of every kind with the same behaviour: async functions, plain functions, and a program (this file, run).

A behaviour is a generator: it yields (role, messages), gets the text of the answer, and returns the answer of the
workflow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from typing import Any

Behaviour = Generator[tuple[str, list[dict[str, str]]], str, Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talks() -> Behaviour:
    """Two turns of one rollout."""
    first = yield "policy", [user("What is 2+2?")]
    second = yield "policy", [user("What is 2+2?"), {"role": "assistant", "content": first}, user("And 3+3?")]
    return 0.25 * (first == "four") + 0.5 * (second == "six")


def by_roles() -> Behaviour:
    yield "policy", [user("What is 2+2?")]
    yield "policy/judge", [user("And 3+3?")]
    return {"policy": 1.0, "judge": 0.5}


def without_end() -> Behaviour:
    messages = [user("What is 2+2?")]
    while True:
        messages += [{"role": "assistant", "content": (yield "policy", messages)}, user("And 3+3?")]


def fails() -> Behaviour:
    yield "policy", [user("What is 2+2?")]
    raise KeyError("no such thing")


def hangs() -> Behaviour:
    yield "policy", [user("What is 2+2?")]
    started = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    with open("pids.new", "w") as file:
        file.write(f"{os.getpid()} {started}")
    os.rename("pids.new", "pids")
    open("hangs", "w").close()
    time.sleep(1000)


def dies() -> Behaviour:
    yield "policy", [user("What is 2+2?")]
    os.kill(os.getpid(), signal.SIGKILL)


async def play(behaviour: Behaviour, client: Any) -> Any:
    text: Any = None
    while True:
        try:
            role, messages = behaviour.send(text)
        except StopIteration as end:
            return end.value
        text = (await client.chat.completions.create(model=role, messages=messages)).choices[0].message.content


def play_plain(behaviour: Behaviour, client: Any) -> Any:
    return played(
        behaviour,
        lambda role, messages: client.chat.completions.create(model=role, messages=messages).choices[0].message.content,
    )


def play_by_hand(behaviour: Behaviour) -> Any:
    def ask(role: str, messages: Any) -> str:
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": role, "messages": messages}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    return played(behaviour, ask)


def played(behaviour: Behaviour, ask: Callable[[str, Any], str]) -> Any:
    text: Any = None
    while True:
        try:
            role, messages = behaviour.send(text)
        except StopIteration as end:
            return end.value
        text = ask(role, messages)


BEHAVIOURS = (talks, by_roles, without_end, fails, hangs, dies)
for made in BEHAVIOURS:  # async_talks(client), plain_talks(client), ...

    async def awaited(client: Any, made: Any = made) -> Any:
        return await play(made(), client)

    def plain(client: Any, made: Any = made) -> Any:
        return play_plain(made(), client)

    globals().update({f"async_{made.__name__}": awaited, f"plain_{made.__name__}": plain})

if __name__ == "__main__":
    answer = play_by_hand(globals()[sys.argv[1]]())
    print(json.dumps({"rewards" if isinstance(answer, dict) else "reward": answer}))
