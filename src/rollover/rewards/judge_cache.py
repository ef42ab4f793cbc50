"""What a judge answered, in a SQLite file that all workers of a run, and other runs, have open (rewards/llm_judge.py).

Owns what was answered to what, how many tokens that took, and that nothing is asked twice, also where several want to
know it at a time. Where the file cannot be written, what was paid for is held here until it can: no score is lost.
The file is used in a thread of its own: who waits for another worker's write holds up no request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

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
