"""Runs of a workflow's function: whose turn a call is, what the end of it is worth, and what fails how."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from rollover.functions import FunctionError
from rollover.types import Reward, StopReason
from rollover.workflows.conversations import BudgetUsedUp, Call, CallRefused, Chats, Conversations
from rollover.workflows.protocol import WorkflowFunction, as_answer, as_reward
from unit.envs import templates
from unit.workflows.scripted_host import ScriptedHost

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
