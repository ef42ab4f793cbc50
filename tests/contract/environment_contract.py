"""Checks that any Environment must pass. Run them on your own:

from contract import environment_contract

SUBJECT = environment_contract.Subject(make_environment=MyEnvironment, rollouts=[rollout, another])

@pytest.mark.parametrize("check", environment_contract.CHECKS, ids=lambda check: check.__name__)
def test_my_environment(check):
    asyncio.run(check(SUBJECT))

A class of workflow.environment with snapshot() and restore(state) has checks of its own, CLASS_CHECKS, which take a
ClassSubject in the place of Subject.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.envs.protocol import Environment, turn_error
from rollover.functions import as_json
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
            assert turn_error(answer, rollout, subject.vocab_size) is None
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


# A class that says what it knows


@dataclass(frozen=True)
class ClassSubject:
    """The class under test, what its `reset` gets, and what is done with an object of it in each turn, in order:
    `lambda game: game.step("5")`, say. What that returns is what the policy would be told."""

    make: Callable[[], Any]
    columns: Mapping[str, Any]
    turns: Sequence[Callable[[Any], Any]]

    async def begun(self) -> Any:
        made = self.make()
        await done(made.reset(**self.columns))
        return made

    async def restored(self, state: Any) -> Any:
        """Another object, which gets the state as a restarted process reads it."""
        made = await self.begun()
        await done(made.restore(json.loads(json.dumps(state))))
        return made

    async def goes_on(self, made: Any, num_played: int) -> list[Any]:
        """What the turns that are left make of the object: what is told, and the reward."""
        told = [await done(turn(made)) for turn in self.turns[num_played:]]
        reward = getattr(made, "get_reward", None)
        return [*told, None if reward is None else await done(reward())]


async def done(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def check_a_state_is_json_and_small_and_stays_as_it_is(subject: ClassSubject) -> None:
    made = await subject.begun()
    for turn in subject.turns:
        await done(turn(made))
        state = as_json(await done(made.snapshot()), "the state")
        assert as_json(await done(made.snapshot()), "the state") == state, "asking for it changes it"
        again = await subject.restored(state)
        assert as_json(await done(again.snapshot()), "the state") == state, "what is restored has another state"


async def check_another_object_goes_on_as_the_first_would_have(subject: ClassSubject) -> None:
    for num_played in range(1, len(subject.turns) + 1):
        made = await subject.begun()
        for turn in subject.turns[:num_played]:
            await done(turn(made))
        state = as_json(await done(made.snapshot()), "the state")
        expected = await subject.goes_on(made, num_played)
        again = await subject.restored(state)
        assert await subject.goes_on(again, num_played) == expected, f"after turn {num_played}"


CLASS_CHECKS = [
    check_a_state_is_json_and_small_and_stays_as_it_is,
    check_another_object_goes_on_as_the_first_would_have,
]
