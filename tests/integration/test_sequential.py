"""DESIGN test 6: synchronous training equals the sequential program, bit for bit (fp32, CPU, fixed threads)."""

from __future__ import annotations

import asyncio
import copy

import torch

import tiny
from local_trainer import build_batch, local_trainer
from rollover.config import AlgorithmConfig, EngineConfig, RolloutConfig, TrainConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.envs.build import SingleTurn
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.requests import Requests
from rollover.trainer.trainer import Trainer
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Task, rollout_seed

STEPS, GROUPS, SIZE, TOKENS = 4, 3, 4, 24
STOP = frozenset({1})


def tasks():
    for i in range(1000):
        text = f"count to {i}"
        yield Task(f"t{i}", "test", "digits", prompt=text), Prompt.of(tiny.tokenizer()(text)["input_ids"])


def score(token_ids: list[int]) -> Reward:
    return Reward(sum(c.isdigit() for c in tiny.tokenizer().decode(token_ids)) / TOKENS)


def parts() -> tuple[EmbeddedEngine, Trainer]:
    loaded = tiny.loaded()
    engine = EmbeddedEngine(copy.deepcopy(loaded.model), EngineConfig())
    train = TrainConfig(num_steps=STEPS, learning_rate=1e-3, micro_batch_tokens=200, minibatches_per_step=GROUPS)
    return engine, local_trainer(loaded, train, AlgorithmConfig(), dtype=torch.float32, max_new_tokens=TOKENS)


async def sequential() -> tuple[Trainer, list[list[int]]]:
    """The whole algorithm without scheduler, cache or driver."""
    engine, trainer = parts()
    stream, seen = tasks(), []
    for step in range(STEPS):
        groups = []
        for g in range(GROUPS):
            task, prompt = next(stream)
            groups.append(
                Group(step * GROUPS + g, task, prompt, [Rollout(step * GROUPS + g, s, task) for s in range(SIZE)])
            )
        rollouts = [r for group in groups for r in group.rollouts]
        prompts = [group.prompt for group in groups for _ in group.rollouts]
        answers = await asyncio.gather(
            *[
                engine.extend(
                    ExtendRequest(
                        r.rollout_id, prompt, (), TOKENS,
                        rollout_seed(0, r.task.task_id, 0, r.sibling), SamplingParams(), StopCriteria(STOP),
                    )
                )
                for r, prompt in zip(rollouts, prompts, strict=True)
            ]
        )  # fmt: skip
        for rollout, segments in zip(rollouts, answers, strict=True):
            for segment in segments:
                rollout.add(segment)
            rollout.state = RolloutState.READY
            rollout.reward = score(rollout.token_ids())
            seen.append(rollout.token_ids())
        trainer.train_step(build_batch(groups, AlgorithmConfig()))
        await engine.load_weights(trainer.policy_version, await trainer.backend.publish())
    return trainer, seen


async def scheduled() -> tuple[Trainer, list[list[int]]]:
    """The same through the driver, with rewards that arrive late and out of order."""
    engine, trainer = parts()
    stream, seen = tasks(), []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        for _ in range(7 * (5 - rollouts[0].group_id % 5)):
            await asyncio.sleep(0)
        return [score(r.token_ids()) for r in rollouts]

    config = RolloutConfig(groups_per_step=GROUPS, group_size=SIZE, max_new_tokens=TOKENS)
    driver = Driver(Lifecycle(config), engine, lambda: next(stream), SingleTurn(scorer), Requests(config, 0, STOP))
    for _ in range(STEPS):
        groups = await driver.collect(trainer.policy_version)
        assert groups is not None
        seen += [r.token_ids() for g in groups for r in g.rollouts]
        trainer.train_step(build_batch(groups, AlgorithmConfig()))
        await engine.load_weights(trainer.policy_version, await trainer.backend.publish())
        driver.on_new_version(trainer.policy_version)
        driver.lifecycle.check()
    return trainer, seen


def test_synchronous_training_equals_the_sequential_program() -> None:
    (a, tokens_a), (b, tokens_b) = asyncio.run(sequential()), asyncio.run(scheduled())
    assert tokens_a == tokens_b and len(tokens_a) == STEPS * GROUPS * SIZE
    start = dict(tiny.model().named_parameters())
    for (name, x), y in zip(tiny.local(a).model.named_parameters(), tiny.local(b).model.parameters(), strict=True):
        assert torch.equal(x, y), name
        assert not torch.equal(x, start[name]), f"{name} was not trained"
