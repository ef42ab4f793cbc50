from __future__ import annotations

import json
import random

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.cache import RolloutCache
from rollover.rollout.ledger import Ledger
from rollover.types import DropReason, Prompt, Reward, RolloutState, StopReason
from unit.rollout.world import World, make_segment, make_task, through_json


def books() -> tuple[RolloutCache, Ledger]:
    """Three groups of two: 0 with a parked and a running rollout, 1 waiting, 2 ready."""
    cache, ledger = RolloutCache(20), Ledger()
    for i in range(3):
        ledger.on_admit(cache.admit(make_task(i), Prompt((1,)), 2))
    for name, num_tokens in (("0-0", 3), ("0-1", 4), ("2-0", 5), ("2-1", 6)):
        cache.start(name)
        segments = [make_segment(num_tokens, 0), make_segment(2, 0, trainable=False)]
        cache.append(name, segments)
        ledger.on_append(segments)
        if name == "0-0":
            cache.park(name)
        if name.startswith("2"):
            cache.finish(name, StopReason.EOS)
            cache.set_reward(name, Reward(1.0))
    return cache, ledger


def test_accounts_and_metrics() -> None:
    cache, ledger = books()
    ledger.check(cache)
    held = {s: (a.rollouts, a.tokens) for s, a in ledger.held(cache).items()}
    assert held == {
        RolloutState.WAITING: (2, 0),
        RolloutState.RUNNING: (1, 4),
        RolloutState.PARKED: (1, 3),
        RolloutState.ACTING: (0, 0),
        RolloutState.SCORING: (0, 0),
        RolloutState.READY: (2, 11),
    }
    ledger.on_consume(cache.consume(2))
    ledger.on_drop(cache.drop(1, DropReason.STALE), DropReason.STALE)
    ledger.resumed_rollouts += 1
    ledger.check(cache)
    counts = {name: value for name, value in ledger.metrics(cache).items() if value}
    assert counts == {
        "tokens/generated": 18,
        "tokens/trained": 11,
        "tokens/held": 7,
        "groups/admitted": 3,
        "groups/consumed": 1,
        "groups/dropped": 1,
        "groups/held": 1,
        "rollouts/resumed": 1,
        "dropped/stale/groups": 1,
    }


@pytest.mark.parametrize("account", ["tokens", "rollouts", "groups"])
def test_check_names_what_does_not_balance(account: str) -> None:
    cache, ledger = books()
    match account:
        case "tokens":
            cache.append("0-1", [make_segment(1, 0)])  # a token that nobody reported
        case "rollouts":
            ledger.admitted_rollouts -= 1
        case "groups":
            cache.consume(2)  # left without a trace
    with pytest.raises(AssertionError, match=rf"'{account}': .*accounts: .*parked.*dropped\(stale\)"):
        ledger.check(cache)


def test_counters_survive_save_and_restore() -> None:
    config = RolloutConfig(
        groups_per_step=2, group_size=2, max_new_tokens=8, in_flight_groups=9, interrupt="when_enough", on_stale="drop"
    )
    world = World(config, random.Random(1), failure_rate=0.5)
    for _ in range(5):
        world.step()
    before = world.ledger.metrics(world.cache)
    assert before["dropped/stale/tokens"] > 0 and before["dropped/too_few_rewards/groups"] > 0
    world.restart()
    assert world.ledger.metrics(world.cache) == before
    world.step()
    after = world.ledger.metrics(world.cache)
    assert after["tokens/generated"] > before["tokens/generated"]
    assert after["groups/consumed"] == before["groups/consumed"] + 2


def test_a_drop_reason_newer_than_the_checkpoint_starts_at_zero() -> None:
    _, ledger = books()
    state = through_json(ledger.state_dict())
    del state["dropped"]["too_few_rewards"]
    ledger.dropped[DropReason.TOO_FEW_REWARDS].tokens = 5
    ledger.load_state_dict(state)
    assert ledger.dropped[DropReason.TOO_FEW_REWARDS].tokens == 0


def test_filtered_groups_are_counted_by_filter_and_as_one_reason() -> None:
    cache, ledger = books()
    ledger.filtered["pass_rate"] += 1
    with pytest.raises(AssertionError, match=r"'filtered groups': \(1, 0\)"):
        ledger.check(cache)
    ledger.on_drop(cache.drop(2, DropReason.FILTERED), DropReason.FILTERED)
    ledger.check(cache)
    metrics = ledger.metrics(cache)
    assert metrics["filtered/pass_rate/groups"] == metrics["dropped/filtered/groups"] == 1
    assert metrics["dropped/filtered/tokens"] == 11
    restored = Ledger()
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored.metrics(cache) == metrics


def test_a_checkpoint_from_before_there_were_filters_is_read() -> None:
    cache, ledger = books()
    state = ledger.state_dict()
    del state["filtered"], state["dropped"]["filtered"]
    restored = Ledger()
    restored.load_state_dict(state)
    restored.check(cache)
    restored.filtered["custom"] += 1
    assert restored.filtered == {"custom": 1}
