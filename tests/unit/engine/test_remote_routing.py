"""Routing: siblings together, else the least loaded, never more than there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.remote.fleet import Router, group_of
from rollover.types import Rollout, Task

SERVERS = ["a", "b", "c"]


def router(*servers: str, max_running: int = 4) -> Router:
    made = Router(max_running)
    for server in servers:
        made.add(server)
    return made


def test_a_rollouts_group_is_what_its_id_begins_with() -> None:
    assert [group_of(i) for i in ("3-1", "3-12.1.0", "31-0")] == ["3", "3", "31"]


def test_tasks_of_an_evaluation_are_groups_of_their_own() -> None:
    ids = [
        Rollout(group, sibling, Task(str(group), "s", "r", prompt="p")).rollout_id
        for group, sibling in ((-1, 0), (-1, 1), (-2, 0))
    ]
    first, sibling, other = map(group_of, ids)
    assert first == sibling != other
    servers = router("a", "b")
    for rollout_id in ids:
        server = servers.choose(rollout_id, ["a", "b"])
        assert server is not None
        servers.begin(rollout_id, server)
    assert servers.running == {"a": 2, "b": 1}


def test_siblings_go_where_their_prompt_is_until_there_is_no_room() -> None:
    made = router("a", "b", max_running=2)
    went = []
    for rollout_id in ("0-0", "0-1", "0-2", "1-0"):
        went.append(made.choose(rollout_id, ["a", "b"]))
        made.begin(rollout_id, went[-1])
    assert went == ["a", "a", "b", "b"]
    assert made.choose("2-0", ["a", "b"]) is None


def test_a_group_is_at_home_until_its_last_rollout_is_released() -> None:
    made = router("a", "b")
    for rollout_id in ("0-0", "0-1"):
        made.begin(rollout_id, "b")
        made.end("b")
    made.release(["0-0", "no such rollout"])
    assert made.choose("0-1", SERVERS) == "b"
    made.release(["0-1"])
    assert made.choose("0-1", SERVERS) == "a"


def test_resumed_rollout_returns_to_its_server_if_free() -> None:
    made = router("a", "b", max_running=2)
    for rollout_id, server in (("0-0", "a"), ("0-1", "a"), ("0-2", "b")):  # the group is at home at b
        made.begin(rollout_id, server)
    made.end("a")
    assert made.choose("0-0", SERVERS) == "a" and made.choose("0-3", SERVERS) == "b"
    made.begin("0-0", "a")
    assert (made.num_in_place, made.num_elsewhere) == (1, 0)
    assert made.choose("0-1", SERVERS) == "b", "a has no room"
    made.begin("0-1", "b")
    assert (made.num_in_place, made.num_elsewhere) == (1, 1)


def test_a_server_that_is_gone_is_nobodys_home() -> None:
    made = router("a", "b")
    made.begin("0-0", "b")
    made.remove("b")
    made.end("b")
    made.add("b")
    assert made.running == {"a": 0, "b": 0} and made.choose("0-1", SERVERS) == "a"


def test_one_to_avoid_is_chosen_only_where_there_is_no_other() -> None:
    made = router("a", "b", max_running=1)
    assert made.choose("0-0", ["a", "b"], avoid={"a"}) == "b"
    assert made.choose("0-0", ["a"], avoid={"a"}) == "a"
    made.begin("1-0", "b")
    assert made.choose("0-0", ["a", "b"], avoid={"a"}) is None, "it waits for the other"


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "add", "remove", "release"]), st.integers(0, 30)), max_size=120
    ),
)
def test_router_bounds_load_and_picks_the_least_loaded(max_running: int, moves: list) -> None:
    made, there, running = Router(max_running), set(), {}
    for move, number in moves:
        server, rollout_id = SERVERS[number % 3], f"{number % 5}-{number}"
        if move == "add":
            made.add(server)
            there.add(server)
        elif move == "remove":
            made.remove(server)
            there.discard(server)
            running = {i: s for i, s in running.items() if s != server}
        elif move == "begin" and rollout_id not in running:
            siblings = {s for i, s in running.items() if group_of(i) == group_of(rollout_id)}
            chosen = made.choose(rollout_id, SERVERS)
            loads = {s: sum(s == other for other in running.values()) for s in there}
            free = {s for s in there if loads[s] < max_running}
            assert (chosen is None) == (not free) and (chosen is None or chosen in free)
            if chosen is not None:
                least = min(loads[s] for s in free)
                home = chosen in siblings or loads[chosen] == least
                assert home or not siblings & free, "it leaves the least loaded only for its siblings' sake"
                made.begin(rollout_id, chosen)
                running[rollout_id] = chosen
        elif move == "end" and rollout_id in running:
            made.end(running.pop(rollout_id))
        elif move == "release" and rollout_id not in running:
            made.release([rollout_id])
        assert made.running == {s: sum(s == other for other in running.values()) for s in there}
        assert all(num <= max_running for num in made.running.values())
