"""The servers of one engine: who takes part, who waits for room, who is given up and comes back.

    joining ──probe, last weights──▶ serving ──failed, silent, other label──▶ out ──back-off──▶ joining
                                     ▲    │  rollouts are placed here alone; those of a lost server wait for the next
               wake, with new weights└────┴sleep: watched, gets no rollout; no server starts meanwhile

Owns one task a server. A server that sends no token must answer /weight_info within `server_timeout_s` (/health is
answered while the engine behind it hangs). When none serves for `give_up_s`, whoever waits gets EngineDied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.back_off import BackOff
from rollover.ending import end_tasks
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.delivery import Deliveries, resume, sleep, wake
from rollover.engine.remote.endpoints import check_generates, lacking
from rollover.engine.remote.hosts import Host
from rollover.engine.remote.line import Line
from rollover.engine.remote.routing import Router
from rollover.engine.remote.server import Server
from rollover.engine.remote.wire import FIRST_LABEL, Refused, ServerFailed, longest_of, version_of
from rollover.weights.protocol import Parcel

logger = logging.getLogger(__name__)

_PROBES_PER_TIMEOUT = 4
_LATE = 0.25  # a time-out that is noticed by this share too late says that the event loop stood still


@dataclass(frozen=True)
class Limits:
    """Seconds; and `check_longest` raises ServerFailed for a server that takes so many tokens of a rollout at most, if
    that is not enough."""

    server_timeout_s: float
    give_up_s: float
    check_longest: Callable[[int], None]


class Fleet:
    """`hosts` give the servers' addresses, and start those that are ours."""

    def __init__(self, hosts: Sequence[Host], router: Router, deliveries: Deliveries, limits: Limits) -> None:
        self.hosts, self.deliveries, self.limits = hosts, deliveries, limits
        self.parcel: Parcel | None = None
        """The newest weights: nobody serves with others for long."""
        self.num_ejections = 0
        self._servers: dict[str, Server] = {}
        self.line = Line(router, self._servers)
        self._tasks: list[asyncio.Task[None]] = []
        self._none_since: float | None = None
        self.awake = asyncio.Event()
        """Set while servers may have their GPUs."""
        self.awake.set()
        self._up: set[str] = set()  # names of hosts whose server has started, and has not ended
        self._why_not: dict[str, str] = {}  # by host: why its server could not join, or was given up

    @property
    def serving(self) -> list[Server]:
        return [server for server in self._servers.values() if server.serves]

    def start(self, parcel: Parcel) -> None:
        """Let the servers join, with these weights."""
        self.parcel = parcel
        if not self._tasks:
            self._up = {host.name for host in self.hosts}
            self._none_since = time.monotonic()
            self._tasks = [asyncio.ensure_future(self._keep(host)) for host in self.hosts]
            self._tasks.append(asyncio.ensure_future(self._mind_the_end()))
            for task in self._tasks:
                task.add_done_callback(self._on_end)

    async def close(self) -> None:
        await end_tasks(self._tasks)
        for server in list(self._servers.values()):
            await self._part_with(server, "the engine is closed")
        for host in self.hosts:
            await host.close()
        self.line.end(None)

    # Rollouts

    def working(self) -> set[str]:
        """The rollouts that a server is at: not those that wait for one, or whose server is given new weights."""
        able = (server for server in self.serving if not (server.updating or server.sleeps))
        return {attempt.generation.request.rollout_id for server in able for attempt in server.attempts}

    async def checked(self, server: Server) -> bool:
        """A request failed there: whether it serves all the same, once it was looked at."""
        server.failed.set()
        while server.serves and server.failed.is_set():
            await asyncio.sleep(0.01)
        return server.serves

    # Weights

    async def update(self, parcel: Parcel) -> None:
        """Every server that serves has these weights when this returns, awake; one that could not take them serves no
        more."""
        self.line.check()
        self.parcel = parcel
        self.awake.set()
        if not self.serving and self._none_since is None:
            self._none_since = time.monotonic()
        await asyncio.gather(*(self._update(server, parcel) for server in self.serving))

    async def _update(self, server: Server, parcel: Parcel) -> None:
        slept, limit_s = server.sleeps, self.limits.server_timeout_s
        try:
            if slept:
                await wake(server, "weights", limit_s)
            await self._deliver(server, parcel)
            if slept:
                await wake(server, "kv_cache", limit_s)
                server.last_token = time.monotonic()
                server.sleeps = False
        except ServerFailed as error:
            await self._eject(server, f"it did not take the weights of version {parcel.version}: {error}")
        self.line.move()

    # Sleep

    async def sleep(self) -> None:
        """Free the GPUs of all servers until `update`. A server that cannot sleep is ended; none starts meanwhile."""
        self.line.check()
        self.awake.clear()
        self._none_since = None
        await self._settle()  # a server that starts has its GPU already
        await asyncio.gather(*(self._put_to_sleep(server) for server in self.serving))
        await self._settle()  # a server that did not fall asleep ends

    async def _settle(self) -> None:
        """Wait until each server that is up serves."""
        while self._up - {server.name for server in self.serving}:
            self.line.check()
            await asyncio.sleep(0.01)

    async def _put_to_sleep(self, server: Server) -> None:
        try:
            await sleep(server, self.limits.server_timeout_s)
        except ServerFailed as error:
            await self._eject(server, f"it did not fall asleep: {error}")

    async def _deliver(self, server: Server, parcel: Parcel) -> None:
        """ServerFailed if it failed, or refused them twice."""
        try:
            await self.deliveries.deliver(server, parcel.version, parcel.message)
        except Refused:
            await self.deliveries.deliver(server, parcel.version, parcel.message)

    # One server

    async def _keep(self, host: Host) -> None:
        """For ever: let it join, watch it until it fails, part with it, wait a little."""
        back_off = BackOff()
        while True:
            while not (self.awake.is_set() or host.name in self._up):
                await self.awake.wait()
            self._up.add(host.name)
            back_off.begin()
            server = None
            try:
                server = await host.ready()
                self._servers[server.name] = server
                await self._join(server)
                back_off.works()
                why = await self._watch(server)
            except (ServerFailed, OSError) as error:  # the second where it could not even be started
                why = f"it could not join: {error}"
            news = back_off.is_news(why)
            there = server is not None and self._servers.get(server.name) is server
            if server is not None and there and server.serves:
                await self._eject(server, why)
            elif server is None or there:
                self._why_not[host.name] = why
                if news:
                    logger.warning(f"the server {host.name}: {why}; it is tried again")
                if server is not None:
                    await self._part_with(server, why)
            await host.discard()
            self._up.discard(host.name)
            await asyncio.sleep(back_off.pause_s())

    async def _join(self, server: Server) -> None:
        """It answers, and has the newest weights: from now on it serves. ServerFailed if it cannot."""
        limit_s = self.limits.server_timeout_s
        await self._answers(server, "/weight_info")
        models = await self._answers(server, "/v1/models")
        await check_generates(server.client, limit_s)
        longest = longest_of(models)
        if longest is not None:
            self.limits.check_longest(longest)
        await resume(server, limit_s)
        parcel = None
        while parcel is not self.parcel:  # newer ones may come meanwhile
            parcel = self.parcel
            assert parcel is not None
            await self._deliver(server, parcel)
        server.last_token = time.monotonic()
        server.failed.clear()
        server.serves = True
        self.line.router.add(server.name)
        self._none_since = None
        self.line.move()

    async def _watch(self, server: Server) -> str:
        """Returns why it can serve no more, as soon as that is known."""
        interval_s = self.limits.server_timeout_s / _PROBES_PER_TIMEOUT
        while server.serves:
            try:
                await asyncio.wait_for(server.failed.wait(), interval_s)
            except TimeoutError:
                if server.updating or time.monotonic() - server.last_token < interval_s:
                    continue
            if server.updating:
                await asyncio.sleep(0.01)
                continue
            if not server.serves:
                break
            before = server.version
            try:
                label = (await self._answers(server, "/weight_info")).get("weight_version")
            except ServerFailed as error:
                return str(error)
            if version_of(str(label), self.deliveries.run) not in (before, server.version) and not server.updating:
                why = "it was started again" if label == FIRST_LABEL else "another run uses it, too: give each its own"
                return f"it has the weights {label!r}, which it was not given: {why}"
            server.failed.clear()
            self.line.move()
        return ""

    async def _answers(self, server: Server, path: str) -> dict[str, Any]:
        """Asked again where the time was up because this process did something else."""
        limit_s = self.limits.server_timeout_s
        for _ in range(3):
            began = time.monotonic()
            try:
                said = await server.client.get(path, limit_s=limit_s)
            except Refused as error:
                raise ServerFailed(lacking(path, error) or str(error)) from error
            except ServerFailed:
                if time.monotonic() - began < limit_s * (1 + _LATE):
                    raise
                continue
            if not isinstance(said, dict):
                raise ServerFailed(f"{path} was answered by what is no JSON object: {str(said)[:200]}")
            return said
        raise ServerFailed(f"{path} was not answered")

    async def _eject(self, server: Server, why: str) -> None:
        if not server.serves:
            return
        self.num_ejections += 1
        self._why_not[server.name] = why
        logger.warning(f"the server {server.name} is given up ({why}): its rollouts go on elsewhere, or wait for it")
        await self._part_with(server, why)

    async def _part_with(self, server: Server, why: str) -> None:
        server.serves = False
        server.failed.set()  # `_watch` and `checked` look
        for attempt in list(server.attempts):
            attempt.lose(why)
        while server.attempts:
            await asyncio.sleep(0)
        self.line.router.remove(server.name)
        self._servers.pop(server.name, None)
        await server.client.close()
        if not self.serving and self._none_since is None and self.awake.is_set():
            self._none_since = time.monotonic()

    # The end

    async def _mind_the_end(self) -> None:
        """EngineDied for everyone when none serves for too long."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.give_up_s / 4))
            if self._none_since is not None and time.monotonic() - self._none_since > self.limits.give_up_s:
                whys = "".join(f"\n  {name}: {why}" for name, why in self._why_not.items())
                raise EngineDied(
                    f"none of the {len(self.hosts)} servers of [engine] has served for {self.limits.give_up_s:.3g} s"
                    f" (engine.give_up_s){whys}"
                )

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """These tasks end by an error alone, which is that of whoever asks for anything from then on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.line.end(error)
