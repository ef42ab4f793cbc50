"""The environments keep their contract, and the checks find one that does not."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from contract import environment_contract
from rollover.envs.build import SingleTurn
from rollover.envs.protocol import written
from rollover.types import Reward, Rollout, RolloutState, Segment, StopReason
from unit.rollout.dialogue import Dialogue
from unit.rollout.run import score_by_tokens
from unit.rollout.world import make_segment, make_task

ROLLOUTS = [
    Rollout(0, i, make_task(0), [make_segment(4 + i, 0, StopReason.EOS)], RolloutState.RUNNING, StopReason.EOS)
    for i in range(3)
]
MAKERS = {
    "single_turn": lambda: SingleTurn(score_by_tokens),
    "two turns": lambda: Dialogue(2),
    "ends itself": lambda: Dialogue(1, ends_itself=True),
}


@pytest.mark.parametrize("check", environment_contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_contract(check, make) -> None:
    asyncio.run(check(environment_contract.Subject(make, ROLLOUTS)))


class Counting(Dialogue):
    """Its answers depend on how often it was asked."""

    async def next(self, rollout: Rollout) -> Segment | None:
        await super().next(rollout)
        return written(rollout, [len(self.asked)])


class Sampling(Dialogue):
    """Claims tokens for the policy."""

    async def next(self, rollout: Rollout) -> Segment | None:
        return make_segment(3, 0)


class Scoring(Dialogue):
    """Leaves a rollout without a reward."""

    async def score(self, rollouts: list[Rollout]) -> list[Reward]:
        return (await super().score(rollouts))[1:]


class Changing(Dialogue):
    """Appends by itself."""

    async def next(self, rollout: Rollout) -> Segment | None:
        rollout.add(written(rollout, [1]))
        return None


@pytest.mark.parametrize("make", [Counting, Sampling, Scoring, Changing])
def test_the_checks_find_what_breaks_a_rule(make) -> None:
    def fails(check) -> bool:
        copies = [Rollout(r.group_id, r.sibling, r.task, list(r.segments), r.state) for r in ROLLOUTS]
        try:
            asyncio.run(check(environment_contract.Subject(make, copies)))
        except AssertionError:
            return True
        return False

    assert any(map(fails, environment_contract.CHECKS))


class Dealer:
    """Its cards are drawn at random."""

    def reset(self, num: int) -> None:
        self.num, self.random, self.cards = num, random.Random(), []

    def draw(self) -> int:
        self.cards.append(self.random.randrange(10**9))
        return self.cards[-1]

    def get_reward(self) -> float:
        return float(sum(self.cards))

    async def snapshot(self) -> list[Any]:
        version, words, gauss = self.random.getstate()
        return [version, list(words), gauss, list(self.cards)]

    def restore(self, state: list[Any]) -> None:
        version, words, gauss, self.cards = state
        self.random.setstate((version, tuple(words), gauss))


class ForgetsItsCards(Dealer):
    def restore(self, state: list[Any]) -> None:
        super().restore(state)
        self.cards = []


class ForgetsItsRandomness(Dealer):
    def restore(self, state: list[Any]) -> None:
        *_, self.cards = state


class Shows(Dealer):
    """Draws a card to say what it has."""

    async def snapshot(self) -> list[Any]:
        self.draw()
        return await super().snapshot()


class NoJson(Dealer):
    async def snapshot(self) -> Any:
        return self.random.getstate()[1], {1}


def dealt(make: type) -> environment_contract.ClassSubject:
    return environment_contract.ClassSubject(make, {"num": 3}, [lambda dealer: dealer.draw()] * 3)


@pytest.mark.parametrize("check", environment_contract.CLASS_CHECKS, ids=lambda check: check.__name__)
def test_a_class_that_says_what_it_knows(check) -> None:
    asyncio.run(check(dealt(Dealer)))


@pytest.mark.parametrize("make", [ForgetsItsCards, ForgetsItsRandomness, Shows, NoJson])
def test_the_checks_find_a_class_that_does_not_say_it(make) -> None:
    def fails(check) -> bool:
        try:
            asyncio.run(check(dealt(make)))
        except (AssertionError, ValueError):
            return True
        return False

    assert any(map(fails, environment_contract.CLASS_CHECKS))
