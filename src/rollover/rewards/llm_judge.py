"""The reward `llm_judge`: a model behind an OpenAI-compatible endpoint scores the completion.

A SQLite file (`JudgeCache`) stores the answers and the tokens spent, for all workers of a run, resumed runs, and other
runs with the same judge. Without a score (the endpoint fails, the budget is spent, the answer has none) the reward is
missing, never 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rollover.rewards.answers import answer_of
from rollover.rewards.service import Service, TransientFailure
from rollover.text import encodable
from rollover.types import content_text

_PROMPT = """Judge the answer to the question below.

[Question]
{prompt}

[Reference answer]
{answer}

[Answer to judge]
{completion}

How good is the answer, from {lowest} (useless or wrong) to {highest} (right and complete)? Say in a sentence why, then
end with a line "Score: " and the number."""
_PATTERN = r"[Ss]core\**\s*:[\s*]*(-?\d+(?:\.\d+)?)"
_MAX_ANSWER_TOKENS = 2**40  # a larger count of an endpoint is invalid


def llm_judge(  # noqa: PLR0913 - the parameters of the reward
    url: str,
    model: str,
    prompt: str = "",
    pattern: str = _PATTERN,
    lowest: float = 0.0,
    highest: float = 1.0,
    api_key_env: str = "OPENAI_API_KEY",
    options: dict[str, Any] | None = None,
    cache: str = "",
    max_tokens_spent: int = 0,
    timeout_s: float = 20.0,
    concurrency: int = 16,
    retries: int = 4,
    base_dir: str = ".",
) -> Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, float]]]:
    """Return the reward function of an item. ValueError for an invalid parameter.

    url: of the API (https://api.openai.com/v1). prompt: a file, or the text itself, with {prompt}, {completion},
    {answer}, {lowest}, {highest}; other braces stay. pattern: a regular expression, whose last match has the score as
    its first group. lowest, highest: the scale, which is mapped to 0 to 1; a score beyond it is invalid. options:
    further fields of the request (temperature is 0 by default). api_key_env: environment variable of the API key.
    cache: the file. max_tokens_spent: of prompts and answers, as the endpoint counts them, over the file's life; 0 = no
    limit. timeout_s: of one request, within rewards.timeout_s of the group.
    """
    what = "the reward llm_judge"
    if not lowest < highest:
        raise ValueError(f"{what}: lowest = {lowest:g} is not below highest = {highest:g}")
    if max_tokens_spent < 0 or (max_tokens_spent and not cache):
        raise ValueError(f"{what}: max_tokens_spent needs cache, the file in which it is counted, and is not below 0")
    try:
        scored = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{what}: pattern = {pattern!r} is no regular expression ({error})") from None
    if not scored.groups:
        raise ValueError(f"{what}: pattern = {pattern!r} has no group: put the score in parentheses")
    template = _template(prompt, Path(base_dir))
    service = Service(
        what,
        url.rstrip("/") + "/chat/completions",
        timeout_s=timeout_s,
        concurrency=concurrency,
        retries=retries,
        token=os.environ.get(api_key_env, ""),
    )
    judge_cache = JudgeCache(Path(base_dir) / cache, max_tokens_spent) if cache else None

    send = _sender(service)

    async def score(item: dict[str, Any]) -> dict[str, float]:
        values = {
            "prompt": _text(item["prompt"]),
            "completion": item["completion"],
            "answer": "" if (answer := answer_of(item["columns"])) is None else str(answer),
            "lowest": f"{lowest:g}",
            "highest": f"{highest:g}",
        }
        text = re.sub(r"\{(prompt|completion|answer|lowest|highest)\}", lambda m: values[m[1]], template)
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "temperature": 0, **(options or {})}
        said = await (send(body, lambda _: None) if judge_cache is None else judge_cache.answer(body, send))
        return {"score": (_parse_score(said, scored, lowest, highest) - lowest) / (highest - lowest)}

    return score


def _sender(service: Service) -> SendRequest:
    """Return the function that sends a request to the judge and returns its text."""

    async def send(body: dict[str, Any], paid: Callable[[int], None]) -> str:
        def read(answer: bytes) -> str:
            said, num_tokens = _parse_answer(answer)
            paid(num_tokens)  # also for an answer without text
            if not said:
                raise TransientFailure("an answer without a text")
            return said

        return await service.post(body, read)

    return send


def _template(prompt: str, base_dir: Path) -> str:
    """Return the prompt template, given as text or file. ValueError if it has no {completion}."""
    text = prompt or _PROMPT
    if prompt and "{" not in prompt and "\n" not in prompt:
        try:
            text = (base_dir / prompt).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the reward llm_judge: prompt = {prompt} cannot be read ({error})") from None
    if "{completion}" not in text:
        raise ValueError("the reward llm_judge: the prompt has no {completion}, so every answer would have one score")
    return text


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text: its messages one after the other, images by name."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return content_text(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


def _parse_answer(answer: bytes) -> tuple[str, int]:
    """Return the answer's text ("" without one) and the number of tokens that the request took."""
    try:
        parsed = json.loads(answer)
        said = parsed["choices"][0]["message"]["content"]
        num_tokens = int((parsed.get("usage") or {}).get("total_tokens") or 0)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise TransientFailure("an answer that is none") from None
    return encodable(said) if isinstance(said, str) else "", min(max(num_tokens, 0), _MAX_ANSWER_TOKENS)


def _parse_score(said: str, pattern: re.Pattern[str], lowest: float, highest: float) -> float:
    """Return the score in an answer. ValueError without one, or beyond the scale."""
    found = [match.group(1) for match in pattern.finditer(said)]
    try:
        score = float(found[-1])
    except (IndexError, ValueError, TypeError):
        raise ValueError(f"the judge's answer holds no score: {said[-200:]!r}") from None
    if not lowest <= score <= highest:
        raise ValueError(f"the judge's score {score:g} is not between {lowest:g} and {highest:g}")
    return score


logger = logging.getLogger(__name__)

_WAIT_S = 5.0  # for another worker's write to the file
_KEEP = (
    "INSERT INTO answers (hash, said, tokens) VALUES (?, ?, ?) ON CONFLICT (hash) DO UPDATE SET"
    " said = COALESCE(said, excluded.said), tokens = tokens + excluded.tokens"
)

SendRequest = Callable[[dict[str, Any], Callable[[int], None]], Awaitable[str]]
"""(request, on_tokens) -> answer of the judge; `on_tokens` gets the tokens of each answer, valid or not."""


class BudgetSpent(RuntimeError):
    """The judge's token budget is spent."""


def request_hash(body: dict[str, Any]) -> str:
    """Return the hash of a request, equal in all processes and on all machines."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class JudgeCache:
    """Answers of a judge, in a SQLite file at `path` that several workers and runs may have open.

    Equal requests are sent once, also concurrent ones. `max_tokens`: budget of all answers; 0 = no limit. Answers that
    cannot be written stay in memory until they can, so that no score is lost. The file is used in a thread, because a
    write may wait for another worker's. ValueError for an unusable file.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._path, self._max_tokens = path, max_tokens
        self._in_flight: dict[str, asyncio.Task[str]] = {}
        self._unwritten: list[tuple[str, str | None, int]] = []  # hash, answer, tokens
        self._warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judged")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (hash TEXT PRIMARY KEY, said TEXT, tokens INTEGER)")
            self._file.execute("SELECT hash, said, tokens FROM answers LIMIT 1")  # it may be another program's table
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"the reward llm_judge: cache = {path} cannot be used ({error})") from None

    async def answer(self, body: dict[str, Any], send: SendRequest) -> str:
        """Return the stored answer to a request, or send it. BudgetSpent; exceptions of `send` pass through."""
        key = request_hash(body)
        if key not in self._in_flight:
            self._in_flight[key] = asyncio.ensure_future(self._request(key, body, send))
            self._in_flight[key].add_done_callback(lambda _: self._in_flight.pop(key))
        return await asyncio.shield(self._in_flight[key])

    @property
    def spent(self) -> int:
        """Total tokens of all answers."""
        (kept,) = self._file.execute("SELECT COALESCE(SUM(tokens), 0) FROM answers").fetchone()
        return kept + sum(num for _, _, num in self._unwritten)

    # Private

    async def _request(self, key: str, body: dict[str, Any], send: SendRequest) -> str:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        answer = await in_thread(self._stored, key)
        if answer is not None:
            return answer
        await in_thread(self._check_budget)
        said, tokens = None, [0]
        try:
            said = await send(body, tokens.append)
            return said
        finally:
            if said is not None or sum(tokens):
                await in_thread(self._keep, key, said, sum(tokens))

    # In its thread

    def _stored(self, key: str) -> str | None:
        held = next((said for of, said, _ in self._unwritten if of == key and said is not None), None)
        if held is not None:
            return held
        row = self._file.execute("SELECT said FROM answers WHERE hash = ?", (key,)).fetchone()
        return row[0] if row else None

    def _keep(self, key: str, said: str | None, tokens: int) -> None:
        self._unwritten.append((key, said, tokens))
        self._write()

    def _check_budget(self) -> None:
        """Raise BudgetSpent once the budget is spent. Requests in flight may exceed it."""
        if not self._max_tokens:
            return
        if error := self._write():
            raise BudgetSpent(f"max_tokens_spent: what is spent cannot be written to {self._path} ({error})")
        if (spent := self.spent) >= self._max_tokens:
            raise BudgetSpent(f"max_tokens_spent = {self._max_tokens} is used up ({spent} tokens, {self._path})")

    def _write(self) -> sqlite3.Error | None:
        """Write the pending answers. Return the error that stopped it, or None."""
        while self._unwritten:
            try:
                self._file.execute(_KEEP, self._unwritten[0])
            except sqlite3.Error as error:
                if not self._warned:
                    self._warned = True
                    logger.warning(f"the reward llm_judge: {self._path} cannot be written: {error}")
                return error
            self._unwritten.pop(0)
        return None
