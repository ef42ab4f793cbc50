"""Who waits for a place at a server, and gets one in turn. No socket, no clock.

Owns what is counted on each server, and the error after which nobody gets a place any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rollover.engine.remote.generation import Generation
from rollover.engine.remote.routing import Router
from rollover.engine.remote.server import Server


@dataclass(eq=False)
class _Waiting:
    generation: Generation
    avoid: Collection[str]
    place: asyncio.Future[Server | None]


class Line:
    """`servers`: those that there are at the moment, by name; `move` is called when one of them may have room."""

    def __init__(self, router: Router, servers: Mapping[str, Server]) -> None:
        self.router, self._servers = router, servers
        self._waiting: list[_Waiting] = []
        self._error: BaseException | None = None

    async def place(self, generation: Generation, avoid: Collection[str] = ()) -> Server | None:
        """A server with room for it, counted there until `leave`. Waits for one; None if it is interrupted meanwhile.

        The error of `end`, should there never be one again.
        """
        self.check()
        waiting = _Waiting(generation, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.move()
        ending = asyncio.ensure_future(generation.end.wait())
        try:
            await asyncio.wait([waiting.place, ending], return_when=asyncio.FIRST_COMPLETED)
            return waiting.place.result() if waiting.place.done() else None
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.exception() and (server := waiting.place.result()):
                self.leave(server)
            raise
        finally:
            ending.cancel()
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def leave(self, server: Server) -> None:
        """A rollout that was placed there has ended."""
        self.router.end(server.name)
        self.move()

    def move(self) -> None:
        """Place whoever waits, in their order, where there is room."""
        for waiting in list(self._waiting):
            generation = waiting.generation
            if waiting.place.done() or generation.end.is_set():
                continue
            able = [name for name, server in self._servers.items() if _may(server, generation.newest_version)]
            name = self.router.choose(generation.request.rollout_id, able, waiting.avoid)
            if name is not None:
                self.router.begin(generation.request.rollout_id, name)
                self._waiting.remove(waiting)
                waiting.place.set_result(self._servers[name])

    def check(self) -> None:
        """Raises the error of `end`."""
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """Whoever waits, and whoever comes, gets this error. None: whoever waits gets no place."""
        self._error = self._error or error
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.place.done():
                continue
            if error is None:
                each.place.set_result(None)
            else:
                each.place.set_exception(error)


def _may(server: Server, least: int | None) -> bool:
    """Whether a rollout may go there now, whose tokens are of version `least`: versions never go back in a rollout."""
    able = server.serves and not (server.updating or server.sleeps or server.failed.is_set())
    return able and server.version is not None and (least is None or server.version >= least)
