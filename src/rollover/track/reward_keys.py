"""The metric keys of rewards: of the task, of shaping, and of the workers that score. A part of the table in
metric_keys.py."""

from __future__ import annotations

from rollover.track.metric import Metric

REWARDS: list[Metric] = [
    # Reward
    Metric("reward/mean", "mean", "reward", "Mean score of the trained trajectories that have one."),
    Metric("reward/std", "mean", "reward", "Standard deviation of those scores."),
    Metric("reward/{source}/mean", "mean", "reward", "Mean score of the trained trajectories of one task source."),
    Metric("reward/missing", "sum", "trajectories", "Trained groups' trajectories without a reward (masked, never 0)."),
    Metric(
        "roles/{role}/reward_mean",
        "mean",
        "reward",
        "Mean score of the trajectories of one role, where there are several roles.",
    ),
    Metric("roles/{role}/reward_std", "mean", "reward", "Standard deviation of those scores."),
    Metric("roles/{role}/advantage_mean", "mean", "", "Mean advantage of its loss tokens, as the loss has them."),
    Metric("roles/{role}/advantage_std", "mean", "", "Standard deviation of those advantages."),
    Metric("roles/{role}/advantage_zero_share", "mean", "share", "Share of those tokens whose advantage is 0."),
    Metric("reward/extra/{name}", "mean", "", "Mean of one further entry of the dicts that the reward returned."),
    # Shaping: what is trained in the place of scores (docs/rewards.md)
    Metric("shaping/{term}/mean", "mean", "reward", "Mean of one term of shaping over the trained trajectories."),
    Metric("shaping/{term}/share", "mean", "share", "Share of those trajectories for which the term is not 0."),
    Metric("shaping/clipped_share", "mean", "share", "Share of them whose reward rewards.clip_range changed."),
    Metric("shaping/running_mean", "last", "reward", "Mean of all rewards so far, before normalisation."),
    Metric("shaping/running_std", "last", "reward", "Their standard deviation, which rewards.running_norm divides by."),
    Metric("roles/{role}/running_mean", "last", "reward", "That mean of one role, where there are several roles."),
    Metric("roles/{role}/running_std", "last", "reward", "That deviation of one role, where there are several roles."),
    Metric("shaping/reward_mean", "mean", "reward", "Mean of the rewards that are trained, after all shaping."),
    Metric("shaping/reward_std", "mean", "reward", "Standard deviation of those rewards."),
    # Rewards workers
    Metric("rewards/timeouts", "counter", "calls", "Reward calls past rewards.timeout_s; the worker was killed."),
    Metric("rewards/crashes", "counter", "calls", "Reward calls whose worker died, or gave no reply to them."),
    Metric("rewards/errors", "counter", "rewards", "Missing since the function raised, or returned no score."),
    Metric("rewards/out_of_memory", "counter", "rewards", "Missing since the function raised a MemoryError."),
    Metric("rewards/quarantined", "counter", "rewards", "Missing since the task had ended too many workers."),
    Metric("rewards/retries", "counter", "calls", "Calls made again after a timeout or a crash."),
    Metric("rewards/busy_workers", "last", "workers", "Reward workers with a group at the end of the step."),
    Metric("rewards/queue", "last", "groups", "Groups that wait for a reward worker at the end of the step."),
    Metric("rewards/longest_call_s", "last", "s", "Age of the oldest call that a reward worker is at then; 0: none."),
    Metric("rewards/nodes", "last", "nodes", "Reward nodes that serve at the end of the step. On a cluster only."),
    Metric("rewards/lost_nodes", "counter", "nodes", "Times that a reward node was lost. On a cluster only."),
    Metric("rewards/lost_calls", "counter", "calls", "Calls made again as their node was lost. On a cluster only."),
]
