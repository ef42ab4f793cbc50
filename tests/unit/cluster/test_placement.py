"""cluster/plan.py: who is put where, as properties of any nodes and needs, and by examples."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollover.cluster.plan import DoesNotFit, Needs, Node, Placement, place

sizes = st.integers(0, 8)
node_lists = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4).map(
    lambda each: [Node(f"node-{i}", gpus, cpus) for i, (gpus, cpus) in enumerate(each)]
)
needs_of_any = st.builds(
    Needs,
    servers=st.integers(0, 5),
    server_gpus=st.integers(0, 4),
    ranks=st.integers(0, 8),
    rank_gpus=st.integers(0, 1),
    controller_gpus=st.integers(0, 2),
    pools=st.integers(0, 2),
    pool_cpus=st.integers(1, 4),
    process_cpus=st.integers(0, 3),
)


def tried(needs: Needs, nodes: list[Node], driver: str = "") -> Placement | None:
    try:
        return place(needs, nodes, driver)
    except DoesNotFit:
        return None


def counts(placement: Placement) -> dict[str, tuple[int, int, int]]:
    """By node: its ranks, servers and pools."""
    roles = (placement.ranks, placement.servers, placement.pools)
    return {node.name: tuple(held.count(node.name) for held in roles) for node in placement.nodes}  # type: ignore


def holds(needs: Needs, node: Node, ranks: int, servers: int, pool: int, *, driver: bool) -> bool:
    """Whether a node has room for so many, written down independently."""
    gpus = ranks * needs.rank_gpus + servers * needs.server_gpus + driver * needs.controller_gpus
    on_cpus = ranks * (not needs.rank_gpus) + servers * (not needs.server_gpus)
    return gpus <= node.gpus and pool * needs.pool_cpus + on_cpus * needs.process_cpus <= node.cpus


def is_possible(needs: Needs, nodes: list[Node]) -> bool:
    """Every split of the roles over the nodes is tried, the first of which is the driver's."""

    def rest(i: int, ranks: int, servers: int, pools: int) -> bool:
        if i == len(nodes):
            return ranks == servers == pools == 0
        return any(
            holds(needs, nodes[i], r, s, p, driver=i == 0) and rest(i + 1, ranks - r, servers - s, pools - p)
            for r, s, p in itertools.product(range(ranks + 1), range(servers + 1), range(min(pools, 1) + 1))
        )

    return rest(0, needs.ranks, needs.servers, needs.pools)


@given(needs_of_any, node_lists)
def test_every_role_has_one_place_and_no_node_has_too_much(needs: Needs, nodes: list[Node]) -> None:
    placement = tried(needs, nodes)
    assume(placement is not None)
    assert placement is not None
    assert (len(placement.ranks), len(placement.servers), len(placement.pools)) == (
        needs.ranks, needs.servers, needs.pools,
    )  # fmt: skip
    assert len(set(placement.pools)) == needs.pools and placement.driver == "node-0"
    for node in nodes:
        ranks, servers, pool = counts(placement)[node.name]
        assert holds(needs, node, ranks, servers, pool, driver=node.name == placement.driver)
        assert placement.gpus_taken(node.name) <= node.gpus and placement.cpus_taken(node.name) <= node.cpus


@given(needs_of_any, node_lists.filter(lambda nodes: len(nodes) < 4))
def test_there_is_a_placement_where_one_is_possible(needs: Needs, nodes: list[Node]) -> None:
    needs = replace(needs, servers=min(3, needs.servers), ranks=min(5, needs.ranks))
    assert (tried(needs, nodes) is not None) == is_possible(needs, nodes)


@given(needs_of_any, node_lists, sizes, sizes)
def test_a_further_node_spoils_nothing(needs: Needs, nodes: list[Node], gpus: int, cpus: int) -> None:
    if tried(needs, nodes, "node-0"):
        assert tried(needs, [*nodes, Node("another", gpus, cpus)], "node-0")


@given(needs_of_any, node_lists, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_told_does_not_matter(needs: Needs, nodes: list[Node], random) -> None:
    mixed = random.sample(nodes, len(nodes))
    assert tried(needs, mixed) == tried(needs, nodes)


@given(needs_of_any, st.integers(0, 8), st.integers(0, 8), st.integers(1, 4))
def test_names_of_equal_nodes_change_nothing_but_themselves(needs: Needs, gpus: int, cpus: int, number: int) -> None:
    some, others = (
        tried(needs, [Node(f"{name}{i}", gpus, cpus) for i in range(number)], f"{name}0") for name in ("a", "z")
    )
    assert (some is None) == (others is None)
    if some and others:
        assert list(counts(some).values()) == list(counts(others).values())


@given(needs_of_any, st.integers(0, 8), st.integers(0, 8), st.integers(1, 3))
def test_ranks_are_on_few_nodes_and_numbered_along_them(needs: Needs, gpus: int, cpus: int, number: int) -> None:
    """As few as any placement on equal nodes needs."""
    needs = replace(needs, servers=min(3, needs.servers), controller_gpus=0, pools=0)
    nodes = [Node(f"node-{i}", gpus, cpus) for i in range(number)]
    placement = tried(needs, nodes)
    assume(placement is not None)
    assert placement is not None
    of_ranks = [len(list(each)) for _, each in itertools.groupby(placement.ranks)]
    assert len(of_ranks) == len(set(placement.ranks)), "the ranks of a node are one range"
    assert list(placement.ranks) == sorted(placement.ranks)

    def fits_on(few: int) -> bool:
        """Ranks on the first `few` nodes alone, servers on any."""
        room = lambda node, ranks: next(  # noqa: E731
            s for s in range(needs.servers, -1, -1) if holds(needs, node, ranks, s, 0, driver=False)
        )
        splits = itertools.product(range(needs.ranks + 1), repeat=few)
        return any(
            sum(split) == needs.ranks
            and all(holds(needs, node, r, 0, 0, driver=False) for node, r in zip(nodes, split, strict=False))
            and sum(room(node, r) for node, r in itertools.zip_longest(nodes, split, fillvalue=0)) >= needs.servers  # type: ignore
            for split in splits
        )

    assert len(of_ranks) == next(few for few in range(number + 1) if fits_on(few))


# Examples


def nodes_like(number: int, gpus: int, cpus: int) -> list[Node]:
    return [Node(f"node-{i + 1}", gpus, cpus) for i in range(number)]


def test_two_nodes_of_eight_gpus() -> None:
    needs = Needs(servers=8, server_gpus=1, ranks=8, rank_gpus=1)
    assert counts(place(needs, nodes_like(2, 8, 64))) == {"node-1": (8, 0, 1), "node-2": (0, 8, 0)}


def test_a_laptop_holds_everything() -> None:
    needs = Needs(servers=2, ranks=2)
    assert counts(place(needs, nodes_like(1, 0, 2))) == {"node-1": (2, 2, 1)}


def test_a_server_is_never_split_over_nodes() -> None:
    """12 GPUs are left in all, but 6 on each node: one server of 4 on each."""
    needs = Needs(servers=2, server_gpus=4, ranks=4, rank_gpus=1)
    assert Counter(place(needs, nodes_like(2, 6, 8)).servers) == {"node-1": 1, "node-2": 1}
    with pytest.raises(DoesNotFit, match="3 servers .* there is room for 2, so 4 GPUs are missing"):
        place(replace(needs, servers=3), nodes_like(2, 6, 8))


def test_ranks_leave_whole_servers_their_room() -> None:
    """The largest node would hold all ranks, but it alone holds the server."""
    needs = Needs(servers=1, server_gpus=8, ranks=6, rank_gpus=1)
    placement = place(needs, [Node("a", 8, 8), Node("b", 6, 8)])
    assert set(placement.servers) == {"a"} and set(placement.ranks) == {"b"}


@pytest.mark.parametrize(
    ("gpus", "ranks", "wanted"),
    [
        ((8, 8, 2), 10, [8, 0, 2]),  # the smallest that takes the rest
        ((2, 8, 8), 16, [0, 8, 8]),  # the largest first: on two nodes, not three
        ((8, 2), 2, [0, 2]),
    ],
)
def test_ranks_of_unequal_nodes(gpus: tuple[int, ...], ranks: int, wanted: list[int]) -> None:
    nodes = [Node(f"node-{i}", each, 8) for i, each in enumerate(gpus)]
    assert [c[0] for c in counts(place(Needs(ranks=ranks, rank_gpus=1), nodes)).values()] == wanted


def test_what_is_left_for_servers_is_counted_from_node_to_node() -> None:
    """The first 8 ranks take the last block of 4 that is to spare: the ninth goes where no server can be."""
    needs = Needs(servers=2, server_gpus=4, ranks=9, rank_gpus=1)
    placement = place(needs, [Node("a", 8, 8), Node("b", 4, 8), Node("c", 5, 8)])
    assert counts(placement) == {"a": (8, 0, 1), "b": (0, 1, 0), "c": (1, 1, 0)}


def test_where_nothing_is_counted_servers_avoid_ranks_and_the_driver() -> None:
    assert place(Needs(servers=2), nodes_like(3, 0, 1)).servers == ("node-2", "node-3")
    needs = Needs(servers=1, ranks=4, rank_gpus=1)
    assert place(needs, [Node("a", 0, 1), Node("b", 4, 1), Node("c", 0, 1)]).servers == ("c",)


def test_servers_are_spread_over_what_is_left() -> None:
    needs = Needs(servers=6, server_gpus=1, ranks=8, rank_gpus=1)
    assert [c[1] for c in counts(place(needs, nodes_like(4, 8, 8))).values()] == [0, 2, 2, 2]
    on_cpus = Needs(servers=2, ranks=2, process_cpus=1)
    assert list(counts(place(on_cpus, nodes_like(3, 0, 2))).values()) == [(0, 1, 1), (2, 0, 0), (0, 1, 0)]


def test_the_driver_s_node_is_the_first() -> None:
    needs = Needs(ranks=4, rank_gpus=1, controller_gpus=1)
    placement = place(needs, nodes_like(12, 4, 4), "node-10")
    assert placement.nodes[0].name == "node-10" and placement.gpus_taken("node-10") == 1
    assert [node.name for node in placement.nodes][1:4] == ["node-1", "node-2", "node-3"]


def test_rewards_go_where_there_is_no_gpu() -> None:
    needs = Needs(ranks=2, rank_gpus=1, pools=2, pool_cpus=4)
    assert place(needs, [Node("a", 8, 64), Node("b", 8, 64), Node("c", 0, 16)]).pools == ("a", "c")


@pytest.mark.parametrize(
    ("needs", "role", "words"),
    [
        (Needs(controller_gpus=2), "controller", "needs 2 GPUs on its node node-1, which has 1"),
        (Needs(pools=3), "reward pool", "3 reward pools .* 2 of 2 nodes have one.* 1 node is missing"),
        (Needs(pool_cpus=5), "reward pool", "0 of 2 nodes have them, the largest has 4"),
        (Needs(servers=3, server_gpus=1), "server", "3 servers .* room for 2, so 1 GPU is missing"),
        (Needs(servers=1, server_gpus=2), "server", "each on one node: there is room for 0"),
        (Needs(servers=1, server_gpus=1, ranks=2, rank_gpus=1), "rank", "room for 1 beside 1 server, so 1 GPU is"),
        (Needs(ranks=9, process_cpus=1, pools=0), "rank", "9 ranks .* of 1 CPU each .* room for 8, so 1 place is"),
    ],
)
def test_a_refusal_says_what_is_missing(needs: Needs, role: str, words: str) -> None:
    with pytest.raises(DoesNotFit, match=words) as refusal:
        place(needs, nodes_like(2, 1, 4))
    assert refusal.value.role == role


@pytest.mark.parametrize("nodes, driver", [([], ""), ([Node("a", 0, 1)] * 2, ""), ([Node("a", 0, 1)], "b")])
def test_nodes_are_told_apart(nodes: list[Node], driver: str) -> None:
    with pytest.raises(ValueError, match="names of their own"):
        place(Needs(), nodes, driver)
