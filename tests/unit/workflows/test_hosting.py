"""Workflows as episodes: hosting, clocks, roles, large calls."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import virtual_time
from fake_engine import FakeEngine
from rollover.config import Config
from rollover.config.load import load_config
from rollover.config.recipes import recipe
from rollover.engine.protocol import ExtendRequest
from rollover.functions import FunctionError
from rollover.recipes.solver_judge import LARGEST, choice, chosen, last_number, solver_judge
from rollover.tasks.source import SourceSetup, build_source
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, Segment, StopReason
from rollover.workflows.conversations import LARGE_CHARACTERS, BudgetUsedUp, Call, CallRefused, Chats, Conversations
from rollover.workflows.episodes import AgentClock, Episodes
from rollover.workflows.protocol import WorkflowFunction, as_answer, as_reward
from rollover.workflows.turns import EpisodeLimits
from unit.envs import templates
from unit.rollout.run import PARTIAL, Run
from unit.workflows.scripted_host import ScriptedHost
from virtual_time import VirtualLoop, run

# Episodes under the driver, on the fake engine: whatever agents do, each token is in one account, and every reward
# is that of its own tokens


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
    for rollout in (r for of in runs for group in of.groups for r in group.rollouts):
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


# Runs of a workflow's function: whose turn a call is, what the end of it is worth, and what fails how


USER = {"role": "user", "content": "What is 2+2?"}
MORE = {"role": "user", "content": "And 3+3?"}


def says(text: str) -> Any:
    return lambda before: text


def test_continuing_call_extends_its_rollout_as_rendered():
    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        first = await trajectory.chat(task.messages)
        await trajectory.chat([*task.messages, first.message, MORE])
        return 0.5 if first.text == "four" else 0.0

    host = ScriptedHost(talk, says("four"))
    assert host.run() == {"0-0": Reward(0.5)}
    [rollout] = host.rollouts.values()
    assert rollout.prompt == host.task_prompt and rollout.role == "policy"
    answer = {"role": "assistant", "content": "four"}
    whole = host.tokenizer.apply_chat_template([USER, answer, MORE, answer], tokenize=False)
    assert host.tokenizer.decode([*rollout.prompt.ids, *rollout.token_ids()]) == whole.removesuffix("\n")
    assert [segment.trainable for segment in rollout.segments] == [True, False, True]
    assert host.episodes.counts == {"episodes/done": 1, "turns/continued": 1}


def test_advantages_are_divided_among_contexts_with_the_reward():
    async def talk(episode: Any) -> float:
        solver, judge = episode.trajectory("solver"), episode.trajectory("judge")
        first = await solver.chat([USER])
        await solver.chat([USER, first.message, MORE])
        other = await solver.chat([MORE])
        for wrong in ({"a": 1.0}, [object()], {1.0}):
            with pytest.raises(ValueError, match="is a number, or a list with one for each turn"):
                solver.advantage = wrong
        solver.advantage = [0.5, -1, [0.25] * len(other.token_ids)]
        assert solver.advantage == (0.5, -1, (0.25,) * len(other.token_ids))
        await judge.chat([MORE])
        judge.advantage, judge.reward = np.float32(0.5), 2.0
        return {"solver": 1.0}

    host = ScriptedHost(talk, says("four"))
    assert host.run() == {
        "0-0": Reward(1.0, advantages=(0.5, -1)),
        "0-0.0.1": Reward(1.0, advantages=((0.25,) * host.rollouts["0-0.0.1"].num_tokens,)),
        "0-0.1.0": Reward(2.0, advantages=0.5),
    }


@pytest.mark.parametrize("how", ["timeout", "length"])
def test_episode_cut_off_before_its_advantage_is_missing(how: str):
    """Its score is the policy's doing, and yet there is nothing to train it with: that ends no run."""

    async def talk(task: Any, episode: Any) -> float:
        trajectory, messages = episode.trajectory(), list(task.messages)
        while True:
            reply = await trajectory.chat(messages)
            messages += [reply.message, MORE]
            if how == "timeout":
                await asyncio.sleep(60)

    limits: dict[str, Any] = {"max_turns": 3, "timeout_s": 0.1, "on_timeout": "score"}
    [plain] = ScriptedHost(talk, says("four"), **limits).run().values()
    assert plain.score == 0.0
    [reward] = ScriptedHost(talk, says("four"), precomputed=lambda role: role == "policy", **limits).run().values()
    assert reward.missing and "cut off before it had an advantage" in str(reward.error)


@pytest.mark.parametrize(
    ("template", "keeps_history", "reason"),
    [(templates.CHATML, False, "history"), (templates.QWEN3, True, "template")],
)
def test_broken_history_opens_a_rollout_of_the_same_trajectory(template: str, keeps_history: bool, reason: str):
    """The history is rewritten, or its template drops reasoning."""

    async def talk(episode: Any) -> float:
        trajectory = episode.trajectory()
        first = await trajectory.chat([USER])
        await trajectory.chat([USER, first.message, MORE] if keeps_history else [MORE])
        return 1.0

    host = ScriptedHost(talk, says("four"), template=template)
    assert host.run() == {"0-0": Reward(1.0), "0-0.0.1": Reward(1.0)}
    assert host.episodes.counts[f"turns/breaks/{reason}"] == 1


def test_distinct_errors_are_logged_a_limited_number_of_times():
    tries = []

    async def fail(task: Any, episode: Any) -> float:
        tries.append("x")
        raise KeyError("".join(tries))

    host = ScriptedHost(fail, says("four"), retries=100)
    host.run()
    assert len(tries) == 101 and 1 < len(host.said) < 30
    assert host.said[0].endswith("it is run again; later ones are counted (episodes/restarted, episodes/error)")


async def leaves(episode: Any) -> None:
    raise SystemExit(3)


async def quits(episode: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def gives_infinity(episode: Any) -> None:
    episode.trajectory().reward = float("inf")


async def rewards_a_silent_role(episode: Any) -> Any:
    episode.trajectory("judge")
    return {"judge": 1.0}


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (leaves, "SystemExit"),
        (quits, ""),
        (gives_infinity, "finite"),
        (rewards_a_silent_role, "'judge', which made no call: solver did"),
    ],
)
def test_failing_agent_is_restarted_then_missing(fails: Any, why: str):
    async def talk(episode: Any) -> Any:
        await episode.trajectory("solver").chat([USER])
        return await fails(episode)

    host = ScriptedHost(talk, says("four"), retries=1)
    [reward] = host.run().values()
    assert reward.missing and why in str(reward.error)
    assert host.restarts == 1 and host.episodes.counts["episodes/error"] == 1


@pytest.mark.parametrize(("on_timeout", "score"), [("missing", None), ("score", -0.5)])
def test_an_agent_that_never_ends_is_cut_off(on_timeout: str, score: float | None):
    async def hang(task: Any, episode: Any) -> float:
        await episode.trajectory().chat(task.messages)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)
        return 1.0

    host = ScriptedHost(hang, says("four"), timeout_s=0.1, on_timeout=on_timeout, timeout_score=-0.5)
    [reward] = host.run().values()
    assert reward.score == score and host.episodes.counts == {"episodes/timeout": 1}


def test_waiting_for_the_model_is_not_the_agents_time():
    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        await asyncio.gather(trajectory.chat(task.messages), trajectory.chat([MORE]))
        return 1.0

    host = ScriptedHost(talk, says("four"), timeout_s=0.3)
    host.delay_s = 0.8
    assert {r.score for r in host.run().values()} == {1.0}


def test_max_tokens_bounds_all_rollouts_and_parallel_calls():
    """Each of three answers has four tokens, the end of its turn among them."""

    def tokens(most: int, at_once: bool) -> tuple[list[int], dict[str, int]]:
        async def talk(episode: Any) -> float:
            trajectories = [episode.trajectory(role) for role in ("a", "b", "c")]
            if at_once:
                await asyncio.gather(*(trajectory.chat([USER]) for trajectory in trajectories))
            for trajectory in () if at_once else trajectories:
                await trajectory.chat([USER])
            return 1.0

        host = ScriptedHost(talk, says("four!"), max_tokens=most)
        host.run()
        return sorted(r.num_sampled_tokens for r in host.rollouts.values()), dict(host.episodes.counts)

    for at_once in (False, True):
        assert tokens(12, at_once) == ([4, 4, 4], {"episodes/done": 1})
        assert tokens(10, at_once) == ([2, 4, 4], {"episodes/done": 1})
        assert tokens(8, at_once) == ([4, 4], {"episodes/length": 1})


def test_calls_with_limits_share_max_tokens_without_waiting():
    async def talk(episode: Any) -> float:
        calls = [episode.trajectory(role).chat([USER], max_tokens=2) for role in ("a", "b")]
        assert [len(reply.token_ids) for reply in await asyncio.gather(*calls)] == [2, 2]
        return 1.0

    host = ScriptedHost(talk, says("four!"), max_tokens=4)
    host.hold = asyncio.Event()

    async def main() -> None:
        playing = asyncio.ensure_future(host.play())
        while len(host.rollouts) < 2:
            await asyncio.sleep(0)
        assert host.hold is not None
        host.hold.set()
        await playing

    asyncio.run(asyncio.wait_for(main(), 5))
    assert host.episodes.counts == {"episodes/done": 1}


def test_an_answer_by_roles_rewards_each_but_what_has_its_own():
    async def talk(episode: Any) -> Any:
        for role in ("solver", "solver", "judge", "other"):
            trajectory = episode.trajectory(role)
            await trajectory.chat([USER])
        trajectory.reward = 0.75
        return {"solver": 1, "judge": Reward(0.5), "other": 0.0}

    rewards = ScriptedHost(talk, says("four")).run()
    assert [rewards[i] for i in ("0-0", "0-0.1.0", "0-0.2.0", "0-0.3.0")] == [
        Reward(1.0), Reward(1.0), Reward(0.5), Reward(0.75)
    ]  # fmt: skip


def test_limits_of_a_call_are_kept():
    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        first = await trajectory.chat(task.messages, max_tokens=2)
        assert len(first.token_ids) == 2 and first.stop_reason.value == "length"
        second = await trajectory.chat([*task.messages, first.message, MORE], stop=["r!"])
        assert second.text == "fou"
        with pytest.raises(BudgetUsedUp):
            await trajectory.chat([{"role": "user", "content": "long " * 500}])
        with pytest.raises(CallRefused):
            await trajectory.chat([{"role": "user", "content": [{"type": "image_url"}]}])
        return 1.0

    host = ScriptedHost(talk, says("four!"), max_prompt_tokens=200)
    host.run()
    assert list(host.rollouts) == ["0-0"]


def test_a_call_given_up_has_no_reward_and_no_other_suffers():
    async def talk(task: Any, episode: Any) -> float:
        given_up, kept = episode.trajectory("a"), episode.trajectory("b")
        with suppress(TimeoutError):
            await asyncio.wait_for(given_up.chat(task.messages), 0.05)
        await kept.chat(task.messages)
        return 1.0

    host = ScriptedHost(talk, says("four"))
    host.delay_s = 0.2
    rewards = host.run()
    assert rewards["0-0"].missing and "gave up" in str(rewards["0-0"].error)
    assert host.rollouts["0-0"].stop_reason is StopReason.ABANDONED
    assert rewards["0-0.1.0"] == Reward(1.0) and host.rollouts["0-0.1.0"].stop_reason is StopReason.EOS


def test_agent_that_retries_in_a_loop_does_not_block_others():
    async def asks_on(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        await trajectory.chat(task.messages)
        while not ended.is_set():
            try:
                await trajectory.chat("no messages")
            except BaseException:
                refused.append(1)
        return 1.0

    ended, refused = asyncio.Event(), list[int]()
    host = ScriptedHost(asks_on, says("four"), timeout_s=0.2)
    play = host.play

    async def play_and_free() -> None:
        await play()
        ended.set()

    host.play = play_and_free  # type: ignore[method-assign]
    [reward] = host.run().values()
    assert reward.missing and host.episodes.counts == {"episodes/timeout": 1} and len(refused) > 1


def test_what_is_no_workflow_is_refused_with_the_fix():
    def plain(task: Any) -> None: ...
    async def strange(task: Any, dataset: Any) -> None: ...
    async def fine(task: Any, more: int = 1, **others: Any) -> None: ...

    with pytest.raises(ValueError, match="Set workflow.num_processes.*async def"):
        WorkflowFunction(plain, "mine")
    with pytest.raises(ValueError, match="'dataset'.*base_url"):
        WorkflowFunction(strange, "mine")
    assert WorkflowFunction(fine, "mine").wanted == ["task"]


def test_what_is_no_reward_is_refused():
    async def talk(task: Any) -> str:
        return "good"

    with pytest.raises(FunctionError, match="'good'"):
        asyncio.run(WorkflowFunction(talk, "mine")({"task": None}))
    assert as_reward(True) == Reward(1.0) and as_reward(2) == Reward(2.0)
    assert as_reward(float("nan")) is None and as_reward("1") is None
    for wrong in ("1", {"a": "1"}, {"": None}, {1: 1.0}, [1.0]):
        with pytest.raises(ValueError):
            as_answer(wrong)


def test_rewards_of_turns_go_to_the_contexts_that_have_the_turns() -> None:
    def of(reward: Reward) -> dict[str, Reward]:
        async def talk(episode: Any) -> None:
            trajectory = episode.trajectory()
            first = await trajectory.chat([USER])
            await trajectory.chat([USER, first.message, MORE])
            await trajectory.chat([MORE])
            trajectory.reward = reward

        return ScriptedHost(talk, says("four")).run()

    assert of(Reward(1.0, turns=[0.1, 0.2, 0.3], advantages=[1.0, 2.0, [3.0]])) == {
        "0-0": Reward(1.0, turns=[0.1, 0.2], advantages=[1.0, 2.0]),
        "0-0.0.1": Reward(1.0, turns=[0.3], advantages=[[3.0]]),
    }
    wrong = of(Reward(1.0, turns=[0.1, 0.2]))
    assert all(r.missing and "2 rewards for 3 turns" in str(r.error) for r in wrong.values())


def test_a_chat_in_another_thread_is_refused():
    async def threaded(episode: Any) -> float:
        trajectory = episode.trajectory()
        with pytest.raises(RuntimeError, match="base_url"):
            await asyncio.to_thread(lambda: asyncio.run(trajectory.chat([USER])))
        return 1.0 + len((await trajectory.chat([USER])).text)

    assert ScriptedHost(threaded, says("four")).run() == {"0-0": Reward(5.0)}


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": None},
        {"messages": "hello"},
        {"messages": [1]},
        {"messages": USER},
        {"max_tokens": 0},
        {"max_tokens": "2"},
        {"tools": "tool"},
        {"stop": [""]},
        {"stop": [1]},
    ],
)
def test_a_call_with_arguments_that_are_none_is_refused(asked: dict[str, Any]):
    async def strange(episode: Any) -> float:
        trajectory, [name] = episode.trajectory(), asked
        with pytest.raises(CallRefused, match=f"{name} must be"):
            await trajectory.chat(**({"messages": [USER]} | asked))
        await trajectory.chat([USER], stop="never")
        return 1.0

    assert ScriptedHost(strange, says("four")).run() == {"0-0": Reward(1.0)}


def test_lone_surrogate_is_replaced_and_deep_nesting_refused():
    nested: Any = []
    for _ in range(5000):
        nested = [nested]

    async def strange(episode: Any) -> float:
        trajectory, asked = episode.trajectory(), host.gateway.call
        await asked(trajectory.api_key, "policy", Call(prompt="a \ud800 b"))
        for more in ({"messages": [USER | {"name": nested}]}, {"messages": [USER], "tools": [{"function": nested}]}):
            with pytest.raises(CallRefused, match="nested too deeply"):
                await trajectory.chat(**more)
        await trajectory.chat([{"role": "user", "content": "\udcff"}])
        return 1.0

    host = ScriptedHost(strange, says("four"))
    assert [reward.score for reward in host.run().values()] == [1.0, 1.0]
    assert host.tokenizer.decode(host.rollouts["0-0"].prompt.ids) == "a \ufffd b"


@pytest.mark.parametrize("wrong", [100, -1, 2**70])
def test_a_token_id_that_the_model_does_not_have_is_refused(wrong: int):
    chats = Chats(templates.tokenizer(templates.CHATML), vocab_size=100)
    with pytest.raises(CallRefused, match=f"{wrong} is no token id: those of the model are 0 to 99"):
        Conversations(chats).place_of(Call(prompt=(5, wrong)))
    assert Conversations(chats).place_of(Call(prompt=(5, 99)))


def test_once_waits_for_a_call_of_a_failed_run():
    done, may_end, runs = list[int](), asyncio.Event(), list[int]()

    async def effect() -> int:
        done.append(1)
        await may_end.wait()
        return len(done)

    async def fails() -> None:
        raise ValueError("as planned")

    async def talk(episode: Any) -> float:
        runs.append(1)
        if len(runs) == 1:
            await asyncio.gather(episode.once("effect", effect), fails())  # it cancels nothing
        may_end.set()
        found = await episode.once("effect", effect)
        await episode.trajectory().chat([USER])
        return float(found)

    host = ScriptedHost(talk, says("four"))
    assert host.run() == {"0-0": Reward(1.0)} and host.restarts == 1
    assert len(done) == 1


# An agent's own time: not that in which it waits for the model, nor that in which the event loop stood still


@pytest.mark.parametrize("limit_s", [0.4, 10.0, 300.0])
def test_the_limit_is_that_of_the_agents_own_seconds(limit_s: float) -> None:
    async def body() -> float:
        loop, timed_out = asyncio.get_running_loop(), asyncio.Event()
        clock = AgentClock(limit_s, timed_out.set)
        for _ in range(3):
            await asyncio.sleep(limit_s / 4)
            with clock.waiting():
                await asyncio.sleep(10 * limit_s)
        began = loop.time()
        assert not timed_out.is_set()
        await timed_out.wait()
        return loop.time() - began

    assert run(body()) == pytest.approx(limit_s / 4)


def test_agent_clock_skips_blocked_event_loop() -> None:
    """As a trainer in its thread, or another agent, lets it: what came for the agent meanwhile is still to be read."""

    async def body() -> float:
        loop, timed_out = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, VirtualLoop)
        clock = AgentClock(60.0, timed_out.set)
        for _ in range(3):
            loop.let_pass(200.0)
            await asyncio.sleep(5.0)
        assert not timed_out.is_set()
        began = loop.time()
        await timed_out.wait()
        clock.end()
        return loop.time() - began

    assert 30.0 < run(body()) <= 45.0


def test_agent_that_blocks_the_event_loop_times_out() -> None:
    async def body() -> int:
        loop, timed_out = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, VirtualLoop)
        AgentClock(60.0, timed_out.set)
        for num in itertools.count():
            if timed_out.is_set():
                return num
            loop.let_pass(200.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        raise AssertionError

    assert run(body()) <= 60


def test_after_its_end_nothing_is_said() -> None:
    async def body() -> None:
        timed_out = asyncio.Event()
        clock = AgentClock(5.0, timed_out.set)
        await asyncio.sleep(1)
        clock.end()
        with clock.waiting():
            await asyncio.sleep(10)
        await asyncio.sleep(10)
        assert not timed_out.is_set()
        unlimited = AgentClock(0.0, timed_out.set)
        await asyncio.sleep(10**6)
        unlimited.end()
        assert not timed_out.is_set()

    run(body())


# The recipe `solver_judge`: who is asked what, what each role is worth, and which problems there are


CONFIG: Config = load_config([recipe("solver_judge")]).config
WRONG_THEN_RIGHT = ["12+7=18", "12+7 is 19"]


def scores(answers: list[str], verdict: str) -> dict[str, list[float | None]]:
    """By role, of an episode in which the solvers and the judge say so."""
    left = list(answers)

    def says(before: str) -> str:
        return verdict if "Which is right" in before else left.pop(0)

    host = ScriptedHost(solver_judge, says, max_turns=CONFIG.workflow.max_turns)
    host.task = replace(host.task, columns={"question": "What is 12+7?", "answer": "19"})
    found: dict[str, list[float | None]] = {"solver": [], "judge": []}
    for rollout_id, reward in host.run().items():
        found[host.rollouts[rollout_id].role].append(reward.score)
    judge = next(r for r in host.rollouts.values() if r.role == "judge")
    numbers = [last_number(answer) for answer in answers]
    shown = host.tokenizer.decode(judge.prompt.ids)
    assert any(choice("What is 12+7?", order)["content"] in shown for order in (numbers, numbers[::-1]))
    return {role: sorted(of, key=str) for role, of in found.items()}


@pytest.mark.parametrize(
    ("answers", "verdict", "of_solvers", "of_judge"),
    [
        (["19", "12+7=19"], "2", [1.0, 1.0], 1.0),
        (["I cannot", "18"], "1", [0.0, 0.0], 0.0),
        (WRONG_THEN_RIGHT, "both", [0.0, 1.0], 0.0),
    ],
)
def test_each_role_is_scored_by_what_it_said(
    answers: list[str], verdict: str, of_solvers: list[float], of_judge: float
) -> None:
    assert scores(answers, verdict) == {"solver": of_solvers, "judge": [of_judge]}


def test_one_verdict_of_two_is_right_where_one_solver_is() -> None:
    worth = [scores(WRONG_THEN_RIGHT, verdict)["judge"][0] for verdict in ("1", "2")]
    assert sorted(worth, key=str) == [0.0, 1.0]


def test_what_counts_as_an_answer_and_as_a_verdict() -> None:
    assert [last_number(text) for text in ("2+3=5", "-4", "it is five", "7.")] == ["5", "-4", "none", "7"]
    answers = ("18", "19")
    assert [chosen(text, answers) for text in ("1", " 2: 19", "12", "19", "", "(1)")] == ["18", "19", "", "", "", "18"]


def test_the_problems_are_sums_that_are_the_same_each_time() -> None:
    source = build_source(SourceSetup(CONFIG.tasks.sources[0], "sums", "", CONFIG.run.seed))
    for index in range(50):
        task = source.problem(index)
        numbers = [int(part) for part in str(task.columns["question"])[len("What is ") : -1].split("+")]
        assert task.columns["answer"] == str(sum(numbers)) and 1 <= min(numbers) <= max(numbers) <= LARGEST
        assert task == source.problem(index) and task.prompt == task.columns["question"]


# Calls with much text: refused without a look where it cannot fit, and tokenised beside the event loop


MORE_CALLS = {"role": "user", "content": "More"}
LONG = {"role": "user", "content": "a long story " * (LARGE_CHARACTERS // 10)}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each call's place was found: the names of the threads."""
    found: list[str] = []
    place_of = Conversations.place_of

    def told(self: Conversations, *args: Any):
        found.append(threading.current_thread().name)
        return place_of(self, *args)

    monkeypatch.setattr(Conversations, "place_of", told)
    return found


@pytest.mark.parametrize(
    "call",
    [
        Call(messages=({"role": "user", "content": "x" * 10**6},)),
        Call(messages=({"role": "user", "content": [{"type": "text", "text": "x" * 10**6}]},)),
        Call(messages=(MORE_CALLS,), tools=({"type": "function", "function": {"name": "a" * 10**6}},)),
        Call(messages=(MORE_CALLS,) * 10**5),
        Call(prompt="x" * 10**6),
        Call(prompt=(7,) * 10**5),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_tokenised(call: Call, threads: list[str]) -> None:
    refused: list[str] = []

    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        try:
            await host.gateway.call(trajectory.api_key, "policy", call)
        except BudgetUsedUp as error:
            refused.append(str(error))
        await trajectory.chat(task.messages)
        return 1.0

    host = ScriptedHost(talk, says("four"))
    assert host.run() == {"0-0": Reward(1.0)}
    assert "do not fit into the" in refused[0] and len(threads) == 1, "the second call's place alone was looked for"


def test_large_texts_are_tokenised_in_a_thread_as_in_the_loop(threads: list[str]) -> None:
    async def talk(task: Any, episode: Any) -> float:
        trajectory = episode.trajectory()
        first = await trajectory.chat([LONG])
        large, small = await asyncio.gather(
            trajectory.chat([LONG, first.message, LONG]), trajectory.chat([LONG, first.message, MORE_CALLS])
        )
        assert len(large.prompt_ids) > len(small.prompt_ids)
        return 1.0

    host = ScriptedHost(talk, says("four"), max_prompt_tokens=10**6, max_new_tokens=10**6)
    assert all(reward == Reward(1.0) for reward in host.run().values())
    assert len(threads) == 3 and all(name.startswith("large calls") for name in threads)
    continued, branch = host.rollouts.values()
    assert continued.prompt == host.chats.for_tools(()).prompt([LONG])
    [written] = [s for s in continued.segments if not s.trainable]
    turn = [*continued.segments[0].token_ids]
    assert written.token_ids.tolist() == list(host.chats.for_tools(()).continuation(turn, [LONG]).ids)
    assert branch.prompt.ids[: len(continued.prompt)] == continued.prompt.ids
    assert host.episodes.counts["turns/continued"] == host.episodes.counts["turns/breaks/branch"] == 1
