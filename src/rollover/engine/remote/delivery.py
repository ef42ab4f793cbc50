"""New weights for one server: verified while it generates, swapped while it is paused, so that versions change there.

verify ─▶ pause(keep) ─▶ start ─▶ update ─▶ finish(label) ─▶ stamp ─▶ resume
                                    └ refused: resume under the old ones, no finish
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollover.engine.remote.server import Server
from rollover.engine.remote.wire import Refused, ServerFailed, label_of

_VERIFY = "rollover_verify"
_LEFT_OPEN = "left open"
_LOOK_AGAIN_S = 0.05
_FINISHES_S = 3.0


@dataclass
class Deliveries:
    """How weights are handed over: `clear_cache` gives up what is cached under older ones. No call may take longer than
    `limit_s`. Counts the seconds that servers stood still for it, and what they refused."""

    run: str
    clear_cache: bool
    limit_s: float
    paused_s: float = 0.0
    num_refused: int = 0

    async def deliver(self, server: Server, version: int, message: Mapping[str, Any]) -> None:
        """The server has this parcel's weights when this returns. ServerFailed if it has not: Refused if it goes on
        under those that it had, else what it does is not known."""
        server.updating = True
        try:
            info = {"path": message["path"], "sha256": message["sha256"]}
            await self._verify(server, info)
            await self._swap(server, version, info)
        except Refused:
            self.num_refused += 1
            raise
        finally:
            server.updating = False

    async def _verify(self, server: Server, info: Mapping[str, Any]) -> None:
        """A server that cannot do it ahead does it when it swaps."""
        body = {"method": _VERIFY, "args": [info["path"], info["sha256"]]}
        deadline = time.monotonic() + self.limit_s
        while True:
            try:
                answer = await server.client.post("/collective_rpc", body, limit_s=self.limit_s)
            except Refused:
                return
            results = answer.get("results", []) if isinstance(answer, dict) else []
            for said in results:
                if isinstance(said, str) and said.startswith("refused"):
                    raise Refused(f"it cannot use the weights in {info['path']}: {said}")
            if "verifying" not in results or time.monotonic() > deadline:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _swap(self, server: Server, version: int, info: Mapping[str, Any]) -> None:
        client, limit_s = server.client, self.limit_s
        began = time.monotonic()
        await _done(client.post("/pause", limit_s=limit_s, mode="keep", clear_cache=str(self.clear_cache).lower()))
        left_open = False
        try:
            left_open = await self._start(server)
            await client.post("/update_weights", {"update_info": dict(info)}, limit_s=limit_s)
        except Refused as error:
            if left_open:  # what weights it has is not known
                raise ServerFailed(str(error)) from error
            await _done(client.post("/resume", limit_s=limit_s))
            raise
        finally:
            self.paused_s += time.monotonic() - began
        began = time.monotonic()
        label = {"weight_version": label_of(self.run, version)}
        await _done(client.post("/finish_weight_update", label, limit_s=limit_s))
        server.resumed_with(version, cleared=self.clear_cache)
        await _done(client.post("/resume", limit_s=limit_s))
        self.paused_s += time.monotonic() - began

    async def _start(self, server: Server) -> bool:
        """Begin an update, and return whether another was left open by a client that was killed. That is finished
        first, under a label of no run: whether the server has its weights is not known. One that lives finishes its own
        within _FINISHES_S."""
        client, deadline = server.client, time.monotonic() + _FINISHES_S
        while True:
            try:
                await client.post("/start_weight_update", limit_s=self.limit_s)
                return False
            except Refused as error:
                refusal = error
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        try:
            await client.post("/finish_weight_update", {"weight_version": _LEFT_OPEN}, limit_s=self.limit_s)
        except Refused:  # none was open
            raise refusal from None
        await _done(client.post("/start_weight_update", limit_s=self.limit_s))
        return True


async def _done(call: Any) -> None:
    """A call whose refusal is a failure: the server is then in no state that is known."""
    try:
        await call
    except Refused as error:
        raise ServerFailed(str(error)) from error


async def resume(server: Server, limit_s: float) -> None:
    """Whoever was here before may have left it paused."""
    with contextlib.suppress(Refused):
        await server.client.post("/resume", limit_s=limit_s)


# Sleep: GPUs that servers and trainer have in turns


async def sleep(server: Server, limit_s: float) -> None:
    """Free the server's GPU memory, weights included: the next ones replace them. ServerFailed if it stays awake."""
    server.sleeps = True
    await _done(server.client.post("/sleep", limit_s=limit_s, level="2"))


async def wake(server: Server, tags: str, limit_s: float) -> None:
    """Allocate the server's memory for `tags` ("weights", "kv_cache") again. ServerFailed if it cannot."""
    await _done(server.client.post("/wake_up", limit_s=limit_s, tags=tags))
