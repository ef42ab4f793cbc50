"""Which role is on which node, while nodes come and go. Pure.

plan.py finds the nodes: first for all roles at once, then for each that has lost its own, beside what all others have.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from rollover.cluster.plan import DoesNotFit, Needs, Node, place

SERVER, POOL, RANK = "server", "reward", "rank"


class Assignment:
    """`of`: the node of each role by its name, as in "server 0". DoesNotFit where there is no room for all of them."""

    def __init__(self, needs: Needs, nodes: list[Node], driver: str) -> None:
        self.needs, self.driver = needs, driver
        placement = place(needs, nodes, driver)
        self.of: dict[str, str] = {f"{SERVER} {i}": node for i, node in enumerate(placement.servers)}
        self.of |= {f"{POOL} {i}": node for i, node in enumerate(placement.pools)}
        self.of |= {f"{RANK} {i}": node for i, node in enumerate(placement.ranks)}
        self._first: dict[str, tuple[str, int]] = {}  # node and first GPU of each role, where they have them in turns

    def find(self, name: str, alive: Mapping[str, Node]) -> str:
        """The node that the role is on, if that lives; else one that has room, on which it is from now on. DoesNotFit
        where none has."""
        if self.of[name] not in alive:
            self.of[name] = self._other(name, alive)
        return self.of[name]

    def _other(self, name: str, alive: Mapping[str, Node]) -> str:
        kind = name.partition(" ")[0]
        if not alive:
            raise DoesNotFit(kind, "there is no node")
        others = {role: node for role, node in self.of.items() if role != name}
        if self.needs.colocate and kind != POOL:  # ranks and servers have their places in turns
            other_kind = RANK if kind == SERVER else SERVER
            others = {role: node for role, node in others.items() if not role.startswith(other_kind)}
        if kind == POOL:  # each on a node of its own
            taken = {node for role, node in others.items() if role.startswith(POOL)}
            alive = {node: has for node, has in alive.items() if node not in taken}
        if not alive:
            raise DoesNotFit(kind, "every node has one")
        counts = {"servers": kind == SERVER, "pools": kind == POOL, "ranks": kind == RANK}
        alone = replace(self.needs, controller_gpus=0, **{what: int(is_it) for what, is_it in counts.items()})
        driver = self.driver if self.driver in alive else ""
        found = place(alone, [self._left(kind, has, others) for has in alive.values()], driver)
        return (*found.servers, *found.pools, *found.ranks)[0]

    def gpus(self, name: str) -> range:
        """Which of the GPUs that the roles of its node have in turns are the role's: the first that no other of its
        kind has. They stay its own while it stays on the node."""
        node, kind = self.of[name], name.partition(" ")[0]
        at, first = self._first.get(name, ("", 0))
        size = self.needs.server_gpus if kind == SERVER else self.needs.rank_gpus
        if at != node:
            taken = {first for role, (at, first) in self._first.items() if at == node and role.startswith(kind)}
            first = next(i for i in itertools.count(0, max(1, size)) if i not in taken)
            self._first[name] = node, first
        return range(first, first + size)

    def gpus_on(self, node: str) -> int:
        """GPUs of the node that its roles have, of both kinds in turns."""
        kinds = [role.partition(" ")[0] for role, at in self.of.items() if at == node]
        controller = node == self.driver
        return self.needs.gpus_of(ranks=kinds.count(RANK), servers=kinds.count(SERVER), controller=controller)

    def _left(self, kind: str, node: Node, others: Mapping[str, str]) -> Node:
        """What a node has left for a role of `kind` beside the roles that are there."""
        here = [role.partition(" ")[0] for role, at in others.items() if at == node.name]
        ranks, servers, pools = here.count(RANK), here.count(SERVER), here.count(POOL)
        has_trainer = node.name == self.driver and not (self.needs.colocate and kind == SERVER)
        gpus = self.needs.gpus_of(ranks=ranks, servers=servers, controller=has_trainer)
        cpus = self.needs.cpus_of(ranks=ranks, servers=servers, pools=pools)
        return Node(node.name, max(0, node.gpus - gpus), max(0, node.cpus - cpus))
