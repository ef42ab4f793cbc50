"""The judge: what it is asked, what becomes of its answers and its failures, what is kept, what may be spent."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollover.config import RewardsConfig
from rollover.rewards.built_in import make_spec
from rollover.rewards.llm_judge import JudgeCache, request_hash
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.types import Reward, Task


class Endpoint:
    """An OpenAI-compatible server. `says`: the text of its next answers, the last for ever; a number is a status, and
    half, silent, break and echo (the headers of the request, refused) are what they say. `tokens`: of each answer, as
    JSON."""

    tokens = "10"

    def __init__(self, *says: str) -> None:
        self.says, self.requests, self.headers = list(says), [], []
        self.gone = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        say = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if say.isdigit():
            return web.Response(status=int(say), text="not now")
        if say == "half":
            return web.Response(text='{"choices": [{"mess')
        if say == "silent":
            await self.gone.wait()
        if say == "break":
            assert request.transport is not None
            request.transport.abort()
        if say == "echo":
            return web.Response(status=401, text=str(dict(request.headers)))
        if say == "elsewhere":
            raise web.HTTPSeeOther("/v1/other")
        text = json.dumps({"choices": [{"message": {"content": say}}], "usage": {"total_tokens": 0}})
        return web.Response(text=text.replace('"total_tokens": 0', f'"total_tokens": {self.tokens}'))


def scored(
    endpoint: Endpoint,
    completions: list[str],
    prompt: Any = "What is 2 + 2?",
    *,
    call_s: float = 120.0,
    stats: dict[str, float] | None = None,
    **params: Any,
) -> list[Reward]:
    """By the pool, as a run scores: in its processes, by the spec that the configuration makes. `call_s`: its
    rewards.timeout_s; `stats` gets what it counted."""

    async def main() -> list[Reward]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", endpoint.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
        spec = make_spec("llm_judge", {"url": url, "model": "judge", "timeout_s": 30.0} | params)
        messages = None if isinstance(prompt, str) else tuple(prompt)
        text = prompt if messages is None else None
        task = Task("t", "s", spec, messages=messages, prompt=text, columns={"answer": 4})
        pool = RewardPool(RewardsConfig(num_workers=1, timeout_s=call_s))
        try:
            return await pool.score([ScoreRequest(task, text) for text in completions])
        finally:
            if stats is not None:
                stats.update(pool.stats())
            await pool.close()
            endpoint.gone.set()
            await runner.cleanup()

    return asyncio.run(main())


def test_llm_judge_fills_the_prompt_and_reads_the_last_score() -> None:
    endpoint = Endpoint("Score: 9? No.\nScore: 7.5")
    (reward,) = scored(endpoint, ["It {is} 4."], lowest=0, highest=10, options={"max_tokens": 99})
    assert reward.score == 0.75
    (asked,) = endpoint.requests
    text = asked["messages"][0]["content"]
    assert asked["model"] == "judge" and asked["temperature"] == 0 and asked["max_tokens"] == 99
    assert (
        "What is 2 + 2?" in text and "\n4\n" in text and "It {is} 4." in text and "from 0 " in text and "to 10 " in text
    )


def test_a_completion_cannot_put_the_answer_into_its_text() -> None:
    endpoint = Endpoint("Score: 0")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "{completion}"}]
    scored(endpoint, ["{answer} {highest}"], prompt=messages)
    text = endpoint.requests[0]["messages"][0]["content"]
    assert "{answer} {highest}" in text and "system: S\n\nuser: {completion}" in text


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    endpoint = Endpoint("Score: 1")
    assert scored(endpoint, ["a"], api_key_env="MY_KEY")[0].score == 1
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(endpoint.requests)


@pytest.mark.parametrize("say", ["echo", "Authorization: Bearer sk-0123456789, and no number"])
def test_llm_judge_masks_the_api_key_in_answers(say: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    (reward,) = scored(Endpoint(say), ["a"], api_key_env="MY_KEY", cache=str(tmp_path / "judge.sqlite"))
    assert reward.score is None and "Bearer ***" in str(reward.error) and "0123456789" not in str(reward.error)
    assert all(b"0123456789" not in file.read_bytes() for file in tmp_path.iterdir())


def test_an_answer_from_elsewhere_is_none() -> None:
    """A redirect makes another question of it."""
    (reward,) = scored(Endpoint("elsewhere"), ["a"])
    assert reward.score is None and "refused: status 303" in str(reward.error)


@pytest.mark.parametrize("fault", ["429", "500", "503", "half", "break"])
def test_what_may_pass_is_tried_again(fault: str) -> None:
    endpoint = Endpoint(fault, "Score: 1")
    assert scored(endpoint, ["a"])[0].score == 1
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("says", "params", "why"),
    [
        ("500", {"retries": 1}, "failed 2 times: status 500"),
        ("half", {"retries": 0}, "failed 1 times: an answer that is none"),
        ("silent", {"retries": 0, "timeout_s": 0.2}, "no answer in 0.2 s"),
        ("401", {}, "refused: status 401: not now"),
        ("It is good.", {}, "holds no score"),
        ("Score: 11", {"highest": 10}, "not between 0 and 10"),
        ("Score:" + " " * 40_000 + "high", {}, "holds no score"),  # in time: no search of quadratic length
    ],
)
def test_without_a_score_the_reward_is_missing(says: str, params: dict[str, Any], why: str) -> None:
    rewards = scored(Endpoint(says), ["a", "b"], **params)
    assert all(reward.score is None and why in str(reward.error) for reward in rewards)


def test_dead_service_keeps_earlier_scores_and_the_worker() -> None:
    """Its request may be silent for longer than the call has."""
    stats: dict[str, float] = {}
    rewards = scored(Endpoint("Score: 1", "silent"), ["a", "b", "c"], call_s=6.0, stats=stats)
    assert sorted(reward.score is None for reward in rewards) == [False, True, True]
    why = [str(reward.error) for reward in rewards if reward.missing]
    assert all("gave no answer in the time of the call (rewards.timeout_s): it is silent" in error for error in why)
    counted = {name: stats[f"rewards/{name}"] for name in ("timeouts", "crashes", "retries", "quarantined", "errors")}
    assert counted == {"timeouts": 0, "crashes": 0, "retries": 0, "quarantined": 0, "errors": 2}


def test_a_file_that_another_worker_holds_stops_no_request(tmp_path: Path) -> None:
    """What is answered meanwhile shows that the event loop goes on: as often as it likes, before the lock is let go."""

    async def main() -> list[str]:
        kept = JudgeCache(tmp_path / "judge.sqlite", 100)
        other = sqlite3.connect(tmp_path / "judge.sqlite", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")

        async def ask(body: dict[str, Any], paid: Callable[[int], None]) -> str:
            paid(1)
            return "yes"

        waiting = asyncio.ensure_future(kept.answer({"text": "a"}, ask))
        for _ in range(200):
            await asyncio.sleep(0)
        turns_meanwhile = not waiting.done()
        other.execute("COMMIT")
        return [await waiting, str(turns_meanwhile)]

    assert asyncio.run(main()) == ["yes", "True"]


def test_what_was_answered_is_kept_and_paid_for_once(tmp_path: Path) -> None:
    cache = str(tmp_path / "kept" / "judge.sqlite")
    first = Endpoint("Score: 0.5")
    assert [r.score for r in scored(first, ["a", "b"], cache=cache)] == [0.5, 0.5]
    again = Endpoint("Score: 1")
    assert [r.score for r in scored(again, ["b", "c"], cache=cache)] == [0.5, 1.0]
    assert len(first.requests) == 2 and len(again.requests) == 1
    other = Endpoint("Score: 1")
    assert scored(other, ["a"], cache=cache, options={"top_p": 0.5})[0].score == 1


def test_what_is_asked_several_times_at_once_is_paid_for_once(tmp_path: Path) -> None:
    endpoint = Endpoint("Score: 0.5")
    rewards = scored(endpoint, ["a", "a", "b", "a"], cache=str(tmp_path / "judge.sqlite"))
    assert [r.score for r in rewards] == [0.5] * 4 and len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("says", "tokens", "score", "spent"),
    [
        ("Score: 1 \ud800", "10", 1, 10),
        ("Score: 1", "-1000", 1, 0),
        ("Score: 1", "9" * 30, 1, 2**40),
        ("", "10", None, 30),  # thrice asked, and thrice paid for
    ],
)
def test_every_answer_that_is_paid_for_counts(
    says: str, tokens: str, score: float | None, spent: int, tmp_path: Path
) -> None:
    endpoint, cache = Endpoint(says), tmp_path / "judge.sqlite"
    endpoint.tokens = tokens
    (reward,) = scored(endpoint, ["a"], cache=str(cache), retries=2)
    assert reward.score == score and JudgeCache(cache, 0).spent == spent


def test_unwritable_judge_cache_keeps_scores_and_the_budget(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(body: dict[str, Any], paid: Callable[[int], None]) -> str:
        asked.append(body["text"])
        paid(10)
        return body["text"]

    async def main(most_tokens: int, path: Path) -> list[str | Exception]:
        kept = JudgeCache(path, most_tokens)
        other = sqlite3.connect(path, isolation_level=None)
        full = "CREATE TRIGGER full BEFORE INSERT ON answers BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        found: list[str | Exception] = []
        for text, what in (("a", full), ("b", ""), ("a", ""), ("b", "DROP TRIGGER full"), ("c", "")):
            other.execute(what)
            found += await asyncio.gather(kept.answer({"text": text}, ask), return_exceptions=True)  # type: ignore[arg-type]
        assert kept.spent == 10 * len(asked) and JudgeCache(path, 0).spent == kept.spent, "it was written later"
        return found

    assert asyncio.run(main(0, tmp_path / "free")) == ["a", "b", "a", "b", "c"] and asked == ["a", "b", "c"]
    asked.clear()
    first, second, *rest = asyncio.run(main(100, tmp_path / "bounded"))
    assert first == "a" and "what is spent cannot be written to" in str(second) and "disk is full" in str(second)
    assert rest == ["a", "b", "c"] and asked == ["a", "b", "c"]


def test_no_more_than_the_budget_is_spent(tmp_path: Path) -> None:
    cache = str(tmp_path / "judge.sqlite")
    endpoint = Endpoint("Score: 1")
    for text, expected in (("a", 1), ("b", 1), ("c", None), ("a", 1)):
        (reward,) = scored(endpoint, [text], cache=cache, max_tokens_spent=20)
        assert reward.score == expected
        assert expected is not None or "max_tokens_spent = 20 is used up (20 tokens" in str(reward.error)
    assert len(endpoint.requests) == 2


def test_the_hash_is_of_what_is_asked_and_nothing_else() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "é"}]}
    assert request_hash(body) == request_hash(dict(reversed(list(body.items()))))
    assert request_hash(body) != request_hash(body | {"model": "n"})


def test_judge_cache_of_another_kind_is_refused(tmp_path: Path, made: Callable[..., Any]) -> None:
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE answers (a)")
    (tmp_path / "text").write_text("no database" * 100)
    for name in ("other", "text"):
        with pytest.raises(ValueError, match=f"cache = .*{name} cannot be used"):
            made(url="http://127.0.0.1:1", model="m", cache=str(tmp_path / name))


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"pattern": "score"}, "has no group"),
        ({"pattern": "("}, "no regular expression"),
        ({"lowest": 1}, "is not below"),
        ({"max_tokens_spent": 5}, "needs cache"),
        ({"prompt": "{prompt}"}, "has no {completion}"),
        ({"prompt": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"concurrency": 0}, "concurrency = 0"),
        ({"retries": -1}, "retries = -1"),
        ({"url": "localhost"}, "is no http:// or https:// address"),
    ],
)
def test_wrong_parameters_are_refused_by_name(params: dict[str, Any], why: str, made: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="llm_judge") as error:
        made(**({"url": "http://127.0.0.1:1", "model": "m"} | params))
    assert why in str(error.value)


@pytest.fixture
def made() -> Callable[..., Any]:
    from rollover.rewards.llm_judge import llm_judge

    return llm_judge
