"""Which role is on which node while nodes die and come: what lives stays, what lost its node goes where room is."""

from __future__ import annotations

import pytest

from rollover.cluster.plan import Assignment, DoesNotFit, Needs, Node


def alive(*nodes: Node) -> dict[str, Node]:
    return {node.name: node for node in nodes}


A, B, C = Node("a", 0, 0), Node("b", 0, 2), Node("c", 0, 3)
ON_CPUS = Needs(servers=2, pools=1, pool_cpus=3, process_cpus=1)


def test_roles_stay_where_they_are_while_their_node_lives() -> None:
    seats = Assignment(ON_CPUS, [A, B, C], "a")
    assert seats.node_of == {"server 0": "b", "server 1": "b", "reward 0": "c"}
    more = alive(A, B, C, Node("d", 0, 100))
    assert [seats.find(name, more) for name in seats.node_of] == ["b", "b", "c"]


def test_role_of_lost_node_moves_to_free_node() -> None:
    seats = Assignment(ON_CPUS, [A, B, C], "a")
    for name in ("server 0", "server 1"):
        with pytest.raises(DoesNotFit, match="there is room for 0"):
            seats.find(name, alive(A, C))
    one_more = alive(A, C, Node("d", 0, 1))
    assert seats.find("server 1", one_more) == "d"
    with pytest.raises(DoesNotFit):
        seats.find("server 0", one_more)
    assert seats.find("server 0", alive(A, C, Node("d", 0, 1), Node("e", 0, 1))) == "e"
    assert seats.find("reward 0", alive(A, Node("d", 0, 4), Node("e", 0, 1))) == "d", "beside the server there"


def test_gpus_of_others_and_of_the_controller_are_taken() -> None:
    needs = Needs(servers=2, server_gpus=2, controller_gpus=1, pools=0)
    seats = Assignment(needs, [Node("a", 3, 9), Node("b", 2, 9)], "a")
    assert sorted(seats.node_of.values()) == ["a", "b"]
    lost = next(name for name, node in seats.node_of.items() if node == "b")
    with pytest.raises(DoesNotFit):
        seats.find(lost, alive(Node("a", 3, 9)))
    assert seats.find(lost, alive(Node("a", 3, 9), Node("c", 2, 9))) == "c"


def test_each_pool_has_a_node_of_its_own() -> None:
    seats = Assignment(Needs(pools=2, pool_cpus=1), [Node("a", 0, 8), Node("b", 0, 8)], "a")
    assert sorted(seats.node_of.values()) == ["a", "b"]
    lost = next(name for name, node in seats.node_of.items() if node == "b")
    with pytest.raises(DoesNotFit):
        seats.find(lost, alive(Node("a", 0, 8)))
    assert seats.find(lost, alive(Node("a", 0, 8), Node("c", 0, 1))) == "c"


def test_what_never_fits_is_refused_at_once() -> None:
    with pytest.raises(DoesNotFit, match="1 place is missing"):
        Assignment(ON_CPUS, [A, Node("b", 0, 1), C], "a")


def test_surviving_ranks_keep_their_nodes() -> None:
    needs = Needs(ranks=2, servers=1, pools=0, process_cpus=1)
    nodes = [Node("a", 0, 0), Node("b", 0, 1), Node("c", 0, 1), Node("d", 0, 1)]
    seats = Assignment(needs, nodes, "a")
    assert sorted(seats.node_of.values()) == ["b", "c", "d"]
    lost, kept = seats.node_of["rank 0"], seats.node_of["rank 1"]
    left = {node.name: node for node in nodes if node.name != lost}
    with pytest.raises(DoesNotFit):
        seats.find("rank 0", left)
    assert seats.find("rank 0", left | alive(Node("e", 0, 1))) == "e" and seats.find("rank 1", left) == kept


def test_without_any_node_that_is_said() -> None:
    seats = Assignment(Needs(servers=1, pools=1), [Node("a", 0, 4)], "a")
    for name in ("server 0", "reward 0"):
        with pytest.raises(DoesNotFit, match="there is no node"):
            seats.find(name, {})


def test_seats_colocated_role_lays_beside_the_other_kind() -> None:
    """A server that lost its node goes to the GPUs of ranks; each keeps its own GPUs while it stays."""
    needs = Needs(servers=2, server_gpus=2, ranks=4, rank_gpus=1, pools=0, colocate=True)
    seats = Assignment(needs, [Node("a", 2, 9), Node("b", 2, 9)], "a")
    assert [seats.node_of[f"rank {i}"] for i in range(4)] == ["a", "a", "b", "b"]
    assert [list(seats.gpus(name)) for name in ("rank 0", "rank 1", "rank 2", "server 0")] == [[0], [1], [0], [0, 1]]
    lost = next(name for name in ("server 0", "server 1") if seats.node_of[name] == "b")
    with pytest.raises(DoesNotFit):
        seats.find(lost, alive(Node("a", 2, 9)))
    assert seats.find(lost, alive(Node("a", 4, 9))) == "a" and list(seats.gpus(lost)) == [2, 3]
    assert seats.gpus_on("a") == 4
