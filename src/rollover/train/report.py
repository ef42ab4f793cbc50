"""One metrics row per step, from what was trained and what every owner counts. Pure; keys are in docs/metrics.md."""

from __future__ import annotations

import resource
import sys
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from rollover.rollout.staleness import staleness
from rollover.train.batch import Batch
from rollover.types import Group, StopReason


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def reward_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over valid rewards; missing ones are counted."""
    rewards = [(r.task.source, r.reward) for g in groups for r in g.rollouts if r.reward is not None]
    scores: dict[str, list[float]] = defaultdict(list)
    extras: dict[str, list[float]] = defaultdict(list)
    for source, reward in rewards:
        if reward.score is not None:
            scores[source].append(reward.score)
            for name, value in reward.extras.items():
                extras[name].append(value)
    everything = [s for values in scores.values() for s in values]
    spreads = [
        np.ptp(valid) == 0
        for g in groups
        if (valid := [r.reward.score for r in g.rollouts if r.reward is not None and r.reward.score is not None])
    ]
    return {
        "reward/mean": _mean(everything),
        "reward/std": float(np.std(everything)) if everything else float("nan"),
        "reward/missing": float(sum(reward.missing for _, reward in rewards)),
        "groups/zero_variance": _mean([float(s) for s in spreads]),
        **{f"reward/{source}/mean": _mean(values) for source, values in scores.items()},
        **{f"reward/extra/{name}": _mean(values) for name, values in extras.items()},
    }


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Lengths, and how many rollouts have segments of two or more policy versions."""
    rollouts = [r for g in groups for r in g.rollouts]
    versions = [len(r.versions) for r in rollouts]
    lengths = [r.num_tokens for r in rollouts]
    return {
        "rollouts/partial_share": _mean([float(v >= 2) for v in versions]),
        "rollouts/versions_max": float(max(versions)),
        "length/mean": _mean([float(n) for n in lengths]),
        "length/max": float(max(lengths)),
        "length/repetition": _mean([float(r.stop_reason is StopReason.REPETITION) for r in rollouts]),
        "length/truncated": _mean([float(r.stop_reason is StopReason.LENGTH) for r in rollouts]),
    }


def staleness_metrics(batch: Batch, trainer_version: int) -> dict[str, float]:
    """Over the tokens in the loss; `trainer_version` is that before the step."""
    streams = [s.versions[s.mask] for s in batch.samples if s.mask.any()]
    ages = staleness(np.concatenate(streams), trainer_version) if streams else np.zeros(1)
    return {"staleness/max": float(np.max(ages)), "staleness/mean": float(np.mean(ages))}


def speed_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Rates of this step from its own tokens and seconds."""
    pairs = {
        "speed/generated_tokens_per_s": ("tokens/step_generated", "time/generate_s"),
        "speed/trained_tokens_per_s": ("tokens/step_trained", "time/train_s"),
        "speed/step_tokens_per_s": ("tokens/step_trained", "time/step_s"),
    }
    return {key: row[tokens] / row[seconds] for key, (tokens, seconds) in pairs.items() if row.get(seconds)}


def peak_rss_bytes() -> float:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
