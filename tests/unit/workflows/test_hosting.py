"""Episodes under the driver, on the fake engine: whatever agents do, each token is in one account, and every reward is
that of its own tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollover.engine.fake import FakeEngine
from rollover.rollout.lifecycle import EventKind
from rollover.types import DropReason, Group, Rollout, RolloutState, SamplingParams, StopReason
from rollover.workflows.conversations import Chats
from rollover.workflows.episodes import Episodes
from rollover.workflows.function import WorkflowFunction
from rollover.workflows.player import Limits
from unit.envs import templates
from unit.rollout.run import PARTIAL, Run

TOKENIZER = templates.tokenizer(templates.CHATML)
MAX_NEW_TOKENS = 300
ROLES = ("solver", "judge", "policy")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Agents:
    """A workflow that does something else in every Episode, as `seed` says. `failing`: share of tries that raise."""

    def __init__(self, seed: int = 0, failing: float = 0.0) -> None:
        self.seed, self.failing, self.tries = seed, failing, random.Random(seed)

    async def __call__(self, task: Any, episode: Any) -> None:
        fails = self.tries.random() < self.failing
        rng = random.Random(f"{self.seed}/{episode.episode_id}")
        trajectories = [episode.trajectory(rng.choice(ROLES)) for _ in range(rng.randint(1, 3))]
        plays = [self.play(trajectory, rng.randint(1, 4), random.Random(rng.random())) for trajectory in trajectories]
        if rng.random() < 0.5:
            await asyncio.gather(*plays)
        else:
            for play in plays:
                await play
        if fails:
            raise ValueError("as planned")

    async def play(self, trajectory: Any, num_calls: int, rng: random.Random) -> None:
        """The reward is the sum of the ids of all tokens that the trajectory got."""
        messages, total = [user(f"Begin {rng.random()}")], 0
        for _ in range(num_calls):
            for _ in range(rng.choice([0, 1, 5])):
                await asyncio.sleep(0)
            calls = [trajectory.chat(messages) for _ in range(rng.choice([1, 1, 1, 2]))]
            replies = await asyncio.gather(*calls)
            total += sum(int(reply.token_ids.sum()) for reply in replies)
            if rng.random() < 0.7:
                messages = [*messages, rng.choice(replies).message, user("More")]
            else:
                messages = [user(f"Other {rng.random()}")]
        trajectory.reward = float(total)


class Hosted(Run):
    """A driver whose rollouts are played by `agents`."""

    def __init__(self, agents: Any, *, retries: int = 1, timeout_s: float = 60.0, **config: Any) -> None:
        async def workflow(task: Any, episode: Any) -> Any:
            return await agents(task, episode)

        limits = Limits(MAX_NEW_TOKENS, 2000, timeout_s=timeout_s, retries=retries)
        chats = Chats(TOKENIZER)
        self.episodes = Episodes(WorkflowFunction(workflow, "mine"), chats, limits, SamplingParams())
        engine = FakeEngine(lambda seed: 3 + seed % 30, vocab_size=len(TOKENIZER), turns_between_steps=4)
        super().__init__(
            engine=engine,
            environment=self.episodes,
            **{"max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": [chats.of(()).end_of_turn]} | config,
        )


def check_rewards(groups: list[Group]) -> int:
    """Every trajectory's reward is the sum of its sampled tokens. Returns how many trajectories there are."""
    totals: dict[tuple[int, int, int], int] = {}
    rewards: dict[tuple[int, int, int], set[float | None]] = {}
    for rollout in (r for group in groups for r in group.rollouts):
        key = rollout.group_id, rollout.sibling, rollout.trajectory
        totals[key] = totals.get(key, 0) + sum(int(s.token_ids.sum()) for s in rollout.segments if s.trainable)
        assert rollout.reward is not None
        rewards.setdefault(key, set()).add(rollout.reward.score)
        assert rollout.stop_reason is not None and rollout.num_tokens <= MAX_NEW_TOKENS
    for key, scores in rewards.items():
        assert scores in ({float(totals[key])}, {None}, {0.0}), key  # 0: it had had all its turns or tokens
    return len(totals)


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": PARTIAL,
    "supplement": {**PARTIAL, "supplement": True, "in_flight_groups": 3},
}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**20), max_running=st.sampled_from([None, 3]), failing=st.sampled_from([0.0, 0.3]))
def test_each_token_is_in_one_account_and_each_reward_is_of_its_own_tokens(
    mode: str, seed: int, max_running: int | None, failing: float
) -> None:
    run = Hosted(Agents(seed, failing), max_running=max_running, **MODES[mode])
    batches = run.steps(3)
    assert all(len(batch) == 2 for batch in batches)
    assert check_rewards([group for batch in batches for group in batch]) >= 12
    restarted = run.ledger.dropped[DropReason.RESTARTED]
    assert restarted.rollouts >= run.episodes.counts["episodes/restarted"] and restarted.groups == 0


def test_a_run_that_was_killed_begins_its_episodes_again() -> None:
    run = Hosted(Agents(5), **PARTIAL)
    run.steps(1)
    run.die()
    saved = run.save()
    again = Hosted(Agents(5), **PARTIAL)
    again.load(saved)
    unfinished = sum(r.num_sampled_tokens for g in again.cache.groups.values() for r in g.rollouts
                     if r.state is not RolloutState.READY)  # fmt: skip
    batches = again.steps(3)
    assert check_rewards([group for batch in batches for group in batch]) >= 12
    assert 0 < again.ledger.dropped[DropReason.RESTARTED].tokens <= unfinished


def test_plain_calls_are_plain_rollouts() -> None:
    """One call with the task's own prompt: the same tokens as without a workflow."""

    async def one(task: Any, episode: Any) -> float:
        reply = await episode.trajectory().chat([user("Hello")])
        return float(reply.token_ids.sum())

    run = Hosted(one)
    ours = [r for g in run.steps(1)[0] for r in g.rollouts]
    assert [r.rollout_id for r in ours] == ["0-0", "0-1", "1-0", "1-1"]
    assert all(r.stop_reason in (StopReason.EOS, StopReason.LENGTH) for r in ours)
    assert run.count(EventKind.OPEN) == 4


def test_an_agent_that_asks_for_nothing_has_no_reward_and_holds_nothing_up() -> None:
    async def idle(task: Any, episode: Any) -> float:
        if episode.episode_id.endswith("-0"):
            return 1.0
        return float(len((await episode.trajectory().chat([user("Hello")])).token_ids))

    run = Hosted(idle, group_size=3)
    for group in run.steps(1)[0]:
        first: Rollout = group.rollouts[0]
        assert first.num_tokens == 0 and first.reward is not None and first.reward.missing
        assert all(r.reward is not None and not r.reward.missing for r in group.rollouts[1:])


def test_what_fails_again_and_again_has_no_reward_and_the_run_goes_on() -> None:
    async def sometimes(task: Any, episode: Any) -> float:
        reply = await episode.trajectory().chat([user("Hello")])
        if episode.episode_id.endswith("-1"):
            raise KeyError("planned")
        return float(len(reply.token_ids))

    run = Hosted(sometimes, group_size=3, retries=2)
    for group in run.steps(1)[0]:
        assert [r.reward is not None and r.reward.missing for r in group.rollouts] == [False, True, False]
    assert run.ledger.dropped[DropReason.RESTARTED].rollouts == 4


def test_a_stop_ends_every_agent() -> None:
    ended = []

    async def hang(task: Any, episode: Any) -> float:
        await episode.trajectory().chat([user("Hello")])
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(episode.episode_id)
        return 0.0

    async def main() -> None:
        run = Hosted(hang)
        collecting = asyncio.ensure_future(run.driver.collect(0))
        for _ in range(300):
            await asyncio.sleep(0)
        run.driver.interrupt_for_good()
        assert await collecting is None
        await run.driver.abandon()
        run.ledger.check(run.cache)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(ended) == 4


def test_a_call_that_nobody_waits_for_ends_its_rollout_without_a_reward():
    class Hasty:
        async def __call__(self, task: Any, episode: Any) -> float:
            call = asyncio.ensure_future(episode.trajectory().chat([user("Begin")]))
            if episode.episode_id.endswith("-0"):
                await asyncio.sleep(0)  # the call has been made, and nothing has come of it yet
            else:
                await call
            return 1.0

    run = Hosted(Hasty(), group_size=3)
    group = run.steps(1)[0][0]
    assert [r.reward.score for r in group.rollouts if r.reward] == [None, 1.0, 1.0]
    assert all(r.num_tokens for r in group.rollouts)
