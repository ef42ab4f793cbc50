"""The servers of one engine: joining, routing of rollouts, ejection and restart.

    joining ──probe, last weights──▶ serving ──failed, silent, other label──▶ ejected ──back-off──▶ joining
                                     ▲    │  rollouts run only here; those of an ejected server wait for another
               wake, with new weights└────┴sleep: watched, gets no rollout; no server starts meanwhile

workers/pool.py restarts the servers. A server that sends no token must report the label of its weights within
`server_timeout_s`. If none serves for `give_up_s`, all pending calls raise EngineDied.
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
from rollover.weights import WeightUpdate
from rollover.workers.pool import Pool, RequestQueue, set_within


def group_of(rollout_id: str) -> str:
    """Return the group's part of a rollout id. An evaluation's groups have a "-" in theirs (types.episode_name)."""
    return rollout_id.rpartition("-")[0] or rollout_id


logger = logging.getLogger(__name__)

_PROBES_PER_TIMEOUT = 4


class Fleet:
    """The servers of `hosts`, which give their addresses, and start those that are ours.

    `check_longest` raises ServerFailed if a server's longest rollout is too short. `counts`: COUNTS, of all servers.
    """

    def __init__(
        self,
        hosts: Sequence[ServerHost],
        dialect: ServerDialect,
        router: Router,
        settings: ServerSettings,
        give_up_s: float,
        check_longest: Callable[[int], None],
    ) -> None:
        self.hosts, self.router, self.settings = hosts, router, settings
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)
        self._dialect, self._give_up_s, self._check_longest = dialect, give_up_s, check_longest
        self.weights: WeightUpdate | None = None
        """The newest weights."""
        self.num_ejections = 0
        self._servers: dict[str, Server] = {}
        self._queue = RequestQueue(self._choose, lambda server: router.end(server.name))
        self._pool = Pool(hosts, self._serve, self._on_failure, self._queue)
        self._none_since: float | None = None
        self.awake = asyncio.Event()
        """Set while servers may have their GPUs."""
        self.awake.set()
        self._up: set[str] = set()  # names of hosts whose server has started, and has not ended
        self._failures: dict[str, str] = {}  # by host: why its server could not join, or was ejected

    @property
    def serving(self) -> list[Server]:
        return [server for server in self._servers.values() if server.serves]

    def start(self, update: WeightUpdate) -> None:
        """Let the servers join, with these weights."""
        self.weights = update
        if not self._pool.started:
            self._up = {host.name for host in self.hosts}
            self._none_since = time.monotonic()
            self._pool.start(self._check_give_up())

    async def close(self) -> None:
        await self._pool.close()
        for server in list(self._servers.values()):
            await self._disconnect(server, "the engine is closed")
        for host in self.hosts:
            await host.close()
        self._queue.end(None)

    # Rollouts

    async def place(self, state: ExtendState, avoid: Collection[str] = ()) -> Server | None:
        """Wait for a server with room for the rollout, and count it there until `leave`. None if it is interrupted.

        One of `avoid` is chosen only if there is no other. Raises EngineDied if no server serves for too long.
        """
        return await self._queue.place((state, avoid), until=state.end)

    def leave(self, server: Server) -> None:
        """Free the place of a rollout that has ended there."""
        self._queue.leave(server)

    def _choose(self, call: tuple[ExtendState, Collection[str]]) -> Server | None:
        state, avoid = call
        if state.end.is_set():
            return None
        rollout_id, least = state.request.rollout_id, state.newest_version
        able = [name for name, server in self._servers.items() if server.accepts(least)]
        name = self.router.choose(rollout_id, able, avoid)
        if name is None:
            return None
        self.router.begin(rollout_id, name)
        return self._servers[name]

    def working(self) -> set[str]:
        """Return the ids of rollouts that generate now: not those that wait, or whose server loads weights."""
        able = (server for server in self.serving if not (server.updating or server.sleeps))
        return {attempt.state.request.rollout_id for server in able for attempt in server.attempts}

    async def checked(self, server: Server) -> bool:
        """Probe a server after a failed request. Returns whether it still serves."""
        server.failed.set()
        while server.serves and server.failed.is_set():
            await asyncio.sleep(0.01)
        return server.serves

    # Weights

    async def update(self, update: WeightUpdate) -> None:
        """Load these weights into every serving server, and wake it; one that fails is ejected."""
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
        await self._settle()  # a starting server uses its GPU already
        await asyncio.gather(*(self._put_to_sleep(server) for server in self.serving))
        await self._settle()  # wait for servers that were ended

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

    async def _serve(self, host: ServerHost, works: Callable[[], None]) -> str:
        """Connect a server, and watch it until it fails. Returns the reason; "" if it was ejected meanwhile."""
        while not (self.awake.is_set() or host.name in self._up):
            await self.awake.wait()
        self._up.add(host.name)
        try:
            server = Server(host.name, await host.ready(), self._dialect, self.settings, self.counts)
            self._servers[server.name] = server
            await self._join(server)
            works()
            why = await self._watch(server)
        except (ServerFailed, OSError) as error:  # OSError: it could not be started
            return f"it could not join: {error}"
        return why if server.serves else ""

    async def _on_failure(self, host: ServerHost, why: str, is_news: bool) -> None:
        server = self._servers.get(host.name)
        if server is not None and server.serves:
            await self._eject(server, why)
        elif why:
            self._failures[host.name] = why
            if is_news:
                logger.warning(f"the server {host.name}: {why}; it is tried again")
            if server is not None:
                await self._disconnect(server, why)
        await host.discard()
        self._up.discard(host.name)

    async def _join(self, server: Server) -> None:
        """Check a server, load the newest weights, and let it serve. Raises ServerFailed."""
        if (longest := await server.check()) is not None:
            self._check_longest(longest)
        await server.unpause()
        update = None
        while update is not self.weights:  # newer ones may arrive meanwhile
            update = self.weights
            assert update is not None
            await server.load_weights(update)
        server.begin()
        self.router.add(server.name)
        self._none_since = None
        self._queue.move()

    async def _watch(self, server: Server) -> str:
        """Probe the server at intervals. Returns why it can no longer serve."""
        interval_s = self.settings.timeout_s / _PROBES_PER_TIMEOUT
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
            if version_of(label, self.settings.run) not in (before, server.version) and not server.updating:
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
        self._failures[server.name] = why
        logger.warning(f"the server {server.name} is ejected ({why}): its rollouts continue elsewhere, or wait for it")
        await self._disconnect(server, why)

    async def _disconnect(self, server: Server, why: str) -> None:
        await server.end(why)
        self.router.remove(server.name)
        self._servers.pop(server.name, None)
        await server.client.close()
        if not self.serving and self._none_since is None and self.awake.is_set():
            self._none_since = time.monotonic()

    async def _check_give_up(self) -> None:
        """Raise EngineDied, which ends the queue, when none serves for too long."""
        while True:
            await asyncio.sleep(min(1.0, self._give_up_s / 4))
            if self._none_since is not None and time.monotonic() - self._none_since > self._give_up_s:
                whys = "".join(f"\n  {name}: {why}" for name, why in self._failures.items())
                raise EngineDied(
                    f"none of the {len(self.hosts)} servers of [engine] has served for {self._give_up_s:.3g} s"
                    f" (engine.give_up_s){whys}"
                )


class Router:
    """Assigns rollouts to servers, at most `max_running` each. Pure.

    a resumed rollout   ──▶ the server that has its tokens, if it has room
    siblings of a group ──▶ the server that has their prompt, if it has room
    otherwise           ──▶ the server with the fewest rollouts (then the first by name)
    none has room       ──▶ None: the rollout waits

    It remembers the server of each rollout until the rollout is released or the server leaves. num_in_place,
    num_elsewhere: resumed rollouts that came back to their server or not.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self._running: dict[str, int] = {}
        self._sent: dict[str, dict[str, str]] = {}  # group -> {rollout: server}, in order of the last request
        self.num_in_place = self.num_elsewhere = 0

    @property
    def running(self) -> dict[str, int]:
        """Return the number of running rollouts by server."""
        return dict(self._running)

    def add(self, server: str) -> None:
        """Send rollouts to this server from now on."""
        self._running.setdefault(server, 0)

    def remove(self, server: str) -> None:
        """Send no rollouts to this server any more, and forget what it had."""
        self._running.pop(server, None)
        for group, sent in list(self._sent.items()):
            self._keep(group, {rollout_id: place for rollout_id, place in sent.items() if place != server})

    def choose(self, rollout_id: str, among: Iterable[str], avoid: Collection[str] = ()) -> str | None:
        """Return the server for this rollout: one of `among` that has room; None if it has to wait.

        One of `avoid` is chosen only if there is no other.
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
        """Count a rollout that starts on a server."""
        assert self._running[server] < self.max_running, f"{server} has its {self.max_running} rollouts"
        self._running[server] += 1
        sent = self._sent.setdefault(group_of(rollout_id), {})
        before = sent.pop(rollout_id, None)
        sent[rollout_id] = server
        if before is not None:
            self.num_in_place += before == server
            self.num_elsewhere += before != server

    def end(self, server: str) -> None:
        """Count a rollout that ended on a server."""
        if server in self._running:
            self._running[server] -= 1
            assert self._running[server] >= 0, f"more rollouts ended on {server} than began there"

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Forget the servers of rollouts that left."""
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
