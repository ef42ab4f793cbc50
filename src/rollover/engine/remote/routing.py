"""Which server a rollout goes to. Pure: told what begins and ends, it answers; no clock, no socket.

siblings of a group ──▶ the server that has their prompt, while it has room
else, or without one ──▶ the server with the fewest rollouts (then the first by name)
none has room        ──▶ None: the rollout waits
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def group_of(rollout_id: str) -> str:
    """Its group's name: rollout ids begin with it, and an evaluation's groups have a "-" in theirs
    (types.episode_name)."""
    return rollout_id.rpartition("-")[0] or rollout_id


class Router:
    """Counts what runs on each server, at most `max_running` each, and remembers where each group is at home.

    A group is at home where its last rollout was sent, until all of its rollouts that were sent anywhere are released,
    or that server is gone.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self._running: dict[str, int] = {}
        self._home: dict[str, str] = {}
        self._known: dict[str, set[str]] = {}  # group -> its rollouts that were sent, and not released

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
        self._home = {group: home for group, home in self._home.items() if home != server}

    def choose(self, rollout_id: str, among: Iterable[str], avoid: Collection[str] = ()) -> str | None:
        """The server for this rollout, of those `among` that are known here and have room; None: it has to wait.

        One of `avoid` is chosen only where there is no other among them at all.
        """
        able = [server for server in among if server in self._running]
        able = [server for server in able if server not in avoid] or able
        free = [server for server in able if self._running[server] < self.max_running]
        if not free:
            return None
        home = self._home.get(group_of(rollout_id))
        return home if home in free else min(free, key=lambda server: (self._running[server], server))

    def begin(self, rollout_id: str, server: str) -> None:
        """The rollout runs there."""
        assert self._running[server] < self.max_running, f"{server} has its {self.max_running} rollouts"
        self._running[server] += 1
        group = group_of(rollout_id)
        self._home[group] = server
        self._known.setdefault(group, set()).add(rollout_id)

    def end(self, server: str) -> None:
        """A rollout that ran there does so no longer."""
        if server in self._running:
            self._running[server] -= 1
            assert self._running[server] >= 0, f"more rollouts ended on {server} than began there"

    def release(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts will not come again."""
        for rollout_id in rollout_ids:
            group = group_of(rollout_id)
            if group in self._known:
                self._known[group].discard(rollout_id)
                if not self._known[group]:
                    del self._known[group]
                    self._home.pop(group, None)
