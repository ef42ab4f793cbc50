"""On-policy self-distillation: what a model can make of the answer when it is told, it learns to do without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, DistillConfig, TrainConfig
from rollover.models.load import LoadedModel
from rollover.trainer.batch import Batch
from rollover.trainer.trainer import Trainer
from rollover.types import Sample

QUESTIONS, ANSWERS, BLANK = np.array([20, 21, 22, 23]), np.array([40, 41, 42, 43]), 60
RIGHT = {20: 42, 21: 40, 22: 43, 23: 41}  # which the model has never seen


def trainer(loaded: LoadedModel, learning_rate: float, distill: dict[str, Any] | None = None) -> Trainer:
    return local_trainer(
        loaded,
        TrainConfig(learning_rate=learning_rate, num_steps=1000, micro_batch_tokens=500),
        AlgorithmConfig(loss="reinforce"),
        dtype=torch.float32,
        max_new_tokens=4,
        distill=DistillConfig.model_validate(distill or {}),
    )


def sample(number: int, group: int, prompt: tuple[int, ...], token: int, advantage: float = 0.0) -> Sample:
    return Sample(
        f"{group}-{number}",
        group,
        np.array(prompt, np.int32),
        np.array([token], np.int32),
        np.ones(1, bool),
        {
            "behavior_logprobs": np.zeros(1, np.float32),
            "versions": np.zeros(1, np.int32),
            "advantages": np.full(1, advantage, np.float32),
        },
        1.0,
    )


def on_policy(made: Trainer, samples: list[Sample]) -> Batch:
    """They are as of the weights as they are."""
    found = made.backend.compute_logprobs(samples)
    return Batch([s.with_streams(behavior_logprobs=found[s.rollout_id], versions=s.versions + made.policy_version)
                  for s in samples])  # fmt: skip


def distribution(made: Trainer, prompt: tuple[int, ...]) -> np.ndarray:
    """Of the first token after the prompt."""
    samples = [sample(token, 0, prompt, token) for token in range(102)]
    found = made.backend.compute_logprobs(samples)
    return np.exp([found[s.rollout_id][0] for s in samples], dtype=np.float64)


def that_can_copy() -> LoadedModel:
    """A model that repeats an answer that stands last in the prompt, and guesses where none does."""
    loaded = tiny.loaded()
    made = trainer(loaded, 3e-3)
    told = [((q, a), a) for q in QUESTIONS for a in ANSWERS]
    guessed = [((q, BLANK), a) for q in QUESTIONS for a in ANSWERS]
    for _ in range(60):
        made.train_step(on_policy(made, [sample(i, 0, p, a, 1.0) for i, (p, a) in enumerate(told + guessed)]))
    return loaded


def right(made: Trainer, last: dict[int, int]) -> float:
    """Mean probability of the right answer after each question and what stands `last` in its prompt."""
    return float(np.mean([distribution(made, (q, last[q]))[RIGHT[q]] for q in RIGHT]))


def test_a_model_that_can_use_an_answer_learns_to_give_it_untold() -> None:
    """By 30 steps of 32 answers that it sampled itself, with no reward anywhere."""
    loaded = that_can_copy()
    made = trainer(loaded, 3e-3, {"teacher": "initial"})
    blank = dict.fromkeys(RIGHT, BLANK)
    assert right(made, blank) < 0.35 and right(made, RIGHT) > 0.9, "it guesses, and knows what to do when told"
    rng, kl = np.random.default_rng(0), []
    for _ in range(30):
        samples = []
        for group, question in enumerate(RIGHT):
            weights = distribution(made, (question, BLANK))
            tokens = rng.choice(len(weights), size=8, p=weights / weights.sum())
            told = np.array([question, RIGHT[question]], np.int32)
            samples += [
                replace(sample(i, group, (question, BLANK), int(token)), teacher_prompt_ids=told)
                for i, token in enumerate(tokens)
            ]
        kl.append(made.train_step(on_policy(made, samples))["distill/kl"])
    assert right(made, blank) > 0.9, "it has learned the answers"
    assert np.mean(kl[-5:]) < 0.2 * np.mean(kl[:5])
