"""Each example of docs/own-functions.md does what it says, where a wrong one would not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from contract import trainer_contract
from fake_engine import FakeEngine
from local_trainer import build_batch
from rollover.algorithms.filters import group_filters
from rollover.algorithms.token_batch import TokenBatch
from rollover.config import (
    AlgorithmConfig,
    Config,
    FiltersConfig,
    RewardsConfig,
    TasksConfig,
    TaskSourceConfig,
    WorkflowConfig,
)
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import ExtendRequest
from rollover.envs.build import build_environment
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.protocol import EnvironmentSetup, Keep, keeps_nothing
from rollover.envs.tools import Call, build_tool_format
from rollover.functions import custom_function, load_function
from rollover.rewards.protocol import ScoreRequest
from rollover.rollout.order import RolloutView, load_order
from rollover.run.producer import CustomProducer, Played, ready_episodes
from rollover.run.step_log import custom_metrics
from rollover.tasks.curriculum import Curriculum, Seen, build_curriculum
from rollover.tasks.prompts import TASK_OR_NONE, PromptSource, encoder
from rollover.tasks.source import SourceSetup, build_source
from rollover.tasks.split import comparison_by
from rollover.tasks.stream import TaskStream
from rollover.track.tracker import Cut, RunInfo
from rollover.trainer.backend import TrainerBackend
from rollover.trainer.objective import Counts, Objective
from rollover.trainer.trainer import build_trainer
from rollover.trajectories import turns_of
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task
from rollover.workflows.build import build_workflow
from samples import random_samples
from unit.envs import played, templates
from unit.workflows.scripted_host import ScriptedHost

TASK = Task("t", "docs", "reward", prompt="1 + 1 =")


def group(*answers: tuple[int, float | None]) -> Group:
    """Of rollouts with so many tokens and that score."""
    rollouts = []
    for i, (num, score) in enumerate(answers):
        arrays = np.full(num, 5, dtype=np.int32), np.full(num, -1.0, dtype=np.float32)
        segment = Segment(*arrays, 0, SamplingParams(), StopReason.EOS)
        rollout = Rollout(0, i, TASK, [segment], RolloutState.READY)
        rollout.reward = Reward(score, error=None if score is not None else "failed")
        rollouts.append(rollout)
    return Group(0, TASK, Prompt((1, 2)), rollouts)


def advantages(of: Group, **algorithm: Any) -> list[float]:
    samples = build_batch([of], AlgorithmConfig.model_validate(algorithm)).samples
    return [float(s.advantages[0]) for s in samples]


def check_advantage(spec: str) -> None:
    assert advantages(group((1, 1.0), (1, 0.0), (1, None)), advantage=spec) == [0.5, -0.5, 0.0]


def check_after_scoring(spec: str) -> None:
    of = group((101, 1.0), (100, 1.0), (101, -2.0))
    assert advantages(of, advantage="dr_grpo", after_scoring=spec) == [0.5, 1.0, -2.0]


def check_loss(spec: str) -> None:
    def loss(**algorithm: Any) -> float:
        ones = torch.ones(1, 2)
        streams = TokenBatch.of(
            ones.bool(), logprobs=torch.log(torch.tensor([[1.5, 0.5]])).requires_grad_(), entropy=ones,
            proximal_logprobs=ones * 0, behavior_logprobs=ones * 0, advantages=torch.tensor([[1.0, -1.0]]),
            versions=ones,
        )  # fmt: skip
        config = AlgorithmConfig.model_validate({"loss": spec, "correction": "none", **algorithm})
        return float(Objective(config, 16)(streams, Counts(2, {"0-0": 2}, {0: 2}))[0].detach())

    # min(1.5, 1 + clip_high) and the larger of 0.5 and 1 - clip_high, over two tokens.
    assert abs(loss(clip_high=0.2) - (-1.2 + 0.8) / 2) < 1e-6
    assert abs(loss(clip_high=0.4) - (-1.4 + 0.6) / 2) < 1e-6
    assert abs(loss(clip_high=0.4, loss_options={"width": 0.5}) - (-1.2 + 0.8) / 2) < 1e-6


def check_filter(spec: str) -> None:
    (own,) = group_filters(FiltersConfig(custom=spec))
    assert own.why(group((1, 1.0), (1, None), (1, 1.0))) == "every answer is right"
    assert own.why(group((1, 1.0), (1, 0.0))) is None


def check_metrics(spec: str) -> None:
    groups = [group((101, 1.0), (100, 1.0)), group((3, None))]
    assert custom_metrics(spec)(groups) == {"own/long": 1 / 3, "own/groups": 2}


def check_tracker(spec: str) -> None:
    """Killed after its second step, and resumed after the first."""
    for resumed, cut, steps in ((False, -1, (1, 2)), (True, 1, (2, 3))):
        tracker = load_function(spec, ".")()
        tracker.on_start(RunInfo("demo", Path.cwd(), {}, resumed))
        tracker.truncate(Cut(cut))
        for step in steps:
            tracker.on_step({"step": step, "reward/mean": step / 10})
        tracker.close()
    assert Path("reward.csv").read_text() == "1,0.1\n2,0.2\n3,0.3\n"


def check_order(spec: str) -> None:
    first, second, third = (RolloutView(f"{i}-0", i, 0, 9 - left, left, at, 0) for i, left, at in
                            ((2, 1, 5), (1, 4, 3), (0, 4, 4)))  # fmt: skip
    assert sorted((third, second, first), key=load_order(spec)) == [first, second, third]


def check_before_produce(spec: str) -> None:
    class Stream:
        def __init__(self) -> None:
            self.left = [Task(f"t{n}", "docs", "reward", prompt="x" * n) for n in (201, 200)]

        def next(self) -> Task | None:
            return self.left.pop(0) if self.left else None

        def state_dict(self) -> dict[str, int]:
            return {"left": len(self.left)}

    for version, expected in ((9, ["t200"]), (10, ["t201", "t200"])):
        own = custom_function("tasks.before_produce", spec, TASK_OR_NONE)
        prompts = PromptSource(Stream(), encoder(tiny.tokenizer()), 500, own)  # type: ignore[arg-type]
        prompts.on_step(version)
        assert [task.task_id for task, _ in iter(prompts, None)] == expected


def check_curriculum(spec: str) -> None:
    def made() -> Curriculum:
        curriculum = build_curriculum(Config.model_validate({"tasks": {"curriculum": {"kind": spec}}}))
        assert curriculum is not None
        return curriculum

    short, long = (Task(f"t{n}", "docs", "reward", prompt="x" * n) for n in (100, 110))
    first = made()
    assert [first.weigher.weight(task, None) for task in (short, long)] == [1.0, 0.01]
    first.saw(Group(0, short, Prompt((1,)), []), 1.0)
    first.on_step(1)
    later = made()
    later.load_state_dict(first.state_dict())
    assert [later.weigher.weight(task, None) for task in (short, long)] == [1.0, 1.0]
    assert later.weigher.weight(short, Seen(1.0)) == 0.1


def check_producer(spec: str) -> None:
    config = Config(tasks=TasksConfig(producer=spec))

    async def produce() -> list[Group] | None:
        own = CustomProducer(config, tiny.tokenizer(), FakeEngine({f"1-{i}": 2 + i for i in range(4)}))
        return await own.produce(1, 0)

    (made,) = asyncio.run(produce()) or []
    assert made.group_id == 1 and [r.num_tokens for r in made.rollouts] == [2, 3, 4, 5]
    assert [r.reward.score for r in made.rollouts if r.reward] == [2.0, 3.0, 4.0, 5.0]


def check_episodes(spec: str) -> None:
    lengths = {f"1-{i}{of}": 2 + i for i in range(2) for of in ("", ".1.0")}

    async def produce() -> list[Group] | None:
        own = CustomProducer(Config(tasks=TasksConfig(producer=spec)), tiny.tokenizer(), FakeEngine(lengths))
        return await own.produce(1, 0)

    (made,) = asyncio.run(produce()) or []
    assert [(r.rollout_id, r.role) for r in made.rollouts] == [
        ("1-0", "solver"), ("1-0.1.0", "judge"), ("1-1", "solver"), ("1-1.1.0", "judge"),
    ]  # fmt: skip
    samples = build_batch([made], AlgorithmConfig(advantage="dr_grpo")).samples
    assert [s.advantages[0] for s in samples] == [-0.5, 0.5, 0.5, -0.5]


def check_grouping(spec: str) -> None:
    """Rewards of the steps (3, 2), (1, 1) and (2): each number on its own; the scores do not count."""

    def episode(score: float, *rewards: float) -> list[Played]:
        ids, logprobs = np.array([5], dtype=np.int32), np.array([-1.0], dtype=np.float32)
        contexts = [((5, 6), [Segment(ids, logprobs, 0, SamplingParams(), StopReason.EOS)]) for _ in rewards]
        return [Played(contexts, Reward(score, turns=rewards))]

    group = ready_episodes(0, TASK, [episode(9.0, 3.0, 2.0), episode(0.0, 1.0, 1.0), episode(0.0, 2.0)])
    config, workflow = AlgorithmConfig(advantage="dr_grpo"), WorkflowConfig(group_by=spec)
    samples = build_batch([group], config, workflow=workflow).samples
    assert [float(s.advantages[0]) for s in samples] == [1.0, 0.5, -1.0, -0.5, 0.0]
    assert len({s.sequence_id for s in samples}) == 5


def check_engine(spec: str) -> None:
    config = Config.model_validate({"engine": {"kind": spec}, "model": {"dtype": "float32"}, "run": {"threads": 1}})
    request = ExtendRequest("0-0", Prompt((1, 2, 3)), (), 4, 0, SamplingParams())

    async def counted() -> dict[str, float]:
        engine = build_engine(EngineSetup(config, tiny.loaded, 1, beside_trainer=False))
        for _ in range(2):
            assert sum(map(len, await engine.extend(request))) == 4
        await engine.close()
        return engine.stats()

    assert asyncio.run(counted())["engine/calls"] == 2


def check_environment(spec: str) -> None:
    """It asks once, in the role user, and hands the rollouts to the task's reward."""

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(float(rollout.num_tokens)) for rollout in rollouts]

    tokenizer = templates.tokenizer(templates.CHATML)
    config = Config.model_validate({"rollout": {"environment": spec}})
    environment = build_environment(EnvironmentSetup(config, tokenizer, score, lambda task: True, len(tokenizer)))
    (rollout,) = group((3, None)).rollouts
    asked = asyncio.run(environment.next(rollout))
    assert asked is not None
    question = "<|im_end|>\n<|im_start|>user\nAre you sure? Answer once more.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(asked.token_ids) == question
    for segment in (asked, *rollout.segments):
        rollout.add(segment)
    assert asyncio.run(environment.next(rollout)) is None

    async def scored() -> list[Reward]:
        return await environment.score([rollout])

    assert asyncio.run(scored()) == [Reward(float(rollout.num_tokens))]


def check_source(spec: str) -> None:
    source = {"kind": spec, "params": {"num": 5}}
    tasks = TasksConfig.model_validate({"sources": [source], "chat": False, "epochs": 1, "eval_fraction": 1e-9})
    taken = TaskStream(tasks, 0, "train", rewards=RewardsConfig()).take(9)
    assert sorted((t.prompt, t.columns["answer"]) for t in taken) == [(f"2 * {i} =", str(2 * i)) for i in range(5)]


def check_problem_key(spec: str) -> None:
    same = comparison_by(spec)
    texts = [same(Task("t", "docs", "r", prompt=text)) for text in ("Add 3 and 14.", "What is 14 + 3?", "Add 3 and 4.")]
    assert texts[0] == texts[1] != texts[2]


def check_hooks(spec: str) -> None:
    """Two evaluations below the best one end the run, and one does not."""
    guard: Any = load_function(spec, ".")()
    guard.on_train_start(None)
    for mean in (0.1, 0.5, 0.4, 0.5, 0.3):
        asyncio.run(guard.on_evaluate({"mean": mean}))
    with pytest.raises(RuntimeError, match="mean 0.49, and it was 0.50"):
        asyncio.run(guard.on_evaluate({"mean": 0.49}))


def check_backend(spec: str) -> None:
    """Under the whole contract of a trainer's backend; and it has counted the updates."""
    made: list[TrainerBackend] = []
    config = Config.model_validate(
        {
            "backend": {"type": spec}, "model": {"dtype": "float32"}, "run": {"threads": 1},
            "train": {"learning_rate": 1e-2}, "rollout": {"max_new_tokens": 16, "groups_per_step": 3},
        }
    )  # fmt: skip

    def make() -> TrainerBackend:
        made.append(build_trainer(config, tiny.loaded()).backend)
        return made[-1]

    subject = trainer_contract.Subject(make, random_samples(3), samples_with_an_engine=False)
    for check in trainer_contract.CHECKS:
        asyncio.run(check(subject))
    assert all(seconds > 0 for backend in made for seconds in backend.seconds)  # type: ignore[attr-defined]
    assert any(backend.seconds for backend in made)  # type: ignore[attr-defined]


def _class_environment(spec: str, keep: Keep = keeps_nothing, **workflow: str) -> ClassEnvironment:
    return played.build(Config.model_validate({"workflow": {"environment": spec, **workflow}}), keep=keep)


def check_counter(spec: str) -> None:
    environment, rollout = _class_environment(spec), played.new_rollout()
    for step, count in ((400, "400"), (8, "408")):
        assert asyncio.run(played.told(environment, rollout, played.call("increment", step=step))) == [count]
    assert asyncio.run(played.turn(environment, rollout, "Done.")) is None
    assert played.reward_of(environment, rollout) == Reward(1.0)


def check_counted(spec: str) -> None:
    """As Counter, and another object goes on from its state: what it said before is not asked of it again."""
    check_counter(spec)
    kept: list[Any] = []
    environment = _class_environment(spec, lambda *told: kept.append(told))
    rollout = played.new_rollout()
    assert asyncio.run(played.told(environment, rollout, played.call("increment", step=400))) == ["400"]
    another = _class_environment(spec)
    group_id, sibling, name, saved = kept[-1]
    another.recall(group_id, sibling, {name: saved})
    assert asyncio.run(played.told(another, rollout, played.call("increment", step=8))) == ["408"]
    assert another.stats()["tools/calls"] == another.stats()["episodes/restored"] == 1


def check_game(spec: str) -> None:
    environment, rollout = _class_environment(spec), played.new_rollout()
    assert asyncio.run(played.told(environment, rollout, "400", role="user")) == ["higher"]
    assert asyncio.run(played.turn(environment, rollout, "408")) is None
    assert played.reward_of(environment, rollout) == Reward(1.0)


def check_examples(spec: str) -> None:
    environment = _class_environment(spec)
    prompt = environment.chat.tokenizer.decode(environment.prompt(played.TASK).ids)
    first, last = (
        "user\nWhat is 3+4?<|im_end|>",
        "assistant\nThe answer is 7<|im_end|>\n<|im_start|>user\n12*34?<|im_end|>",
    )
    assert 0 < prompt.index(first) < prompt.index(last)


def check_tool_format(spec: str) -> None:
    made = build_tool_format(spec)
    assert made.definitions([]) == "Write [[12*34]] to have 12*34 computed."
    assert made.read("So [[1+2]] and [[3]]") == [Call("calculate", {"expression": e}) for e in ("1+2", "3")]


PAGE = "own-functions.md"


def check_workflow(spec: str) -> None:
    """The solver is right after it was asked again, and the judge says so; then both are wrong."""
    for second, score in (("it is 4", 1.0), ("it is 5", 0.0)):

        def policy(before: str, second: str = second) -> str:
            return "Yes" if "Is this right?" in before else second if "Are you sure?" in before else "it is 5"

        host = ScriptedHost(load_function(spec, "."), policy)
        host.task = replace(host.task, columns={"answer": "4"})
        rewards = host.run()
        assert {host.rollouts[i].role: r.score for i, r in rewards.items()} == {"solver": score, "judge": score}


def check_once(spec: str) -> None:
    """The hint stands in the prompt, and is one of two."""
    host = ScriptedHost(
        load_function(spec, "."), lambda before: "4" if "Think." in before or "Be brief." in before else ""
    )
    host.task = replace(host.task, columns={"answer": "4"})
    assert [reward.score for reward in host.run().values()] == [1.0]


def check_graded(spec: str) -> None:
    """The first turn's tokens have 0.5 each, and those of the second 1."""
    host = ScriptedHost(load_function(spec, "."), lambda before: "it is 4")
    host.task = replace(host.task, columns={"answer": "4"})
    [(rollout_id, reward)] = host.run().items()
    rollout = host.rollouts[rollout_id]
    rollout.reward = reward
    made = Group(0, host.task, rollout.prompt, [rollout])
    (sample,) = build_batch([made], AlgorithmConfig(advantage="precomputed")).samples
    first, second = turns_of(rollout)
    assert reward.score == 1.0 and sample.mask.sum() == len(first) + len(second)
    assert sample.advantages[sample.mask].tolist() == [0.5] * len(first) + [1.0] * len(second)


def check_second_try(spec: str) -> None:
    """The generator scores what it asked: right at the first try, at the second, and never."""
    source = build_source(SourceSetup(TaskSourceConfig(kind="reasoning_gym", name="chain_sum"), "sums", "", 0))
    task = replace(source.problem(3), messages=({"role": "user", "content": "Add."},), prompt=None)
    answer, make = str(task.columns["answer"]), load_function(spec, ".")
    for said, score in (((f"It is {answer}",), 1.0), (("0 or so", answer), 1.0), (("so", "so"), 0.0)):
        if isinstance(make, type):
            game: Any = make()
            game.reset(question="Add.", **task.columns)
            ends = [game.step(text) for text in said]
            assert [end.done for end in ends] == [False] * (len(said) - 1) + [True] and ends[-1].reward == score
        else:
            host = ScriptedHost(make, lambda before, said=said: said["Try once more" in before])
            host.task = task
            assert {reward.score for reward in host.run().values()} == {score}


class LengthOf:
    """The reward is how long an answer is."""

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        return [Reward(float(len(request.completion))) for request in requests]

    async def close(self) -> None: ...


def check_plain_workflow(spec: str) -> None:
    for said, score in (("it is 4", 1.0), ("it is 5", 0.0)):
        workflow = build_workflow(WorkflowConfig(function=spec, num_processes=1), SamplingParams(), LengthOf())
        host = ScriptedHost(workflow, lambda before, said=said: said)
        host.task = replace(host.task, columns={"answer": "4"})
        assert host.run() == {"0-0": Reward(score)}


def check_program(spec: str) -> None:
    command = ["python", spec.rpartition(":")[0]]
    host = ScriptedHost(
        build_workflow(WorkflowConfig(command=command), SamplingParams(), LengthOf()), lambda before: "it is 4"
    )
    assert host.run() == {"0-0": Reward(7.0)}


CHECKS: dict[tuple[str, str], Callable[[str], None]] = {
    (PAGE, "over_mean"): check_advantage,
    (PAGE, "half_for_long"): check_after_scoring,
    (PAGE, "two_sided"): check_loss,
    (PAGE, "solved"): check_filter,
    (PAGE, "share_of_long"): check_metrics,
    (PAGE, "RewardTable"): check_tracker,
    (PAGE, "nearly_done_first"): check_order,
    (PAGE, "short_ones_first"): check_before_produce,
    (PAGE, "Counting"): check_producer,
    (PAGE, "Counted"): check_engine,
    (PAGE, "AskedTwice"): check_environment,
    (PAGE, "Doubles"): check_source,
    (PAGE, "LongerLater"): check_curriculum,
    (PAGE, "by_its_numbers"): check_problem_key,
    ("trainer.md", "Guard"): check_hooks,
    ("backends.md", "Timed"): check_backend,
    ("credit.md", "by_step"): check_grouping,
    ("credit.md", "SolverJudge"): check_episodes,
    ("credit.md", "graded"): check_graded,
    ("agents.md", "Counter"): check_counter,
    ("agents.md", "Counted"): check_counted,
    ("agents.md", "GuessNumber"): check_game,
    ("agents.md", "Brackets"): check_tool_format,
    ("agents.md", "Shown"): check_examples,
    ("agents.md", "solver_judge"): check_workflow,
    ("agents.md", "careful"): check_once,
    ("agents.md", "right"): lambda spec: None,  # a part of the next two
    ("agents.md", "SecondTry"): check_second_try,
    ("agents.md", "second_try"): check_second_try,
    ("agents.md", "ask"): check_plain_workflow,
    ("agents.md", "main"): check_program,
    ("agents.md", "user"): lambda spec: None,  # a part of it
}
