"""Random groups and samples for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollover.types import (
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    Sample,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

VOCAB = 102


def segment(
    tokens: list[int], *, version: int = 0, trainable: bool = True, temperature: float = 1.0, logprob: float = -4.6
) -> Segment:
    return Segment(
        np.array(tokens, dtype=np.int32),
        np.full(len(tokens), logprob if trainable else 0.0, dtype=np.float32),
        version,
        SamplingParams(temperature=temperature),
        StopReason.PAUSED,
        trainable,
    )


def rollout(group: int, sibling: int, score: float | None, segments: list[Segment]) -> Rollout:
    reward = Reward(score, error=None if score is not None else "timeout")
    task = Task(f"t{group}", "test", "reward", prompt="x")
    return Rollout(group, sibling, task, segments, RolloutState.READY, StopReason.EOS, reward)


def group(group_id: int, rollouts: list[Rollout], prompt: Sequence[int] = (5, 6, 7)) -> Group:
    return Group(group_id, rollouts[0].task, Prompt.of(prompt), rollouts)


def random_samples(seed: int, num_groups: int = 3, size: int = 3, num_prompts: int = 1) -> list[Sample]:
    """Samples with holes in the mask, random advantages and behavior log-probs around those of a uniform policy.

    The siblings of a group have `num_prompts` prompts, in turn.
    """
    rng = np.random.default_rng(seed)
    out = []
    for g in range(num_groups):
        prompts = [rng.integers(2, VOCAB, rng.integers(1, 9)).astype(np.int32) for _ in range(num_prompts)]
        for i in range(size):
            n = int(rng.integers(1, 15))
            mask = rng.random(n) > 0.25
            mask[0] |= not mask.any()
            out.append(
                Sample(
                    rollout_id=f"{g}-{i}",
                    group_id=g,
                    prompt_ids=prompts[i % num_prompts],
                    token_ids=rng.integers(2, VOCAB, n).astype(np.int32),
                    mask=mask,
                    streams={
                        "behavior_logprobs": (-4.6 + rng.standard_normal(n)).astype(np.float32),
                        "versions": np.zeros(n, dtype=np.int32),
                        "advantages": np.full(n, rng.standard_normal(), dtype=np.float32),
                    },
                    temperature=float(rng.choice([0.7, 1.0])),
                )
            )
    return out
