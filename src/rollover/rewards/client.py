"""Our end of a reward worker's process (rewards/child.py runs in it): which functions it has loaded, and its replies.

Decides nothing: what a failure means, RewardWorker knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollover.config import RewardsConfig
from rollover.rewards.process import WorkerProcess
from rollover.rewards.registry import Item, Mode, Result
from rollover.rewards.travel import packed
from rollover.rewards.wire import BadReply, results_of


class RewardClient:
    """The process is started by `load`, and again after it was killed or has died. What cannot be answered in time, or
    is answered wrongly, raises; the caller kills the process then, as a reply may still come."""

    def __init__(self, rewards: RewardsConfig, base_dir: str, pack: Callable[[str], dict[str, Any]] = packed) -> None:
        self._config, self._pack = rewards, pack
        self.modes: dict[str, Mode] = {}
        """How the functions are called that are loaded in the present process, by their specs."""
        memory_bytes = int(rewards.memory_gb * 1e9)
        self._process = WorkerProcess("the reward worker", "rollover.rewards.child", base_dir, memory_bytes)

    @property
    def pid(self) -> int | None:
        """Id of the process that runs functions; None before it has loaded one."""
        return self._process.pid

    @property
    def silent_s(self) -> float | None:
        """Seconds since the process was started or last replied; None without one."""
        return self._process.silent_s

    async def load(self, spec: str) -> Result | None:
        """Start the process and load the function, each if need be. Returns the failure if it cannot be loaded.

        TimeoutError after rewards.startup_timeout_s; WorkerDied; BadReply.
        """
        if not self._process.alive:
            self.modes = {}
            await self._process.start()
        if spec in self.modes:
            return None
        try:
            message = {"op": "load", "spec": spec, **self._pack(spec)}
        except ValueError as error:  # of an object that cannot be copied
            return {"error": str(error)}
        found: dict[str, Any] = {}

        def take(reply: dict[str, Any]) -> bool:
            found.update(reply)
            return True

        await self._process.ask(message, take, self._config.startup_timeout_s)
        if not {"error", "mode"} & found.keys() or not isinstance(found.get("pid"), int):
            raise BadReply("said something that is no reply")
        if "error" in found:
            return found
        self.modes[spec] = found["mode"]
        return None

    async def score(self, spec: str, items: list[Item], take: Callable[[dict[int, Result]], bool]) -> None:
        """Score items with a loaded function. `take` gets the results as they come, by the index of their item, until
        it returns True: the rest is not waited for, and the process has to be killed.

        TimeoutError after rewards.timeout_s (mode "each": of each item); WorkerDied; BadReply.
        """
        mode, missing = self.modes[spec], set(range(len(items)))

        def take_reply(reply: dict[str, Any]) -> bool:
            results = results_of(reply, mode, missing)
            missing.difference_update(results)
            return take(results) or not missing

        message = {"op": "score", "spec": spec, "items": items, "limit_s": self._config.timeout_s}
        await self._process.ask(message, take_reply, self._config.timeout_s, limit_each=mode == "each")

    async def kill(self) -> None:
        """End the process, and wait until it is gone, whoever began to end it."""
        self.modes = {}
        await self._process.kill()
