"""Episodes of unchanged verifiers environments (tests/tasksets): what they ask is played turn by turn, what they reward
is whose, and what fails is named."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollover.config.load import load_config
from rollover.config.tasks import TaskSourceConfig
from rollover.config.workflow import WorkflowConfig
from rollover.plugins.verifiers.package import import_verifiers, load_tasks
from rollover.plugins.verifiers.source import taskset_source
from rollover.plugins.verifiers.workflow import Sessions, VerifiersWorkflow
from rollover.tasks.source import SourceSetup
from rollover.tasks.split import SplitName
from rollover.tasks.stream import TaskStream
from rollover.types import Reward, Rollout, SamplingParams, StopReason
from unit.workflows.scripted_host import Policy, ScriptedHost

TASKSETS = Path(__file__).parents[3] / "tasksets"
needs_verifiers = pytest.mark.verifiers
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 30}}</tool_call>'


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package of tasksets is: for this process, and for the servers of tools that verifiers starts."""
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS), prepend=":")


class Host(ScriptedHost):
    """Plays episodes of a taskset, `num` siblings at once."""

    def __init__(self, name: str, policy: Policy, num: int = 1, task: int = 1, **settings: Any) -> None:
        limits = settings.pop("limits", {})
        config = WorkflowConfig(verifiers=name, **settings)
        super().__init__(VerifiersWorkflow(config, SamplingParams()), policy, **limits)
        self.num, self.left = num, num
        self.source = taskset_source(SourceSetup(TaskSourceConfig(kind="verifiers", name=name), name, "exact_match", 0))
        self.task = self.source.problem(task)
        self.task_prompt = self.chats.for_tools(()).prompt(self.task.messages or ())
        self.seconds = 0.0

    def run(self) -> dict[str, Reward]:
        asyncio.run(asyncio.wait_for(self.served(), 120))
        return self.rewards

    async def served(self) -> None:
        try:
            await self.episodes.start()
            begun = time.perf_counter()
            await self.play()
            self.seconds = time.perf_counter() - begun
        finally:
            await self.episodes.close()

    def _begin(self) -> None:
        self.rollouts.clear()
        for sibling in range(self.num):
            self.episodes.begin(Rollout(0, sibling, self.task, prompt=self.task_prompt))

    def _on_end(self) -> None:
        self.left -= 1
        if not self.left:
            self.over.set()

    def text(self, rollout: Rollout) -> str:
        return self.tokenizer.decode([*rollout.prompt.ids, *rollout.token_ids()])


@needs_verifiers
def test_single_turn_rollout_gets_weighted_rewards() -> None:
    host = Host("digits-taskset", lambda before: "four 44", task=7)
    rewards = host.run()
    [rollout] = host.rollouts.values()
    assert rollout.prompt == host.task_prompt and rollout.role == "policy" and "count to 7" in host.text(rollout)
    assert rewards == {"0-0": Reward(0.5 * 0.2 + 1.0, {"digits": 0.2, "short": 1.0, "length": 7.0})}
    assert host.episodes.counts == {"episodes/done": 1} and not host.said


@needs_verifiers
def test_tool_answer_continues_the_rollout() -> None:
    host = Host("adder-taskset", lambda before: "It is 31" if "31" in before else CALL)
    rewards = host.run()
    [rollout] = host.rollouts.values()
    assert [segment.trainable for segment in rollout.segments] == [True, False, True]
    assert "31" in host.tokenizer.decode(rollout.segments[1].token_ids.tolist())
    assert rewards == {"0-0": Reward(1.0, {"right": 1.0, "num_calls": 1.0})}
    assert host.episodes.counts == {"episodes/done": 1, "turns/continued": 1}


@needs_verifiers
def test_invalid_tool_call_is_reported_to_the_policy() -> None:
    wrong = CALL.replace('"add"', '"divide"')
    host = Host("adder-taskset", lambda before: "I give up" if "no tool" in before else wrong)
    assert host.run() == {"0-0": Reward(0.0, {"right": 0.0, "num_calls": 1.0})}


@needs_verifiers
def test_two_roles_get_their_own_rewards() -> None:
    def policy(before: str) -> str:
        return "a 1 and a 2" if "Right?" in before else "yes" * 5 if "sure" in before else "no"

    host = Host("debate-taskset", policy)
    rewards = host.run()
    of_role = {rollout.role: rollout for rollout in host.rollouts.values()}
    assert of_role.keys() == {"solver", "judge"} and len(host.rollouts) == 2
    solver, judge = of_role["solver"], of_role["judge"]
    assert [segment.trainable for segment in solver.segments] == [True, False, True]
    assert "Right? yesyes" in host.text(judge) and "sure" not in host.text(judge)
    assert rewards[solver.rollout_id].score == 15 / 40 and rewards[judge.rollout_id].score == 0.2


@needs_verifiers
def test_concurrent_seats_get_their_own_rewards() -> None:
    """verifiers' own environment of several attempts, over a taskset that knows nothing of it."""
    said = iter(["4", "44", "a"])
    args = {"id": "best-of-n", "n": 3, "max_concurrent_agents": 3}
    host = Host("digits-taskset", lambda before: next(said), verifiers_args=args)
    rewards = host.run()
    texts = {i: host.text(rollout).partition("assistant\n")[2] for i, rollout in host.rollouts.items()}
    assert sorted(r.trajectory for r in host.rollouts.values()) == [0, 1, 2]
    assert {r.role for r in host.rollouts.values()} == {"policy"}
    for rollout_id, reward in rewards.items():
        assert reward.extras["digits"] == sum(c.isdigit() for c in texts[rollout_id]) / 10
        assert reward.extras["best"] == float("44" in texts[rollout_id])


@needs_verifiers
@pytest.mark.parametrize("num_tries", [1, 3])
def test_raising_reward_is_missing_and_named(num_tries: int) -> None:
    host = Host("broken-taskset", lambda before: "four", limits={"retries": num_tries - 1})
    [reward] = host.run().values()
    assert reward.missing and "KeyError: 'no judge'" in str(reward.error)
    assert host.episodes.counts["episodes/error"] == 1 and host.restarts == num_tries - 1
    assert len(host.said) == 1 and "broken-taskset" in host.said[0]


@needs_verifiers
def test_endless_reward_times_out() -> None:
    host = Host("broken-taskset", lambda before: "four", task=3, limits={"timeout_s": 0.5})
    [reward] = host.run().values()
    assert reward.missing and "workflow.timeout_s" in str(reward.error) and host.seconds < 30
    assert host.episodes.counts == {"episodes/timeout": 1}


@needs_verifiers
def test_full_context_ends_and_scores_the_episode() -> None:
    host = Host("adder-taskset", lambda before: CALL, limits={"max_turns": 2})
    # The trace has what was asked with: the answer to the second call is in no request.
    assert host.run() == {"0-0": Reward(0.0, {"right": 0.0, "num_calls": 1.0})}
    assert host.episodes.counts["episodes/done"] == 1


@needs_verifiers
def test_truncated_turn_is_scored() -> None:
    host = Host("digits-taskset", lambda before: "four 44", limits={"max_new_tokens": 3})
    [reward] = host.run().values()
    assert reward.score is not None and next(iter(host.rollouts.values())).stop_reason is StopReason.LENGTH


@needs_verifiers
def test_sixty_four_episodes_take_seconds() -> None:
    """The policy answers at once: all the time is ours and verifiers'."""
    host = Host("digits-taskset", lambda before: "4", num=64)
    assert len(host.run()) == 64 and {reward.score for reward in host.rewards.values()} == {1.05}
    print(f"64 episodes: {host.seconds:.1f} s")
    assert host.seconds < 10


@needs_verifiers
def test_untrainable_seat_must_be_configured() -> None:
    fixed: dict[str, Any] = {"verifiers_args": {"fixed_judge": True}}
    with pytest.raises(ValueError, match=r"workflow\.roles\.judge\.trained = false.*solver"):
        Host("debate-taskset", lambda before: "yes", **fixed).run()
    host = Host("debate-taskset", lambda before: "yes", roles={"solver": {}, "judge": {"trained": False}}, **fixed)
    assert len(host.run()) == 2


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("no-such-taskset", {}, "no_such_taskset"),
        ("sys", {}, "__all__"),
        ("boxed-taskset", {}, "container"),
        ("digits-taskset", {"taskset": {"split": "test"}}, r"verifiers_args\.taskset\.split"),
        ("digits-taskset", {"agents": {}}, r"verifiers_args\.agents"),
        ("digits-taskset", {"agent": {"sampling": {"temperature": 0.5}}}, r"temperature = 0\.5.*rollout\.temperature"),
        ("digits-taskset", {"agent": {"harness": {"id": "codex"}}}, "container"),
        ("digits-taskset", {"agent": {"harness": {"id": "none-such"}}}, "none-such"),
    ],
)
def test_unsupported_environment_is_refused(name: str, args: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VerifiersWorkflow(WorkflowConfig(verifiers=name, verifiers_args=args), SamplingParams())


@needs_verifiers
@pytest.mark.parametrize(("how", "why"), [("load", "OSError: no such data"), ("empty", "no task")])
def test_empty_taskset_is_refused(how: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_tasks("broken-taskset", {"how": how})


@needs_verifiers
def test_changed_tasks_are_refused() -> None:
    host = Host("digits-taskset", lambda before: "4", task=3)
    assert host.source.num_problems == 40 and not host.source.endless
    assert host.task.columns["answer"] == "3" and host.task.content == "user: count to 3"
    host.task.columns["verifiers"]["hash"] = "another"
    host.run()
    assert not host.rollouts and "is another than when it was drawn" in host.said[0]


@needs_verifiers
def test_held_out_tasks_by_share_or_settings() -> None:
    def openings(split: SplitName, **workflow: Any) -> list[str]:
        config = load_config([{"workflow": {"verifiers": "digits-taskset", **workflow}}]).config
        stream = TaskStream(config.tasks, seed=1, split=split, rewards=config.rewards)
        return [task.content for task in stream.take(40)]

    trained, held_out = openings("train"), openings("eval")
    assert len(set(trained)) > 25 and 0 < len(held_out) < 15 and not set(trained) & set(held_out)
    other: dict[str, Any] = {"verifiers_eval": {"opening": "start at", "num_tasks": 5}}
    assert sorted(openings("eval", **other)) == [f"user: start at {i}" for i in range(5)]
    assert set(openings("train", **other)) == {f"user: count to {i}" for i in range(40)}


def test_missing_package_error_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'rollover\[verifiers\]'"):
        import_verifiers()


def test_trace_id_is_replaced_by_the_trajectory_key() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope.get("headers", ())))

    sessions = Sessions()
    sessions.add("abc", "rollover-1")
    joined = sessions.wrap(app)

    def ask(**headers: str) -> dict[bytes, bytes]:
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        asyncio.run(joined({"type": "http", "headers": given}, None, None))
        return seen[-1]

    assert ask(x_session_id="abc", authorization="Bearer EMPTY")[b"authorization"] == b"Bearer rollover-1"
    assert ask(x_session_id="other", authorization="Bearer mine")[b"authorization"] == b"Bearer mine"
    assert ask(authorization="Bearer mine")[b"authorization"] == b"Bearer mine"
    sessions.remove(["abc"])
    assert ask(x_session_id="abc", authorization="Bearer EMPTY")[b"authorization"] == b"Bearer EMPTY"
