"""Which server a rollout goes to. Pure: told what begins and ends, it answers; no clock, no socket.

a resumed rollout   ──▶ the server that has its tokens, while it has room
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
