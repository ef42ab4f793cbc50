"""Which node has which role: nodes and what the roles need in, role -> node out, or what is missing. Pure.

    controller     on the driver's node; the trainer, and an engine without servers, are in it
    reward pools   one on each of `pools` nodes: where they cost no place of others, first nodes without GPUs
    ranks          on as few nodes as possible, in the order of the nodes
    servers        each whole on one node, always on the one with the most room left

Every rank takes one GPU, or one place among the CPUs; every server takes `server_gpus` of one node, or one such place.
With cluster.colocate servers take those of ranks and trainer, which they have in turns: each is laid as if alone.
So a placement is found whenever there is one, and a further node never makes one impossible: servers of one size that
fit at all leave as many single GPUs, however they are laid. Owns no process and asks no machine.

`Assignment` keeps the nodes of roles while nodes come and go: it places all roles at once, then each role that lost its
node, beside all others.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollover.config import Config
from rollover.config.cluster import ClusterConfig, num_ranks

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Node:
    """A machine with its GPUs and CPUs."""

    name: str
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Needs:
    """Roles to be placed. `*_gpus` = 0: on CPUs, `process_cpus` each (0: not counted)."""

    servers: int = 0
    server_gpus: int = 0
    ranks: int = 0
    rank_gpus: int = 0
    controller_gpus: int = 0
    pools: int = 1
    pool_cpus: int = 1
    process_cpus: int = 0
    colocate: bool = False

    @classmethod
    def from_config(cls, config: Config) -> Needs:
        """Return the needs of a configuration with cluster.type = "ray"."""
        cluster, engine = config.cluster, config.engine
        trains_on_gpu = _takes_gpu(config.model.device, cluster)
        samples_on_gpu = _takes_gpu(engine.device or config.model.device, cluster)
        remote, ranks = engine.kind == "remote", num_ranks(config)
        return cls(
            servers=engine.num_servers if remote else 0,
            server_gpus=cluster.gpus_per_server if samples_on_gpu else 0,
            ranks=ranks,
            rank_gpus=int(trains_on_gpu),
            controller_gpus=len(devices_of_controller(config)),
            pools=0 if config.run.train_on_recorded else cluster.reward_nodes,
            pool_cpus=config.rewards.num_workers or 1,
            process_cpus=cluster.cpus_per_process,
            colocate=cluster.colocate,
        )

    def gpus_of(self, *, ranks: int, servers: int, controller: bool) -> int:
        """Return the GPUs of these roles of one node."""
        of_training = ranks * self.rank_gpus + controller * self.controller_gpus
        return self._combined(of_training, servers * self.server_gpus)

    def cpus_of(self, *, ranks: int, servers: int, pools: int) -> int:
        """Return the counted CPUs of these roles of one node: reward workers, ranks and servers without GPUs."""
        processes = self._combined(0 if self.rank_gpus else ranks, 0 if self.server_gpus else servers)
        return pools * self.pool_cpus + processes * self.process_cpus

    def _combined(self, of_training: int, of_servers: int) -> int:
        """Return the places of both: shared in turns (colocate), or side by side."""
        return max(of_training, of_servers) if self.colocate else of_training + of_servers


def devices_of_controller(config: Config) -> set[str]:
    """Return the numbers of the visible GPUs on which the controller itself computes."""
    engine, found = config.engine, set[str]()
    sampling = engine.device or config.model.device
    if config.backend.type == "tinker":
        return found
    if not num_ranks(config) and _takes_gpu(config.model.device, config.cluster):
        found.add(_index(config.model.device))
    if engine.kind != "remote" and _takes_gpu(sampling, config.cluster):
        found.add(_index(sampling))
    return found


def _takes_gpu(device: str, cluster: ClusterConfig) -> bool:
    return device.startswith("cuda") or (device == "auto" and cluster.gpus_per_node > 0)


def _index(device: str) -> str:
    """Return the number of a device among a process's GPUs: `auto` and `cuda` are the first."""
    return device.partition(":")[2] or "0"


@dataclass(frozen=True)
class Placement:
    """Names of the nodes of `ranks`, `servers` and `pools`, by number. `driver`: node of the controller.

    `nodes` in the order in which ranks and servers are numbered: the driver's first, then by name (node-2 < node-10).
    """

    needs: Needs
    nodes: tuple[Node, ...]
    driver: str
    ranks: tuple[str, ...]
    servers: tuple[str, ...]
    pools: tuple[str, ...]

    def gpus_taken(self, node: str) -> int:
        """Return the number of used GPUs of the node."""
        return self.needs.gpus_of(
            ranks=self.ranks.count(node), servers=self.servers.count(node), controller=node == self.driver
        )

    def cpus_taken(self, node: str) -> int:
        """Return the number of used CPUs of the node that are counted."""
        return self.needs.cpus_of(
            ranks=self.ranks.count(node), servers=self.servers.count(node), pools=self.pools.count(node)
        )


class DoesNotFit(ValueError):
    """No placement exists. `role`: the first without a place: controller, reward pool, server or rank."""

    def __init__(self, role: str, message: str) -> None:
        super().__init__(message)
        self.role = role


def place(needs: Needs, nodes: Sequence[Node], driver: str = "") -> Placement:
    """Place `needs` on `nodes`, whatever their order. DoesNotFit if there is no placement.

    `driver`: the name of the node that the command runs on; "": the first by name. ValueError for two nodes of one
    name, or an unknown driver.
    """
    names = [node.name for node in nodes]
    if len(set(names)) < len(names) or not nodes or (driver and driver not in names):
        raise ValueError(f"the nodes {names} need names of their own, the driver's ({driver!r}) among them")
    driver = driver or min(names, key=_natural)
    ordered = sorted(nodes, key=lambda node: (node.name != driver, _natural(node.name)))
    gpus = [node.gpus for node in ordered]
    if gpus[0] < needs.controller_gpus:
        raise DoesNotFit(
            "controller",
            f"the controller, which trains or generates itself, needs {many(needs.controller_gpus, 'GPU')} on its node"
            f" {driver}, which has {gpus[0]}",
        )
    all_gpus = list(gpus)
    gpus[0] -= needs.controller_gpus
    pools = _pools(needs, ordered)
    cpu_places = [_places(needs, node.cpus - needs.pool_cpus * (i in pools)) for i, node in enumerate(ordered)]
    for_ranks = gpus if needs.rank_gpus else cpu_places
    for_servers = gpus if needs.server_gpus else cpu_places
    if needs.colocate:
        for_servers = all_gpus if needs.server_gpus else list(cpu_places)
    ranks_of, servers_of = _distribute(needs, for_ranks, for_servers)
    return Placement(
        needs=needs,
        nodes=tuple(ordered),
        driver=driver,
        ranks=_node_names(ranks_of, ordered),
        servers=_node_names(servers_of, ordered),
        pools=tuple(ordered[i].name for i in sorted(pools)),
    )


def _pools(needs: Needs, nodes: Sequence[Node]) -> set[int]:
    """Return the indices of the nodes that have a reward pool."""
    if not needs.pools:
        return set()
    on_cpus = (needs.ranks and not needs.rank_gpus) or (needs.servers and not needs.server_gpus)

    def cost(i: int) -> int:
        """Places of ranks and servers that it takes away."""
        cpus = nodes[i].cpus
        return _places(needs, cpus) - _places(needs, cpus - needs.pool_cpus) if on_cpus else 0

    fit = [i for i, node in enumerate(nodes) if node.cpus >= needs.pool_cpus]
    if len(fit) < needs.pools:
        most = max(node.cpus for node in nodes)
        raise DoesNotFit(
            "reward pool",
            f"{many(needs.pools, 'reward pool')} (cluster.reward_nodes) of {many(needs.pool_cpus, 'CPU')}"
            f" (rewards.num_workers), each on a node of its own: {len(fit)} of {many(len(nodes), 'node')} have"
            f" {'them' if needs.pool_cpus > 1 else 'one'}, the largest has {most}:"
            f" {_missing(needs.pools - len(fit), 'node')}",
        )
    fit.sort(key=lambda i: (cost(i), nodes[i].gpus > 0, -nodes[i].cpus, i))
    return set(fit[: needs.pools])


def _places(needs: Needs, cpus: int) -> int:
    """Return the number of ranks and servers without a GPU that these CPUs hold."""
    return cpus // needs.process_cpus if needs.process_cpus else needs.ranks + needs.servers


def _distribute(needs: Needs, for_ranks: list[int], for_servers: list[int]) -> tuple[list[int], list[int]]:
    """Return the number of ranks and of servers of each node. One list for both: they share its places."""
    shared = for_ranks is for_servers
    what, size = ("GPU", needs.server_gpus) if needs.server_gpus else ("place", 1)
    room = sum(offer // size for offer in for_servers)
    if room < needs.servers:
        raise DoesNotFit(
            "server",
            f"{many(needs.servers, 'server')} (engine.num_servers) of {_wanted(needs.server_gpus, needs)}, each on one"
            f" node: there is room for {room}, so {_missing((needs.servers - room) * size, what)}",
        )
    taken = needs.servers * size if shared else 0
    left = sum(for_ranks) - taken
    if left < needs.ranks:
        beside = f" beside {many(needs.servers, 'server')}" if taken else ""
        raise DoesNotFit(
            "rank",
            f"{many(needs.ranks, 'rank')} (backend.num_ranks) of {_wanted(needs.rank_gpus, needs)}: there is room for"
            f" {left}{beside}, so {_missing(needs.ranks - left, 'GPU' if needs.rank_gpus else 'place')}",
        )
    ranks = _packed(for_ranks, needs.ranks, size if shared else 1, needs.servers if shared else 0)
    if shared:
        for_servers = [offer - taken for offer, taken in zip(for_servers, ranks, strict=True)]
    return ranks, _spread(for_servers, needs.servers, size, ranks)


def _packed(offers: list[int], number: int, size: int, kept: int) -> list[int]:
    """Place `number` units on few nodes, so that `kept` blocks of `size` still have room. A solution must exist.

    While units are left: the smallest node that takes all of them, else the one that takes the most.
    """
    spare = sum(offer // size for offer in offers) - kept  # blocks that may be broken
    found = [0] * len(offers)
    unused = set(range(len(offers)))
    while number:
        most = {i: offers[i] - size * max(0, offers[i] // size - spare) for i in unused}
        enough = [i for i in unused if most[i] >= number]
        chosen = min(enough, key=lambda i: (offers[i], i)) if enough else max(unused, key=lambda i: (most[i], -i))
        found[chosen] = min(number, most[chosen])
        spare -= offers[chosen] // size - (offers[chosen] - found[chosen]) // size
        number -= found[chosen]
        unused.remove(chosen)
    return found


def _spread(offers: list[int], number: int, size: int, ranks: list[int]) -> list[int]:
    """Place each block on the node with the most room, then the fewest roles, the driver's last."""
    found = [0] * len(offers)
    best = [(-offer, ranks[i], i == 0, i) for i, offer in enumerate(offers)]
    heapq.heapify(best)
    for _ in range(number):
        offer, roles, is_driver, i = best[0]
        heapq.heapreplace(best, (offer + size, roles + 1, is_driver, i))
        found[i] += 1
    return found


def _node_names(counts: Sequence[int], nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for count, node in zip(counts, nodes, strict=True) for _ in range(count))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in a name by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _wanted(gpus: int, needs: Needs) -> str:
    if gpus:
        return f"{many(gpus, 'GPU')} each"
    return f"{many(needs.process_cpus, 'CPU')} each (cluster.cpus_per_process)"


def _missing(number: int, noun: str) -> str:
    return f"{many(number, noun)} {'is' if number == 1 else 'are'} missing"


def many(number: int, noun: str) -> str:
    """Format `1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# From a configuration alone


def nodes_of(cluster: ClusterConfig, cores: int, number: int = 0) -> list[Node]:
    """Return the nodes of [cluster], or `number` like them. `cores`: CPUs of each unless configured."""
    cpus = cluster.cpus_per_node or cores
    return [Node(f"node-{i + 1}", cluster.gpus_per_node, cpus) for i in range(number or cluster.num_nodes)]


def placement_of(config: Config, cores: int) -> Placement:
    """Return the placement on the nodes of [cluster].

    DoesNotFit describes what is missing, and how many such nodes are enough. `cores`: CPUs of a node unless configured.
    With cluster.type = "none" everything is on THIS_MACHINE, which has room for everything.
    """
    needs = Needs.from_config(config)
    if config.cluster.type == "none":
        needs = replace(needs, server_gpus=0, rank_gpus=0, controller_gpus=0, pool_cpus=0)
        return place(needs, [Node(THIS_MACHINE, 0, cores)])
    nodes = nodes_of(config.cluster, cores)
    try:
        return place(needs, nodes)
    except DoesNotFit as error:
        enough = _min_nodes(needs, config.cluster, cores)
        advice = f"{enough:,} such nodes are enough (cluster.num_nodes)" if enough else "More such nodes do not help"
        raise DoesNotFit(error.role, f"[cluster] has {described(nodes)}: {error}. {advice}") from None


def _min_nodes(needs: Needs, cluster: ClusterConfig, cores: int) -> int:
    """Return the smallest number of nodes like those of [cluster] that hold `needs`; 0: none does."""

    def fits(number: int) -> bool:
        try:
            place(needs, nodes_of(cluster, cores, number))
        except DoesNotFit:
            return False
        return True

    low, high = cluster.num_nodes, cluster.num_nodes + needs.ranks + needs.servers + needs.pools + 1
    if not fits(high):
        return 0
    while high - low > 1:  # low is too few
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def described(nodes: Sequence[Node]) -> str:
    """Format `2 nodes of 8 GPUs and 64 CPUs`."""
    kinds = Counter((node.gpus, node.cpus) for node in nodes)
    gpus_and = {gpus: f"{many(gpus, 'GPU')} and " if gpus else "" for gpus, _ in kinds}
    return ", ".join(
        f"{many(number, 'node')} of {gpus_and[gpus]}{many(cpus, 'CPU')}" for (gpus, cpus), number in kinds.items()
    )


SERVER, POOL, RANK = "server", "reward", "rank"


class Assignment:
    """Node of each role by its name, as in "server 0": `node_of`. DoesNotFit if there is no room for all of them."""

    def __init__(self, needs: Needs, nodes: list[Node], driver: str) -> None:
        self.needs, self.driver = needs, driver
        placement = place(needs, nodes, driver)
        self.node_of: dict[str, str] = {f"{SERVER} {i}": node for i, node in enumerate(placement.servers)}
        self.node_of |= {f"{POOL} {i}": node for i, node in enumerate(placement.pools)}
        self.node_of |= {f"{RANK} {i}": node for i, node in enumerate(placement.ranks)}
        self._first: dict[str, tuple[str, int]] = {}  # node and first GPU of each role that shares GPUs in turns

    def find(self, name: str, alive: Mapping[str, Node]) -> str:
        """Return the role's node; if that is not alive, another one with room, which is its node from now on.

        DoesNotFit if there is no room.
        """
        if self.node_of[name] not in alive:
            self.node_of[name] = self._replacement(name, alive)
        return self.node_of[name]

    def _replacement(self, name: str, alive: Mapping[str, Node]) -> str:
        kind = name.partition(" ")[0]
        if not alive:
            raise DoesNotFit(kind, "there is no node")
        others = {role: node for role, node in self.node_of.items() if role != name}
        if self.needs.colocate and kind != POOL:  # ranks and servers share their places in turns
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
        found = place(alone, [self._remaining(kind, has, others) for has in alive.values()], driver)
        return (*found.servers, *found.pools, *found.ranks)[0]

    def gpus(self, name: str) -> range:
        """Return the role's GPUs among those that the roles of its node share in turns.

        They are the first that no other role of its kind has, and stay its own while it stays on the node.
        """
        node, kind = self.node_of[name], name.partition(" ")[0]
        at, first = self._first.get(name, ("", 0))
        size = self.needs.server_gpus if kind == SERVER else self.needs.rank_gpus
        if at != node:
            taken = {first for role, (at, first) in self._first.items() if at == node and role.startswith(kind)}
            first = next(i for i in itertools.count(0, max(1, size)) if i not in taken)
            self._first[name] = node, first
        return range(first, first + size)

    def gpus_on(self, node: str) -> int:
        """Return the number of the node's GPUs that its roles have; shared ones count once."""
        kinds = [role.partition(" ")[0] for role, at in self.node_of.items() if at == node]
        controller = node == self.driver
        return self.needs.gpus_of(ranks=kinds.count(RANK), servers=kinds.count(SERVER), controller=controller)

    def _remaining(self, kind: str, node: Node, others: Mapping[str, str]) -> Node:
        """Return what a node has left for a role of `kind` beside the `others` on it."""
        here = [role.partition(" ")[0] for role, at in others.items() if at == node.name]
        ranks, servers, pools = here.count(RANK), here.count(SERVER), here.count(POOL)
        has_trainer = node.name == self.driver and not (self.needs.colocate and kind == SERVER)
        gpus = self.needs.gpus_of(ranks=ranks, servers=servers, controller=has_trainer)
        cpus = self.needs.cpus_of(ranks=ranks, servers=servers, pools=pools)
        return Node(node.name, max(0, node.gpus - gpus), max(0, node.cpus - cpus))
