"""What an Episode does once, however often its function is run: a side effect, a random choice."""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollover.functions import as_json, described


class Once:
    """Of one Episode, for all runs of its function: a run that failed may have left a call under way (as asyncio.gather
    does), and the next one waits for that. `keep` is told of what is new."""

    def __init__(self, keep: Callable[[str, Any], None]) -> None:
        self._keep = keep
        self._kept: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def know(self, kept: Mapping[str, Any]) -> None:
        """What an earlier process kept, by name."""
        self._kept.update(kept)

    async def __call__(self, name: str, function: Callable[[], Awaitable[Any] | Any]) -> Any:
        """What `function` returned when it was called under this name, now or before. What it raises is raised, and
        nothing is kept then."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"{described(name)} is no name of what is done once: write a text")
        async with self._lock(name):
            what = f"what once({name!r}, ...) keeps"
            if name not in self._kept:
                value = function()
                value = as_json(await value if inspect.isawaitable(value) else value, what)
                self._keep(name, value)
                self._kept[name] = value
            return as_json(self._kept[name], what)  # a copy: nobody changes what is kept

    # Private

    def _lock(self, name: str) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # nothing goes on of what an earlier loop ran
            self._loop = loop
            self._locks.clear()
        return self._locks[name]
