"""The servers of one engine: who takes part, who waits for room, who is given up and comes back.

    joining ──probe, last weights──▶ serving ──failed, silent, other label──▶ out ──back-off──▶ joining
                                     ▲    │  rollouts are placed here alone; those of a lost server wait for the next
               wake, with new weights└────┴sleep: watched, gets no rollout; no server starts meanwhile

Owns which server serves, and with which weights; workers/pool.py starts them again. A server that sends no token must
say what its weights are called within `server_timeout_s`. When none serves for `give_up_s`, whoever waits gets
EngineDied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rollover.engine.protocol import EngineDied
from rollover.engine.remote.client import ServerFailed
from rollover.engine.remote.dialect import ServerDialect, version_of
from rollover.engine.remote.extend_state import ExtendState
from rollover.engine.remote.hosts import ServerHost
from rollover.engine.remote.server import COUNTS, Server, ServerSettings
from rollover.weights.protocol import WeightUpdate
from rollover.workers.pool import Pool, RequestQueue, set_within


def group_of(rollout_id: str) -> str:
    """Its group's name: rollout ids begin with it, and an evaluation's groups have a "-" in theirs
    (types.episode_name)."""
    return rollout_id.rpartition("-")[0] or rollout_id


class Router:
    """Counts what runs on each server, at most `max_running` each, and remembers where each rollout was sent, until it
    is released or that server is gone. A group is at home where its last rollout was sent.

    num_in_place, num_elsewhere: of the rollouts that were sent again, those that came back to their server or not.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self._running: dict[str, int] = {}
        self._sent: dict[str, dict[str, str]] = {}  # group -> server of each of its rollouts; the last one sent last
        self.num_in_place = self.num_elsewhere = 0

    @property
    def running(self) -> dict[str, int]:
        """How many rollouts run on each server."""
        return dict(self._running)

    def add(self, server: str) -> None:
        """This server takes rollouts from now on."""
        self._running.setdefault(server, 0)

    def remove(self, server: str) -> None:
        """This server is gone: what ran there is elsewhere, or waits."""
        self._running.pop(server, None)
        for group, sent in list(self._sent.items()):
            self._keep(group, {rollout_id: place for rollout_id, place in sent.items() if place != server})

    def choose(self, rollout_id: str, among: Iterable[str], avoid: Collection[str] = ()) -> str | None:
        """The server for this rollout, of those `among` that are known here and have room; None: it has to wait.

        One of `avoid` is chosen only where there is no other among them at all.
        """
        able = [server for server in among if server in self._running]
        able = [server for server in able if server not in avoid] or able
        free = [server for server in able if self._running[server] < self.max_running]
        if not free:
            return None
        sent = self._sent.get(group_of(rollout_id), {})
        homes = (sent.get(rollout_id), next(reversed(sent.values()), None))
        least = min(free, key=lambda server: (self._running[server], server))
        return next((home for home in homes if home in free), least)

    def begin(self, rollout_id: str, server: str) -> None:
        """The rollout runs there."""
        assert self._running[server] < self.max_running, f"{server} has its {self.max_running} rollouts"
        self._running[server] += 1
        sent = self._sent.setdefault(group_of(rollout_id), {})
        before = sent.pop(rollout_id, None)
        sent[rollout_id] = server
        if before is not None:
            self.num_in_place += before == server
            self.num_elsewhere += before != server

    def end(self, server: str) -> None:
        """A rollout that ran there does so no longer."""
        if server in self._running:
            self._running[server] -= 1
            assert self._running[server] >= 0, f"more rollouts ended on {server} than began there"

    def release(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts will not come again."""
        for rollout_id in rollout_ids:
            group = group_of(rollout_id)
            sent = self._sent.get(group, {})
            sent.pop(rollout_id, None)
            self._keep(group, sent)

    def _keep(self, group: str, sent: dict[str, str]) -> None:
        if sent:
            self._sent[group] = sent
        else:
            self._sent.pop(group, None)


logger = logging.getLogger(__name__)

_PROBES_PER_TIMEOUT = 4


class Fleet:
    """`hosts` give the servers' addresses, and start those that are ours.

    `check_longest` raises ServerFailed for a server that takes so many tokens of a rollout at most, if that is not
    enough. `counts`: COUNTS, of all servers.
    """

    def __init__(
        self,
        hosts: Sequence[ServerHost],
        dialect: ServerDialect,
        router: Router,
        terms: ServerSettings,
        give_up_s: float,
        check_longest: Callable[[int], None],
    ) -> None:
        self.hosts, self.router, self.terms = hosts, router, terms
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)
        self._dialect, self._give_up_s, self._check_longest = dialect, give_up_s, check_longest
        self.weights: WeightUpdate | None = None
        """The newest weights: nobody serves with others for long."""
        self.num_ejections = 0
        self._servers: dict[str, Server] = {}
        self._queue = RequestQueue(self._choose, lambda server: router.end(server.name))
        self._pool = Pool(hosts, self._life, self._on_failure, self._queue)
        self._none_since: float | None = None
        self.awake = asyncio.Event()
        """Set while servers may have their GPUs."""
        self.awake.set()
        self._up: set[str] = set()  # names of hosts whose server has started, and has not ended
        self._why_not: dict[str, str] = {}  # by host: why its server could not join, or was given up

    @property
    def serving(self) -> list[Server]:
        return [server for server in self._servers.values() if server.serves]

    def start(self, update: WeightUpdate) -> None:
        """Let the servers join, with these weights."""
        self.weights = update
        if not self._pool.started:
            self._up = {host.name for host in self.hosts}
            self._none_since = time.monotonic()
            self._pool.start(self._mind_the_end())

    async def close(self) -> None:
        await self._pool.close()
        for server in list(self._servers.values()):
            await self._part_with(server, "the engine is closed")
        for host in self.hosts:
            await host.close()
        self._queue.end(None)

    # Rollouts

    async def place(self, generation: ExtendState, avoid: Collection[str] = ()) -> Server | None:
        """A server with room for it, counted there until `leave`. Waits for one; None if it is interrupted meanwhile.

        One of `avoid` only where there is no other at all. EngineDied, should there never be one again.
        """
        return await self._queue.place((generation, avoid), until=generation.end)

    def leave(self, server: Server) -> None:
        """A rollout that was placed there has ended."""
        self._queue.leave(server)

    def _choose(self, call: tuple[ExtendState, Collection[str]]) -> Server | None:
        generation, avoid = call
        if generation.end.is_set():
            return None
        rollout_id, least = generation.request.rollout_id, generation.newest_version
        able = [name for name, server in self._servers.items() if server.takes(least)]
        name = self.router.choose(rollout_id, able, avoid)
        if name is None:
            return None
        self.router.begin(rollout_id, name)
        return self._servers[name]

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

    async def update(self, update: WeightUpdate) -> None:
        """Every server that serves has these weights when this returns, awake; one that could not take them serves no
        more."""
        self._queue.check()
        self.weights = update
        self.awake.set()
        if not self.serving and self._none_since is None:
            self._none_since = time.monotonic()
        await asyncio.gather(*(self._update(server, update) for server in self.serving))

    async def _update(self, server: Server, update: WeightUpdate) -> None:
        try:
            await (server.wake(update) if server.sleeps else server.load_weights(update))
        except ServerFailed as error:
            await self._eject(server, f"it did not take the weights of version {update.version}: {error}")
        self._queue.move()

    # Sleep

    async def sleep(self) -> None:
        """Free the GPUs of all servers until `update`. A server that cannot sleep is ended; none starts meanwhile."""
        self._queue.check()
        self.awake.clear()
        self._none_since = None
        await self._settle()  # a server that starts has its GPU already
        await asyncio.gather(*(self._put_to_sleep(server) for server in self.serving))
        await self._settle()  # a server that did not fall asleep ends

    async def _settle(self) -> None:
        """Wait until each server that is up serves."""
        while self._up - {server.name for server in self.serving}:
            self._queue.check()
            await asyncio.sleep(0.01)

    async def _put_to_sleep(self, server: Server) -> None:
        try:
            await server.sleep()
        except ServerFailed as error:
            await self._eject(server, f"it did not fall asleep: {error}")

    # One server

    async def _life(self, host: ServerHost, works: Callable[[], None]) -> str:
        """Let it join, and watch it until it fails. Returns why; "" where it was given up meanwhile."""
        while not (self.awake.is_set() or host.name in self._up):
            await self.awake.wait()
        self._up.add(host.name)
        try:
            server = Server(host.name, await host.ready(), self._dialect, self.terms, self.counts)
            self._servers[server.name] = server
            await self._join(server)
            works()
            why = await self._watch(server)
        except (ServerFailed, OSError) as error:  # the second where it could not even be started
            return f"it could not join: {error}"
        return why if server.serves else ""

    async def _on_failure(self, host: ServerHost, why: str, is_news: bool) -> None:
        server = self._servers.get(host.name)
        if server is not None and server.serves:
            await self._eject(server, why)
        elif why:
            self._why_not[host.name] = why
            if is_news:
                logger.warning(f"the server {host.name}: {why}; it is tried again")
            if server is not None:
                await self._part_with(server, why)
        await host.discard()
        self._up.discard(host.name)

    async def _join(self, server: Server) -> None:
        """It answers, and has the newest weights: from now on it serves. ServerFailed if it cannot."""
        if (longest := await server.check()) is not None:
            self._check_longest(longest)
        await server.unpause()
        update = None
        while update is not self.weights:  # newer ones may come meanwhile
            update = self.weights
            assert update is not None
            await server.load_weights(update)
        server.begin()
        self.router.add(server.name)
        self._none_since = None
        self._queue.move()

    async def _watch(self, server: Server) -> str:
        """Returns why it can serve no more, as soon as that is known."""
        interval_s = self.terms.timeout_s / _PROBES_PER_TIMEOUT
        while server.serves:
            failed = await set_within(server.failed, interval_s)
            if not failed and (server.updating or server.silent_s < interval_s):
                continue
            if server.updating:
                await asyncio.sleep(0.01)
                continue
            if not server.serves:
                break
            before = server.version
            try:
                label = await server.label()
            except ServerFailed as error:
                return str(error)
            if version_of(label, self.terms.run) not in (before, server.version) and not server.updating:
                server.has_other_weights = True
                restarted = label == self._dialect.first_label
                why = "it was started again" if restarted else "another run uses it, too: give each its own"
                return f"it has the weights {label!r}, which it was not given: {why}"
            server.failed.clear()
            self._queue.move()
        return ""

    async def _eject(self, server: Server, why: str) -> None:
        if not server.serves:
            return
        self.num_ejections += 1
        self._why_not[server.name] = why
        logger.warning(f"the server {server.name} is given up ({why}): its rollouts go on elsewhere, or wait for it")
        await self._part_with(server, why)

    async def _part_with(self, server: Server, why: str) -> None:
        await server.end(why)
        self.router.remove(server.name)
        self._servers.pop(server.name, None)
        await server.client.close()
        if not self.serving and self._none_since is None and self.awake.is_set():
            self._none_since = time.monotonic()

    # The end

    async def _mind_the_end(self) -> None:
        """EngineDied for everyone when none serves for too long."""
        while True:
            await asyncio.sleep(min(1.0, self._give_up_s / 4))
            if self._none_since is not None and time.monotonic() - self._none_since > self._give_up_s:
                whys = "".join(f"\n  {name}: {why}" for name, why in self._why_not.items())
                raise EngineDied(
                    f"none of the {len(self.hosts)} servers of [engine] has served for {self._give_up_s:.3g} s"
                    f" (engine.give_up_s){whys}"
                )
