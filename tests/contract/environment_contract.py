"""Checks that any Environment must pass. Run them on your own:

from contract import environment_contract

SUBJECT = environment_contract.Subject(make_environment=MyEnvironment, rollouts=[rollout, another])

@pytest.mark.parametrize("check", environment_contract.CHECKS, ids=lambda check: check.__name__)
def test_my_environment(check):
    asyncio.run(check(SUBJECT))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollover.envs.protocol import Environment, why_not_written
from rollover.types import Reward, Rollout, Segment


@dataclass(frozen=True)
class Subject:
    """The environment under test. `rollouts`: siblings of one group whose first turn has stopped, with their tokens;
    `vocab_size`: every token id of the model is below it."""

    make_environment: Callable[[], Environment]
    rollouts: list[Rollout]
    vocab_size: int = 2**31 - 1


def tokens(answer: Segment | None) -> tuple | None:
    return None if answer is None else (answer.token_ids.tolist(), answer.stop_reason)


async def check_an_answer_is_a_segment_or_the_end(subject: Subject) -> None:
    environment = subject.make_environment()
    for rollout in subject.rollouts:
        answer = await environment.next(rollout)
        if answer is not None:
            assert why_not_written(answer, rollout.num_tokens, subject.vocab_size) is None
            assert answer.start in (None, rollout.num_tokens), "it comes after the policy's turn"
            assert not answer.logprobs.any(), "nobody sampled these tokens"


async def check_it_depends_on_the_tokens_alone(subject: Subject) -> None:
    """A turn may be played again, on the same object or, after a kill, on a fresh one."""
    environment = subject.make_environment()
    first = [tokens(await environment.next(r)) for r in subject.rollouts]
    assert [tokens(await environment.next(r)) for r in subject.rollouts] == first
    fresh = subject.make_environment()
    together = await asyncio.gather(*(fresh.next(r) for r in reversed(subject.rollouts)))
    assert [tokens(answer) for answer in reversed(together)] == first


async def check_rollouts_are_left_as_they_are(subject: Subject) -> None:
    environment = subject.make_environment()
    before = [(list(r.segments), r.token_ids(), r.state, r.stop_reason, r.reward) for r in subject.rollouts]
    for rollout in subject.rollouts:
        await environment.next(rollout)
    await environment.score(list(subject.rollouts))
    assert before == [(list(r.segments), r.token_ids(), r.state, r.stop_reason, r.reward) for r in subject.rollouts]


async def check_scores_are_one_reward_each_in_order(subject: Subject) -> None:
    environment = subject.make_environment()
    rewards = await environment.score(list(subject.rollouts))
    assert len(rewards) == len(subject.rollouts) and all(isinstance(reward, Reward) for reward in rewards)
    assert isinstance(environment.scores_singly(subject.rollouts[0].task), bool)


CHECKS = [
    check_an_answer_is_a_segment_or_the_end,
    check_it_depends_on_the_tokens_alone,
    check_rollouts_are_left_as_they_are,
    check_scores_are_one_reward_each_in_order,
]
