"""Conservation, the staleness bound and append-only, over random runs (DESIGN section 8, tests 1 to 3)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollover.config.rollout import RolloutConfig
from rollover.rollout.order import ORDERS
from rollover.types import RolloutState
from unit.rollout.world import World


def sequences(num: int):
    """How many random runs; the slow tests take the same properties further."""
    return settings(max_examples=num, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def configs(draw: st.DrawFn, on_stale: str | None = None) -> RolloutConfig:
    """Every mode that the rules of the configuration allow."""
    on_stale = on_stale if on_stale is not None else draw(st.sampled_from(["", "finish_first", "drop", "mask"]))
    groups_per_step = draw(st.integers(1, 4))
    max_staleness = draw(st.integers(0, 3))
    interrupt = draw(st.sampled_from(["never", "when_enough", "token_budget"]))
    max_new_tokens = draw(st.integers(2, 12))
    most = (1 + max_staleness) * groups_per_step + (5 if on_stale in ("drop", "mask") else 0)
    supplement = interrupt != "never" and most >= 2 * groups_per_step and draw(st.booleans())
    most -= groups_per_step if supplement else 0
    config = RolloutConfig(
        groups_per_step=groups_per_step,
        group_size=draw(st.integers(1, 3)),
        max_new_tokens=max_new_tokens,
        in_flight_groups=draw(st.just(0) | st.just("auto") | st.integers(groups_per_step, most)),
        supplement=supplement,
        interrupt=interrupt,
        token_budget=draw(st.integers(1, max_new_tokens - 1)) if interrupt == "token_budget" else 0,
        complete_fraction=draw(st.sampled_from([0.3, 0.5, 1.0])),
        complete_by=draw(st.sampled_from(["group", "rollout"])),
        max_continuations=draw(st.integers(0, 2)),
        max_staleness=max_staleness,
        on_stale=on_stale,
        order=draw(st.sampled_from(sorted(ORDERS))),
    )
    if config.on_stale in ("", "finish_first"):
        assume(config.most_held <= (1 + max_staleness) * groups_per_step)
    return config


ADVERSARIES = st.sampled_from(["random", "newest", "stubborn"])
MAX_RUNNING = st.none() | st.integers(1, 6)
FILTER_RATE = st.sampled_from([0.0, 0.4])


PUBLISH_EVERY = st.integers(1, 4)  # and at most max_staleness + 1: otherwise no token would be in bound
WORLDS = (
    configs(), st.integers(), ADVERSARIES, MAX_RUNNING, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.1]),
    FILTER_RATE, PUBLISH_EVERY,
)  # fmt: skip


@sequences(1000)
@given(*WORLDS)
def test_conservation_staleness_and_append_only(
    config, seed, adversary, max_running, failure_rate, restart_rate, filter_rate, publish_every
):
    check_conservation(config, seed, adversary, max_running, failure_rate, restart_rate, filter_rate, publish_every)


@pytest.mark.slow
@sequences(10_000)
@given(*WORLDS)
def test_conservation_at_length(
    config, seed, adversary, max_running, failure_rate, restart_rate, filter_rate, publish_every
):
    check_conservation(config, seed, adversary, max_running, failure_rate, restart_rate, filter_rate, publish_every)


def check_conservation(config, seed, adversary, max_running, failure_rate, restart_rate, filter_rate, publish_every):
    """World.step checks all three after every event, and group integrity when a group leaves."""
    world = World(
        config,
        random.Random(seed),
        adversary,
        max_running,
        failure_rate,
        restart_rate,
        filter_rate=filter_rate,
        publish_every=min(publish_every, config.max_staleness + 1),
    )
    for _ in range(6):
        num = len(world.step())
        assert config.num_enough <= num <= config.groups_per_step or (config.complete_by == "rollout" and num)
    metrics = world.ledger.metrics(world.cache)
    assert metrics["tokens/generated"] == sum(map(len, world.seen.values())) - world.written
    assert metrics["tokens/generated"] == metrics["tokens/trained"] + metrics["tokens/dropped"] + metrics["tokens/held"]
    assert metrics["groups/consumed"] == sum(how == "consumed" for how in world.left.values())
    if config.nothing_rolls_over or (config.complete_fraction == 1 and config.complete_by == "group"):
        assert metrics["groups/consumed"] == 6 * config.groups_per_step
    for reason in ("stale", "too_few_rewards", "filtered"):
        assert metrics[f"dropped/{reason}/groups"] == sum(how == reason for how in world.left.values())
    by_filter = [metrics.get(f"filtered/{name}/groups", 0) for name in ("one", "other")]
    assert sum(by_filter) == metrics["dropped/filtered/groups"]


@sequences(400)
@given(configs(on_stale="finish_first"), st.integers(), ADVERSARIES, MAX_RUNNING)
def test_finish_first_drops_nothing_and_starves_nobody(config, seed, adversary, max_running):
    """A group is consumed at most S steps after its first token; it starts once those admitted before it have.

    The engine is fair here: whoever runs gets a token before the step ends.
    """
    world = World(config, random.Random(seed), adversary, max_running, min_pause_tokens=1)
    longest_wait = -(-config.most_held // config.groups_per_step) + config.max_staleness
    for _ in range(10):
        for group in world.step():
            # step() has published already: the group was consumed at version - 1
            assert world.version - 1 - world.admitted_version[group.group_id] <= longest_wait
    assert set(world.left.values()) == {"consumed"}


@sequences(400)
@given(configs(), st.integers(), ADVERSARIES, MAX_RUNNING, st.integers(0, 12), FILTER_RATE)
def test_finite_stream_ends_with_everything_trained_or_dropped(
    config, seed, adversary, max_running, num_tasks, filter_rate
):
    world = World(config, random.Random(seed), adversary, max_running, num_tasks=num_tasks, filter_rate=filter_rate)
    sizes = []
    while batch := world.step():
        sizes.append(len(batch))
    if config.complete_fraction == 1 and config.complete_by == "group":
        assert all(size == config.groups_per_step for size in sizes[:-1])
    assert not world.cache.groups and sorted(world.left) == list(range(num_tasks))


@sequences(400)
@given(configs(), st.integers(), ADVERSARIES, MAX_RUNNING)
def test_never_waits_for_everything_in_flight(config, seed, adversary, max_running):
    world = World(
        config.model_copy(update={"interrupt": "never", "supplement": False}),
        random.Random(seed),
        adversary,
        max_running,
    )
    for _ in range(5):
        world.step()
        states = {r.state for g in world.cache.groups.values() for r in g.rollouts}
        assert states <= {RolloutState.READY}
