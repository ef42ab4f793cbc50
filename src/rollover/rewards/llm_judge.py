"""The reward `llm_judge`: a model behind an OpenAI-compatible endpoint is asked for a score of the completion.

What it answered is kept in a SQLite file (judge_cache.py): a run that goes on, or another with the same judge, pays for
nothing twice. The file counts what was spent, too, over all workers of a run. Where there is no score (the endpoint
fails, the budget is spent, the answer holds none) the reward is missing, never 0.
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
from rollover.rewards.service import Again, Service
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
_MOST_TOKENS = 2**40  # of one answer: what an endpoint says beyond is no count


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
    """The function of an item. ValueError for a parameter that is wrong.

    url: of the API (https://api.openai.com/v1). prompt: a file, or the text itself, with {prompt}, {completion},
    {answer}, {lowest}, {highest} in it; other braces stay. pattern: a regular expression whose last match has the score
    as its first group. lowest, highest: the scale, which becomes 0 to 1; a score beyond it is none. options: further
    fields of the request (temperature is 0 unless given). api_key_env: the variable of the environment that has the
    key. cache: the file. max_tokens_spent: of prompts and answers as the endpoint counts them, over the file's life;
    0 = no limit. timeout_s: of one request, within rewards.timeout_s of the group's.
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
    kept = JudgeCache(Path(base_dir) / cache, max_tokens_spent) if cache else None

    asked = _asker(service)

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
        said = await (asked(body, lambda _: None) if kept is None else kept.said(body, asked))
        return {"score": (_score_in(said, scored, lowest, highest) - lowest) / (highest - lowest)}

    return score


def _asker(service: Service) -> Ask:
    """Asks the judge by this service for a text."""

    async def asked(body: dict[str, Any], paid: Callable[[int], None]) -> str:
        def read(answer: bytes) -> str:
            said, num_tokens = _said(answer)
            paid(num_tokens)  # also where it says nothing
            if not said:
                raise Again("an answer without a text")
            return said

        return await service.post(body, read)

    return asked


def _template(prompt: str, base_dir: Path) -> str:
    """The text itself, or that of the file it names. ValueError where the completion is not in it."""
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
    """A prompt as the judge reads it: its messages one after the other, images by their names."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return content_text(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


def _said(answer: bytes) -> tuple[str, int]:
    """Its text, empty where it has none, and how many tokens the request took."""
    try:
        parsed = json.loads(answer)
        said = parsed["choices"][0]["message"]["content"]
        num_tokens = int((parsed.get("usage") or {}).get("total_tokens") or 0)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise Again("an answer that is none") from None
    return encodable(said) if isinstance(said, str) else "", min(max(num_tokens, 0), _MOST_TOKENS)


def _score_in(said: str, pattern: re.Pattern[str], lowest: float, highest: float) -> float:
    """ValueError where there is none within the scale."""
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

Ask = Callable[[dict[str, Any], Callable[[int], None]], Awaitable[str]]
"""What the judge answers to a request; the second argument hears how many tokens each answer took, good or not."""


class BudgetSpent(RuntimeError):
    """No more may be asked."""


def hash_of(body: dict[str, Any]) -> str:
    """Of all that is asked: the same text in any process, on any machine."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class JudgeCache:
    """The answers in the file at `path`. `most_tokens`: that all of them may take; 0 = no limit. ValueError where the
    file cannot be used."""

    def __init__(self, path: Path, most_tokens: int) -> None:
        self._path, self._most_tokens = path, most_tokens
        self._under_way: dict[str, asyncio.Task[str]] = {}
        self._unwritten: list[tuple[str, str | None, int]] = []  # hash, answer, tokens
        self._told = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judged")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (hash TEXT PRIMARY KEY, said TEXT, tokens INTEGER)")
            self._file.execute("SELECT hash, said, tokens FROM answers LIMIT 1")  # it may be another program's table
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"the reward llm_judge: cache = {path} cannot be used ({error})") from None

    async def said(self, body: dict[str, Any], ask: Ask) -> str:
        """What it said to this before, else what it says now. BudgetSpent where it may not be asked; what `ask` raises
        passes through."""
        key = hash_of(body)
        if key not in self._under_way:
            self._under_way[key] = asyncio.ensure_future(self._said(key, body, ask))
            self._under_way[key].add_done_callback(lambda _: self._under_way.pop(key))
        return await asyncio.shield(self._under_way[key])

    @property
    def spent(self) -> int:
        """Tokens of all answers so far."""
        (kept,) = self._file.execute("SELECT COALESCE(SUM(tokens), 0) FROM answers").fetchone()
        return kept + sum(num for _, _, num in self._unwritten)

    # Private

    async def _said(self, key: str, body: dict[str, Any], ask: Ask) -> str:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        answer = await in_thread(self._answer, key)
        if answer is not None:
            return answer
        await in_thread(self._check_budget)
        said, tokens = None, [0]
        try:
            said = await ask(body, tokens.append)
            return said
        finally:
            if said is not None or sum(tokens):
                await in_thread(self._keep, key, said, sum(tokens))

    # In its thread

    def _answer(self, key: str) -> str | None:
        held = next((said for of, said, _ in self._unwritten if of == key and said is not None), None)
        if held is not None:
            return held
        row = self._file.execute("SELECT said FROM answers WHERE hash = ?", (key,)).fetchone()
        return row[0] if row else None

    def _keep(self, key: str, said: str | None, tokens: int) -> None:
        self._unwritten.append((key, said, tokens))
        self._write()

    def _check_budget(self) -> None:
        """What is under way in other calls comes on top."""
        if not self._most_tokens:
            return
        if error := self._write():
            raise BudgetSpent(f"max_tokens_spent: what is spent cannot be written to {self._path} ({error})")
        if (spent := self.spent) >= self._most_tokens:
            raise BudgetSpent(f"max_tokens_spent = {self._most_tokens} is used up ({spent} tokens, {self._path})")

    def _write(self) -> sqlite3.Error | None:
        """What is held, until the file takes no more; why it does not."""
        while self._unwritten:
            try:
                self._file.execute(_KEEP, self._unwritten[0])
            except sqlite3.Error as error:
                if not self._told:
                    self._told = True
                    logger.warning(f"the reward llm_judge: {self._path} cannot be written: {error}")
                return error
            self._unwritten.pop(0)
        return None
