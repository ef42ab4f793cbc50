"""Which role is on which node, while nodes come and go. Pure.

plan.py finds the nodes: first for all roles at once, then for each that has lost its own, beside what all others have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollover.cluster.plan import DoesNotFit, Needs, Node, place

SERVER, POOL, RANK = "server", "reward", "rank"


class Seats:
    """`of`: the node of each role by its name, as in "server 0". DoesNotFit where there is no room for all of them."""

    def __init__(self, needs: Needs, nodes: list[Node], driver: str) -> None:
        self.needs, self.driver = needs, driver
        placement = place(needs, nodes, driver)
        self.of: dict[str, str] = {f"{SERVER} {i}": node for i, node in enumerate(placement.servers)}
        self.of |= {f"{POOL} {i}": node for i, node in enumerate(placement.pools)}
        self.of |= {f"{RANK} {i}": node for i, node in enumerate(placement.ranks)}

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
        if kind == POOL:  # each on a node of its own
            taken = {node for role, node in others.items() if role.startswith(POOL)}
            alive = {node: has for node, has in alive.items() if node not in taken}
        if not alive:
            raise DoesNotFit(kind, "every node has one")
        counts = {"servers": kind == SERVER, "pools": kind == POOL, "ranks": kind == RANK}
        alone = replace(self.needs, controller_gpus=0, **{what: int(is_it) for what, is_it in counts.items()})
        driver = self.driver if self.driver in alive else ""
        found = place(alone, [self._left(has, others) for has in alive.values()], driver)
        return (*found.servers, *found.pools, *found.ranks)[0]

    def _left(self, node: Node, others: Mapping[str, str]) -> Node:
        """What a node has left beside the roles that are there."""
        here = [role.partition(" ")[0] for role, at in others.items() if at == node.name]
        ranks, servers, pools = here.count(RANK), here.count(SERVER), here.count(POOL)
        gpus = self.needs.gpus_of(ranks=ranks, servers=servers, controller=node.name == self.driver)
        cpus = self.needs.cpus_of(ranks=ranks, servers=servers, pools=pools)
        return Node(node.name, max(0, node.gpus - gpus), max(0, node.cpus - cpus))
