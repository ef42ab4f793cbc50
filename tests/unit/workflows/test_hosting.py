"""Episodes under the driver, on the fake engine: whatever agents do, each token is in one account, and every reward is
that of its own tokens."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import virtual_time
from fake_engine import FakeEngine
from rollover.engine.protocol import ExtendRequest
from rollover.types import DropReason, Group, Rollout, RolloutState, Segment
from rollover.workflows.conversations import BudgetUsedUp, Chats
from rollover.workflows.episodes import Episodes
from rollover.workflows.protocol import WorkflowFunction
from rollover.workflows.turns import EpisodeLimits
from unit.envs import templates
from unit.rollout.run import PARTIAL, Run

TOKENIZER = templates.tokenizer(templates.CHATML)
MAX_NEW_TOKENS = 300
ROLES = ("solver", "judge", "policy")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Agents:
    """A workflow that does something else in every Episode, as `seed` says. `failing`: share of tries that raise.
    `erring`: share of calls before which it decides otherwise than it did. `pauses`: turns of the event loop between
    calls, which are others in every run; a 1000 is seconds."""

    def __init__(
        self,
        seed: int = 0,
        failing: float = 0.0,
        erring: float = 0.0,
        pauses: Sequence[int] = (0, 1, 5),
        most_calls: int = 4,
    ) -> None:
        self.seed, self.failing, self.tries = seed, failing, random.Random(seed)
        self.erring, self.pauses, self.most_calls = erring, pauses, most_calls

    async def __call__(self, task: Any, episode: Any) -> None:
        fails = self.tries.random() < self.failing
        rng = random.Random(f"{self.seed}/{episode.episode_id}")
        trajectories = [episode.trajectory(rng.choice(ROLES)) for _ in range(rng.randint(1, 3))]
        plays = [(of, rng.randint(1, self.most_calls), random.Random(rng.random())) for of in trajectories]
        if rng.random() < 0.5:
            await asyncio.gather(*(self.play(*play) for play in plays))
        else:
            for play in plays:
                await self.play(*play)
        if fails:
            raise ValueError("as planned")

    async def play(self, trajectory: Any, num_calls: int, rng: random.Random) -> None:
        """The reward is the sum of the ids of all tokens that the trajectory got."""
        messages, total = [user(f"Begin {rng.random()}")], 0
        for _ in range(num_calls):
            if (pause := self.tries.choice(self.pauses)) == 1000:
                await asyncio.sleep(pause)
            for _ in range(pause):
                await asyncio.sleep(0)
            if self.tries.random() < self.erring:
                messages = [*messages[:-1], user(f"Else {self.tries.random()}")]
            calls = [trajectory.chat(messages) for _ in range(rng.choice([1, 1, 1, 2]))]
            replies = await asyncio.gather(*calls)
            total += sum(int(reply.token_ids.sum()) for reply in replies)
            if rng.random() < 0.7:
                messages = [*messages, rng.choice(replies).message, user("More")]
            else:
                messages = [user(f"Other {rng.random()}")]
        trajectory.reward = float(total)


class Turns(FakeEngine):
    """Every turn ends after 3 to 32 tokens."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        super().__init__(self.ends, vocab_size=len(TOKENIZER), turns_between_steps=4)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        self.ends[request.rollout_id] = request.text_start + 3 + (request.seed + request.text_start) % 30
        return await super().extend(request)


class Hosted(Run):
    """A driver whose rollouts are played by `agents`."""

    def __init__(
        self,
        agents: Any,
        *,
        retries: int = 1,
        timeout_s: float = 60.0,
        max_tokens: int = 0,
        resumes: bool = True,
        engine: Turns | None = None,
        **config: Any,
    ) -> None:
        async def workflow(task: Any, episode: Any) -> Any:
            return await agents(task, episode)

        limits = EpisodeLimits(
            MAX_NEW_TOKENS, 2000, timeout_s=timeout_s, on_timeout="score", retries=retries, max_tokens=max_tokens,
            max_turns=200 if max_tokens else 16,
        )  # fmt: skip
        chats, function = Chats(TOKENIZER), WorkflowFunction(workflow, "mine")
        self.episodes = Episodes(
            function, chats, limits, resumes=resumes, keep=lambda *told: self.lifecycle.keep(*told)
        )
        self.groups: list[Group] = []
        super().__init__(
            engine=engine or Turns(),
            environment=self.episodes,
            **{"max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": [chats.for_tools(()).end_of_turn]} | config,
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


def killed_at_random(story: Sequence[tuple[str, int]], make: Callable[[], Hosted], steps: int) -> list[Hosted]:
    """A run that makes `steps` steps, and is cut off as the story says: how, and after so many turns of the event
    loop. Returns the processes, each with the `groups` that it trained."""
    processes = [make()]
    for how, turns in story:
        run = processes[-1]

        async def until_cut_off(run: Hosted = run, how: str = how, turns: int = turns) -> None:
            async def train() -> None:
                while (groups := await run.step()) is not None:
                    run.groups += groups

            training = asyncio.ensure_future(train())
            for _ in range(turns):
                await asyncio.sleep(0)
            if how == "interrupt":
                run.driver.interrupt_for_good()
                await training
            training.cancel()
            await asyncio.wait([training])
            assert training.cancelled() or training.exception() is None
            run.ledger.check(run.cache)

        virtual_time.run(until_cut_off())
        processes.append(make())
        processes[-1].load(run.save())

    async def to_the_end() -> None:
        while sum(len(run.groups) for run in processes) < 2 * steps:
            groups = await processes[-1].step()
            assert groups
            processes[-1].groups += groups
        await processes[-1].driver.abandon()

    virtual_time.run(to_the_end())
    return processes


Found = dict[tuple[int, int, int | None], tuple[list[int], float | None]]


def tokens_of(groups: list[Group]) -> Found:
    """Tokens and score, by group, sibling and the call that opened the rollout: parallel ones come in any order."""
    rollouts = [r for group in groups for r in group.rollouts]
    return {(r.group_id, r.sibling, r.turn_key): (r.token_ids(), r.reward and r.reward.score) for r in rollouts}


STORIES = st.lists(st.tuples(st.sampled_from(["kill", "interrupt"]), st.integers(0, 400)), min_size=1, max_size=3)


@functools.cache
def uninterrupted(seed: int) -> Found:
    [run] = killed_at_random([], lambda: Hosted(Agents(seed, most_calls=2)), 12)
    return tokens_of(run.groups)


def for_many(num: int, **strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Runs a check with so many examples of these."""
    cases = settings(max_examples=num, deadline=None, phases=[Phase.explicit, Phase.generate])
    return lambda check: cases(given(**strategies)(check))()


FEW_OR_MANY = pytest.mark.parametrize("num", [3, pytest.param(60, marks=pytest.mark.slow)])


@FEW_OR_MANY
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_cut_off_equals_one_that_was_not(mode: str, num: int) -> None:
    """Its agents do the same again, in another order: every turn is served, or goes on where it was."""

    @for_many(num, seed=st.integers(0, 3), max_running=st.sampled_from([None, 3]), story=STORIES)
    def check(seed: int, max_running: int | None, story: list[tuple[str, int]]) -> None:
        number = iter(range(100))

        def make() -> Hosted:
            agents = Agents(seed, most_calls=2)  # all of them are within workflow.max_turns, in whatever order
            agents.tries = random.Random(next(number))
            return Hosted(agents, max_running=max_running, **MODES[mode])

        runs = killed_at_random(story, make, 3)
        found = tokens_of([group for run in runs for group in run.groups])
        whole = uninterrupted(seed)
        assert len(found.keys() & whole.keys()) >= 8
        assert {i: of for i, of in found.items() if i in whole} == {i: of for i, of in whole.items() if i in found}
        assert all(run.ledger.dropped[DropReason.RESTARTED].tokens == 0 for run in runs)
        assert all(run.episodes.counts["episodes/diverged"] == 0 for run in runs)


@FEW_OR_MANY
@pytest.mark.parametrize("mode", MODES)
def test_random_agents_after_a_kill_keep_the_ledger_balanced(mode: str, num: int) -> None:
    @for_many(
        num,
        seed=st.integers(0, 2**20),
        erring=st.sampled_from([0.1, 1.0]),
        failing=st.sampled_from([0.0, 0.3]),
        pauses=st.sampled_from([(0, 1, 5), (0, 1, 5) * 4 + (1000,)]),
        max_running=st.sampled_from([None, 3]),
        story=STORIES | st.just([]),
    )
    def check(seed: int, erring: float, failing: float, pauses: Any, max_running: int | None, story: Any) -> None:
        numbers = iter(range(seed, seed + 10))

        def make() -> Hosted:
            agents = Agents(seed, failing, erring, pauses)
            agents.tries = random.Random(next(numbers))
            return Hosted(agents, timeout_s=5.0, retries=3, group_size=4, max_running=max_running, **MODES[mode])

        runs = killed_at_random(story, make, 3)
        check_rewards([group for run in runs for group in run.groups])
        assert all(run.ledger.dropped[DropReason.RESTARTED].groups == 0 for run in runs)


def test_what_an_agent_decides_otherwise_is_dropped_and_counted() -> None:
    asked = 0

    async def fickle(task: Any, episode: Any) -> None:
        nonlocal asked
        asked += 1
        trajectory = episode.trajectory()
        first = await trajectory.chat([user("Hello")])
        second = await trajectory.chat([user("Hello"), first.message, user(f"This is run {asked}")])
        trajectory.reward = float(first.token_ids.sum() + second.token_ids.sum())

    runs = killed_at_random([("interrupt", 150)], lambda: Hosted(fickle, **PARTIAL), 3)
    check_rewards([group for run in runs for group in run.groups])
    lost, counts = runs[-1].ledger.dropped[DropReason.RESTARTED], runs[-1].episodes.counts
    assert 0 < counts["episodes/diverged"] <= counts["episodes/replayed"]
    assert lost.tokens > 0 and lost.rollouts == 0, "the first turns stay"
    assert counts["turns/breaks/branch"] == counts["episodes/diverged"]


def test_episode_that_repeats_no_call_keeps_an_empty_rollout() -> None:
    begun: set[str] = set()

    async def once_only(task: Any, episode: Any) -> float:
        if episode.episode_id in begun and episode.episode_id.endswith("-0"):
            return 1.0
        begun.add(episode.episode_id)
        trajectory = episode.trajectory()
        await asyncio.gather(trajectory.chat([user("Hello")]), trajectory.chat([user("You")]))
        await trajectory.chat([user("More")])
        return 1.0

    runs = killed_at_random([("interrupt", 100)], lambda: Hosted(once_only, group_size=3, **PARTIAL), 2)
    episodes: dict[tuple[int, int], list[Rollout]] = {}
    for rollout in (r for run in runs for group in run.groups for r in group.rollouts):
        episodes.setdefault((rollout.group_id, rollout.sibling), []).append(rollout)
    empty = [of for of in episodes.values() if not all(r.num_tokens for r in of)]
    assert empty and all(len(of) == 1 and of[0].sibling == 0 for of in empty)
    assert {of[0].reward and of[0].reward.error for of in empty} == {"the workflow made no model call"}
    for of in episodes.values():
        if of not in empty:
            assert len(of) == 3 and {r.reward and r.reward.score for r in of} == {1.0}
    held = [r for group in runs[0].cache.groups.values() for r in group.rollouts]
    unasked = sum(r.num_sampled_tokens for r in held if not r.sibling and r.state is not RolloutState.READY)
    assert runs[-1].ledger.dropped[DropReason.RESTARTED].tokens == unasked > 0


class Counted(Turns):
    """Counts the tokens of every Episode, whatever becomes of them."""

    def __init__(self, sampled: Counter[str]) -> None:
        super().__init__()
        self.sampled = sampled

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        segments = await super().extend(request)
        self.sampled[request.rollout_id.partition(".")[0]] += sum(map(len, segments))
        return segments


@pytest.mark.parametrize(("turns", "fickle"), [(90, False), (150, True)])
def test_tokens_of_an_episode_are_bounded_over_a_kill(turns: int, fickle: bool) -> None:
    """It asks two equal questions at a time until there are no tokens left."""
    asked, sampled = 0, Counter[str]()

    async def talkative(task: Any, episode: Any) -> float:
        nonlocal asked
        asked += 1
        with suppress(BudgetUsedUp):
            for number in itertools.count():
                question = [user(f"Question {number} {asked if fickle else ''}")]
                calls = [episode.trajectory().chat(question) for _ in range(2)]
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome
        return 1.0

    def make() -> Hosted:
        return Hosted(talkative, max_tokens=120, engine=Counted(sampled), **PARTIAL)

    runs = killed_at_random([("interrupt", turns)], make, 2)
    trained = {f"{r.group_id}-{r.sibling}" for run in runs for g in run.groups for r in g.rollouts}
    assert runs[-1].episodes.counts["episodes/replayed"] > 0
    assert {sampled[episode] for episode in trained} == {120} and max(sampled.values()) == 120


def test_what_is_done_once_is_not_done_again() -> None:
    done: list[str] = []
    failed: set[str] = set()

    async def careful(task: Any, episode: Any) -> float:
        async def effect() -> dict[str, Any]:
            await asyncio.sleep(0)
            done.append(episode.episode_id)
            return {"number": random.random(), "pair": (1, 2)}

        first, same = await asyncio.gather(episode.once("effect", effect), episode.once("effect", effect))
        assert first == same and first["pair"] == [1, 2]
        first["pair"].append(3)
        trajectory = episode.trajectory()
        reply = await trajectory.chat([user(f"Draw {first['number']}")])
        if episode.episode_id not in failed and episode.episode_id.endswith("-1"):
            failed.add(episode.episode_id)
            raise ValueError("tried again")
        return float(reply.token_ids.sum())

    runs = killed_at_random([("kill", 120), ("interrupt", 130)], lambda: Hosted(careful, **PARTIAL), 3)
    assert len(done) == len(set(done)) >= 12
    assert all(run.episodes.counts["episodes/diverged"] == 0 for run in runs)
    assert sum(run.episodes.counts["episodes/replayed"] for run in runs) > 0


@pytest.mark.parametrize(
    ("made", "why"),
    [(lambda: {1, 2}, "must be a JSON value"), (lambda: "x" * 70_000, "65,536"), (lambda: float("nan"), "JSON")],
)
def test_what_cannot_be_kept_is_said(made: Any, why: str) -> None:
    async def agent(episode: Any) -> float:
        with pytest.raises(ValueError, match=f"what once\\('it', ...\\) keeps.*{why}"):
            await episode.once("it", made)
        return float(await episode.once("it", lambda: 2))

    async def solve(task: Any, episode: Any) -> float:
        await episode.trajectory().chat([user("Hello")])
        return await agent(episode)

    assert {r.reward.score for g in Hosted(solve).steps(1)[0] for r in g.rollouts if r.reward} == {2.0}


def test_a_run_that_was_killed_begins_its_episodes_again() -> None:
    run = Hosted(Agents(5), resumes=False, **PARTIAL)
    run.steps(1)
    run.die()
    saved = run.save()
    again = Hosted(Agents(5), resumes=False, **PARTIAL)
    again.load(saved)
    unfinished = sum(r.num_sampled_tokens for g in again.cache.groups.values() for r in g.rollouts
                     if r.state is not RolloutState.READY)  # fmt: skip
    batches = again.steps(3)
    assert check_rewards([group for batch in batches for group in batch]) >= 12
    assert 0 < again.ledger.dropped[DropReason.RESTARTED].tokens <= unfinished


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


def test_abandoned_call_ends_its_rollout_without_reward():
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
