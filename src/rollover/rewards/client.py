"""Our end of a reward worker's process (rewards/child.py runs in it): which functions it has loaded, and what of its
replies is believed.

Decides nothing: what a failure means, RewardWorker knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollover.config import RewardsConfig
from rollover.functions import is_score
from rollover.processes import child_environment
from rollover.rewards.registry import MAX_REPLY_BYTES, Item, Mode, Result
from rollover.rewards.travel import packed
from rollover.workers.framing import BadMessage
from rollover.workers.worker import Worker


class RewardClient:
    """The process is started by `load`, and again after it was killed or has died. What cannot be answered in time, or
    is answered wrongly, raises; the caller kills the process then, as a reply may still come."""

    def __init__(self, rewards: RewardsConfig, base_dir: str, pack: Callable[[str], dict[str, Any]] = packed) -> None:
        self._config, self._pack = rewards, pack
        self.modes: dict[str, Mode] = {}
        """How the functions are called that are loaded in the present process, by their specs."""
        self._base_dir = base_dir
        self._worker: Worker | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process that runs functions; None before it has loaded one."""
        return self._pid if self._worker is not None and self._worker.alive else None

    @property
    def silent_s(self) -> float | None:
        """Seconds since the process was started or last replied; None without one."""
        alive = self._worker is not None and self._worker.alive
        return time.monotonic() - self._worker.last_reply if self._worker is not None and alive else None

    async def load(self, spec: str) -> Result | None:
        """Start the process and load the function, each if need be. Returns the failure if it cannot be loaded.

        TimeoutError after rewards.startup_timeout_s; WorkerDied; BadMessage.
        """
        worker = self._worker
        if worker is None or not worker.alive:
            await self.kill()
            worker = self._worker = Worker(
                "the reward worker",
                "rollover.rewards.child",
                self._base_dir,
                int(self._config.memory_gb * 1e9),
                kept=True,
                environment=child_environment(OMP_NUM_THREADS="1"),  # the trainer owns the cores
                max_bytes=MAX_REPLY_BYTES,
            )
        if spec in self.modes:
            return None
        try:
            message = {"op": "load", "spec": spec, **self._pack(spec)}
        except ValueError as error:  # of an object that cannot be copied
            return {"error": str(error)}
        found = await worker.request(message, limit_s=self._config.startup_timeout_s)
        if not {"error", "mode"} & found.keys() or not isinstance(found.get("pid"), int):
            raise BadMessage("sent an invalid message")
        self._pid = found["pid"]
        if "error" in found:
            return found
        self.modes[spec] = found["mode"]
        return None

    async def score(self, spec: str, items: list[Item], take: Callable[[dict[int, Result]], bool]) -> None:
        """Score items with a loaded function. `take` gets the results as they come, by the index of their item, until
        it returns True: the rest is not waited for, and the process has to be killed.

        TimeoutError after rewards.timeout_s (mode "each": of each item); WorkerDied; BadMessage.
        """
        assert self._worker is not None, "the function is loaded"
        mode, missing = self.modes[spec], set(range(len(items)))

        def take_reply(reply: dict[str, Any]) -> bool:
            results = results_of(reply, mode, missing)
            missing.difference_update(results)
            return take(results) or not missing

        message = {"op": "score", "spec": spec, "items": items, "limit_s": self._config.timeout_s}
        await self._worker.request(message, take_reply, self._config.timeout_s, limit_each=mode == "each")

    async def kill(self) -> None:
        """End the process, and wait until it is gone, whoever began to end it."""
        self.modes, self._pid = {}, None
        if self._worker is not None:
            await self._worker.killed()


def results_of(reply: dict[str, Any], mode: str, missing: set[int]) -> dict[int, dict[str, Any]]:
    """The results in a reply, by the index of their item: each {"score", "extras"} and maybe "shaping", finite numbers,
    and "texts", or {"error"}.

    BadMessage unless they are those of `missing` items: one of them, in mode "batch" all.
    """
    if mode == "batch":
        results = [reply] * len(missing) if "error" in reply else reply.get("results")
        return dict(zip(sorted(missing), _checked(results, len(missing)), strict=True))
    index = reply.get("index")
    if not isinstance(index, int) or index not in missing:
        raise BadMessage("scored another sample")
    return {index: _checked([reply.get("result")], 1)[0]}


def _checked(results: Any, num: int) -> list[dict[str, Any]]:
    if not isinstance(results, list) or len(results) != num or not all(map(_is_result, results)):
        raise BadMessage("sent invalid results")
    return results


def _is_result(result: Any) -> bool:
    if not isinstance(result, dict):
        return False
    if "error" in result:
        return isinstance(result["error"], str)
    parts, texts = (result.get("extras"), result.get("shaping", {})), result.get("texts", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        return False
    return _is_number(result.get("score")) and all(
        isinstance(part, dict) and all(map(_is_number, part.values())) for part in parts
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and is_score(value)
