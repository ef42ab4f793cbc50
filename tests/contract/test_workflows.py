"""What every kind of agent keeps, however it runs: the same calls are the same rollouts, and ends are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract import agents
from rollover.config import WorkflowConfig
from rollover.types import Reward, SamplingParams, Task
from rollover.workflows.build import build_workflow
from rollover.workflows.protocol import Workflow
from unit.rewards.children import alive, wait_until_dead
from unit.workflows.scripted_host import ScriptedHost

pytest.importorskip("openai")
KINDS = ("async", "plain", "program")
IN_A_PROCESS = KINDS[1:]


class Rewarder:
    async def score(self, requests: list[Any]) -> list[Reward]:
        return [Reward(float(len(request.completion))) for request in requests]

    async def close(self) -> None: ...


def workflow(kind: str, behaviour: str) -> Workflow:
    file = str(Path(agents.__file__))
    settings: dict[str, Any] = {"function": f"{file}:{kind}_{behaviour}"}
    if kind == "plain":
        settings["num_processes"] = 1
    if kind == "program":
        settings = {"command": ["python", file, behaviour]}
    return build_workflow(WorkflowConfig(**settings), SamplingParams(), Rewarder())


def says(before: str) -> str:
    return "six" if before.rstrip().endswith("And 3+3?<|im_end|>\n<|im_start|>assistant") else "four"


def played(kind: str, behaviour: str, **limits: Any) -> ScriptedHost:
    host = ScriptedHost(workflow(kind, behaviour), says, **limits)
    host.run()
    return host


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_go_on_are_turns_of_one_rollout(kind: str) -> None:
    host = played(kind, "talks")
    assert host.rewards == {"0-0": Reward(0.75)} and host.episodes.counts["turns/continued"] == 1
    [rollout] = host.rollouts.values()
    assert [segment.trainable for segment in rollout.segments] == [True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_roles_are_asked_for_by_the_models_name_and_rewarded_by_theirs(kind: str) -> None:
    host = played(kind, "by_roles")
    assert host.rewards == {"0-0": Reward(1.0), "0-0.1.0": Reward(0.5)}
    assert [rollout.role for rollout in host.rollouts.values()] == ["policy", "judge"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "limits", [{"max_tokens": 9}, {"max_turns": 3}, {"max_new_tokens": 60}], ids=lambda of: min(of)
)
def test_a_budget_that_is_used_up_is_the_policys_doing(kind: str, limits: dict[str, int]) -> None:
    host = played(kind, "without_end", **limits)
    assert host.rewards == {"0-0": Reward(0.0)} and host.episodes.counts["episodes/length"] == 1
    assert not host.restarts
    [rollout] = host.rollouts.values()
    assert rollout.num_sampled_tokens <= limits.get("max_tokens", 60)
    assert rollout.num_tokens <= limits.get("max_new_tokens", 400)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_begins_again_and_then_has_no_reward(kind: str) -> None:
    host = played(kind, "fails", retries=1)
    [reward] = host.rewards.values()
    assert reward.missing and "KeyError: 'no such thing'" in str(reward.error)
    assert host.episodes.counts == {"episodes/error": 1, "episodes/restarted": 1}
    assert "0-0" in host.said[0] and "run again" in host.said[0]


@pytest.mark.parametrize("kind", IN_A_PROCESS)
def test_a_process_that_dies_is_an_agent_that_failed(kind: str) -> None:
    host = played(kind, "dies", retries=1)
    [reward] = host.rewards.values()
    assert reward.missing and "killed by SIGKILL" in str(reward.error) and host.restarts == 1


@pytest.mark.parametrize("kind", IN_A_PROCESS)
def test_one_that_hangs_is_cut_off_and_killed_with_what_it_has_started(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    host = ScriptedHost(workflow(kind, "hangs"), says, timeout_s=8.0)  # enough for it to start what it starts
    host.run()
    [reward] = host.rewards.values()
    assert reward.missing and "timed out" in str(reward.error) and host.episodes.counts == {"episodes/timeout": 1}
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    assert len(pids) == 2 and wait_until_dead(pids, 20) and not any(map(alive, pids))


def test_what_a_program_answers_without_a_reward_is_scored() -> None:
    code = """import sys, json; print(json.dumps({"answer": json.load(sys.stdin)["messages"][0]["content"]}))"""
    program = build_workflow(WorkflowConfig(command=["python", "-c", code]), SamplingParams(), Rewarder())
    host = ScriptedHost(program, says)
    host.task = Task("t", "test", "", messages=({"role": "user", "content": "abc"},))
    host.run()
    assert host.episodes.counts == {"episodes/done": 1}
