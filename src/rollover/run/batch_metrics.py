"""Metrics of a step that follow from its groups and batch, or from other metrics of the row (docs/metrics.md).

Pure functions: step_log.py makes the row and owns counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rollover.algorithms.grouping import Grouping
from rollover.config import WorkflowConfig
from rollover.staleness import staleness
from rollover.trainer.batch import Batch
from rollover.trajectories import Trajectory, TrajectoryGroup, episodes_of, turns_of
from rollover.types import Group, StopReason


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def reward_metrics(groups: list[Group], grouping: Grouping | None = None) -> dict[str, float]:
    """Return means over the valid rewards of trajectories, and the number of missing ones.

    Greedy baselines and untrained roles are left out. `grouping`: which trajectories are compared; None: those of one
    role. groups/zero_variance leaves out groups without a TrajectoryGroup of two valid rewards.
    """
    grouping = grouping or Grouping(WorkflowConfig())
    compared = [grouping(group).compared for group in groups]
    trajectories = [t for several in compared for c in several for t in c.trajectories]
    rewards = [(t.task.source, t.reward) for t in trajectories if t.reward is not None]
    scores: dict[str, list[float]] = defaultdict(list)
    extras: dict[str, list[float]] = defaultdict(list)
    for source, reward in rewards:
        if reward.score is not None:
            scores[source].append(reward.score)
            for name, value in reward.extras.items():
                extras[name].append(value)
    everything = [s for values in scores.values() for s in values]
    agree = [found for several in compared if (found := _all_agree(several)) is not None]
    return {
        "reward/mean": _mean(everything),
        "reward/std": float(np.std(everything)) if everything else float("nan"),
        "reward/missing": float(sum(reward.missing for _, reward in rewards)),
        "groups/zero_variance": _mean([float(a) for a in agree]),
        **{f"reward/{source}/mean": _mean(values) for source, values in scores.items()},
        **{f"reward/extra/{name}": _mean(values) for name, values in extras.items()},
    }


def role_metrics(groups: list[Group], batch: Batch, grouping: Grouping) -> dict[str, float]:
    """Return scores of each role's trajectories, and advantages of its loss tokens; {} where one role is trained.

    `batch`: as the loss used it.
    """
    trajectories = [t for group in groups for compared in grouping(group).compared for t in compared.trajectories]
    roles = sorted({t.role for t in trajectories})
    if len(roles) < 2:
        return {}
    streams: dict[str, list[np.ndarray]] = defaultdict(list)
    for s in batch.samples:
        if s.mask.any():
            streams[s.role].append(s.advantages[s.mask])
    metrics: dict[str, float] = {}
    for role in roles:
        scores = [t.reward.score for t in trajectories if t.role == role and t.reward and t.reward.score is not None]
        values = np.concatenate(streams[role] or [np.zeros(0, dtype=np.float32)])
        for name, of in (("reward", np.asarray(scores)), ("advantage", values)):
            metrics[f"roles/{role}/{name}_mean"] = float(np.mean(of)) if len(of) else float("nan")
            metrics[f"roles/{role}/{name}_std"] = float(np.std(of)) if len(of) else float("nan")
        metrics[f"roles/{role}/advantage_zero_share"] = float(np.mean(values == 0)) if len(values) else float("nan")
    return metrics


def _all_agree(several: Sequence[TrajectoryGroup]) -> bool | None:
    """Return whether all scores are equal in each of them; None where no one has two scores."""
    scores = [[t.reward.score for t in c.trajectories if t.reward and t.reward.score is not None] for c in several]
    spreads = [np.ptp(of) for of in scores if len(of) > 1]
    return all(spread == 0 for spread in spreads) if spreads else None


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Return lengths, and the share of rollouts with segments of two or more policy versions."""
    rollouts = [r for g in groups for r in g.rollouts if not r.greedy]
    prompts = [float(len(r.prompt or g.prompt)) for g in groups for r in g.rollouts if not r.greedy]
    versions = [len(r.versions) for r in rollouts]
    lengths = [r.num_tokens for r in rollouts]
    return {
        "rollouts/partial_share": _mean([float(v >= 2) for v in versions]),
        "rollouts/versions_mean": _mean([float(v) for v in versions]),
        "rollouts/versions_max": float(max(versions)),
        "length/mean": _mean([float(n) for n in lengths]),
        "length/min": float(min(lengths)),
        "length/max": float(max(lengths)),
        "length/prompt_mean": _mean(prompts),
        "length/prompt_min": min(prompts),
        "length/prompt_max": max(prompts),
        "length/repetition": _mean([float(r.stop_reason is StopReason.REPETITION) for r in rollouts]),
        "length/truncated": _mean([float(r.stop_reason is StopReason.LENGTH) for r in rollouts]),
    }


def advantage_metrics(batch: Batch) -> dict[str, float]:
    """Return mean, deviation and range of the advantages of the tokens in the loss, as the loss used them."""
    found = [s.advantages[s.mask] for s in batch.samples if s.mask.any()]
    if not found:
        return {}
    values = np.concatenate(found)
    of = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {f"advantage/{name}": float(function(values)) for name, function in of.items()}


def turn_metrics(groups: list[Group]) -> dict[str, float]:
    """Return the turns (model calls) per trajectory, and the share of later turns that continued a rollout.

    The share is left out where no trajectory has a second turn.
    """
    sampled = [t for g in groups for e in episodes_of(g) for t in e.trajectories if not t.greedy]
    played = [rollouts for trajectory in sampled if (rollouts := _turns_of_rollouts(trajectory))]
    turns = [sum(rollouts) for rollouts in played]
    metrics = {"turns/mean": _mean([float(n) for n in turns]), "turns/max": float(max(turns, default=0))}
    if further := sum(turns) - len(played):
        metrics["turns/merged_share"] = (sum(turns) - sum(map(len, played))) / further
    return metrics


def _turns_of_rollouts(trajectory: Trajectory) -> list[int]:
    """Return the number of turns of each rollout with turns."""
    return [n for rollout in trajectory.rollouts if (n := len(turns_of(rollout)))]


def staleness_metrics(
    batch: Batch, trainer_version: int, ready_versions: Mapping[int, int] | None = None
) -> dict[str, float]:
    """Return the staleness of the tokens in the loss, and of their rollouts.

    `batch`: as the loss used it. `trainer_version`: before the step. `ready_versions`: group id -> trainer version when
    the group became READY. It splits staleness into in-flight and in-queue; without an entry for every group (recorded
    rollouts) there is no split. Replayed groups have another bound and are only in staleness/replayed_max.
    """
    in_loss = [s for s in batch.samples if s.mask.any()]
    samples = [s for s in in_loss if s.group_id not in batch.replayed]
    replayed = [staleness(s.versions[s.mask], trainer_version).max() for s in in_loss if s.group_id in batch.replayed]
    rollouts = [staleness(s.versions[s.mask], trainer_version) for s in samples] or [np.zeros(1, dtype=np.int32)]
    ages, oldest = np.concatenate(rollouts), [float(r.max()) for r in rollouts]
    metrics = {
        "staleness/max": float(np.max(ages)),
        "staleness/mean": float(np.mean(ages)),
        **{f"staleness/p{q}": _percentile(ages, q) for q in (50, 95, 99)},
        "staleness/rollout_mean": _mean(oldest),
        "staleness/rollout_p95": _percentile(oldest, 95),
    }
    if samples and ready_versions and all(s.group_id in ready_versions for s in samples):
        in_flight = np.concatenate([staleness(s.versions[s.mask], ready_versions[s.group_id]) for s in samples])
        ready = np.repeat([ready_versions[s.group_id] for s in samples], [s.mask.sum() for s in samples])
        metrics["staleness/in_flight_mean"] = float(np.mean(in_flight))
        metrics["staleness/in_queue_mean"] = float(np.mean(staleness(ready, trainer_version)))
    if replayed:
        metrics["staleness/replayed_max"] = float(max(replayed))
    return metrics


def mask_metrics(batch: Batch) -> dict[str, float]:
    """Return the number of rollouts that filters masked in the loss, and of their sampled tokens."""
    rollouts = [m.rollout for m in batch.masked.rollouts]
    return {
        "train/masked_rollouts": float(len(rollouts)),
        "train/masked_tokens": float(sum(r.num_sampled_tokens for r in rollouts)),
    }


def _percentile(values: np.ndarray | list[float], q: float) -> float:
    """Return the smallest of `values` that at least `q` percent do not exceed."""
    return float(np.percentile(values, q, method="inverted_cdf"))


def waste_metrics(engine: Mapping[str, float], row: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens and seconds spent on dropped and repeated work. `engine`: growth of its counters in this step.

    Seconds are estimates from this step's mean time of a generated token (dropped ones) and of a prefilled token
    (prefilled again). Without such a time there is no estimate.
    """
    again, first = engine["engine/reprefill_tokens"], engine["engine/prefill_tokens"]
    generated, dropped = row["tokens/step_generated"], row["waste/dropped_tokens"]
    processed = first + again + generated
    metrics = {"waste/reprefilled_tokens": again, "tokens/step_processed": processed}
    if processed:
        metrics["waste/reprefilled_share"] = again / processed
    if row["tokens/generated"]:
        metrics["waste/dropped_share"] = row["tokens/dropped"] / row["tokens/generated"]
    if generated:
        metrics["waste/dropped_s"] = dropped * row["time/generate_s"] / generated
    if "engine/prefill_s" in engine and first + again:
        metrics["waste/reprefilled_s"] = engine["engine/prefill_s"] * again / (first + again)
    return metrics


def speed_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens per second of this step."""
    pairs = {
        "speed/generated_tokens_per_s": ("tokens/step_generated", "time/generate_s"),
        "speed/trained_tokens_per_s": ("tokens/step_trained", "time/train_s"),
        "speed/step_tokens_per_s": ("tokens/step_trained", "time/step_s"),
    }
    return {key: row[tokens] / row[seconds] for key, (tokens, seconds) in pairs.items() if row.get(seconds)}
