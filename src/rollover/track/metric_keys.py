"""Every metric key of `metrics.jsonl`: its meaning, its unit and the reduction of its values over several steps.

A key may hold placeholders, as in `dropped/{reason}/groups`. Each stands for one name, which may contain slashes
(`reward/openai/gsm8k/mean`). docs/metrics.md is generated from this table (track/metrics.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "last", "counter", "rate"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One key of `metrics.jsonl`.

    `kind`: the reduction over several steps: mean, sum, max, last (gauges), counter (last value of a counter over the
    whole run), or rate: sum of `numerator` / sum of `denominator` (both keys of METRICS).
    """

    key: str
    kind: Kind
    unit: str
    doc: str
    numerator: str = ""
    denominator: str = ""


METRICS: list[Metric] = [
    # Progress
    Metric("step", "last", "steps", "Training step that this row describes, from 1."),
    Metric("policy_version", "last", "version", "Policy version after the step: training steps completed."),
    Metric("time", "last", "unix s", "When the row was written."),
    # Reward
    Metric("reward/mean", "mean", "reward", "Mean score of the trained trajectories with a score."),
    Metric("reward/std", "mean", "reward", "Standard deviation of the scores in reward/mean."),
    Metric("reward/{source}/mean", "mean", "reward", "Mean score of the trained trajectories of one task source."),
    Metric("reward/missing", "sum", "trajectories", "Trained groups' trajectories without a reward (masked, never 0)."),
    Metric(
        "roles/{role}/reward_mean",
        "mean",
        "reward",
        "Mean score of the trained trajectories of one role; only with several roles.",
    ),
    Metric(
        "roles/{role}/reward_std", "mean", "reward", "Standard deviation of the scores in roles/{role}/reward_mean."
    ),
    Metric("roles/{role}/advantage_mean", "mean", "", "Mean advantage of the role's loss tokens, as in the loss."),
    Metric("roles/{role}/advantage_std", "mean", "", "Standard deviation of the advantages of the role's loss tokens."),
    Metric("roles/{role}/advantage_zero_share", "mean", "share", "Share of the role's loss tokens with advantage 0."),
    Metric("reward/extra/{name}", "mean", "", "Mean of a further entry of the dicts that the reward function returns."),
    # Shaping of the trained rewards (docs/rewards.md)
    Metric("shaping/{term}/mean", "mean", "reward", "Mean of one term of shaping over the trained trajectories."),
    Metric(
        "shaping/{term}/share", "mean", "share", "Share of the trained trajectories with a nonzero value of the term."
    ),
    Metric(
        "shaping/clipped_share",
        "mean",
        "share",
        "Share of the trained trajectories whose reward rewards.clip_range changed.",
    ),
    Metric("shaping/running_mean", "last", "reward", "Mean of all rewards so far, before normalisation."),
    Metric(
        "shaping/running_std",
        "last",
        "reward",
        "Standard deviation of all rewards so far, the divisor of rewards.running_norm.",
    ),
    Metric("roles/{role}/running_mean", "last", "reward", "shaping/running_mean of one role; only with several roles."),
    Metric("roles/{role}/running_std", "last", "reward", "shaping/running_std of one role; only with several roles."),
    Metric("shaping/reward_mean", "mean", "reward", "Mean of the trained rewards, after all shaping."),
    Metric("shaping/reward_std", "mean", "reward", "Standard deviation of the trained rewards, after all shaping."),
    # Rewards workers
    Metric("rewards/timeouts", "counter", "calls", "Reward calls past rewards.timeout_s; the worker was killed."),
    Metric("rewards/crashes", "counter", "calls", "Reward calls whose worker died or did not reply."),
    Metric("rewards/errors", "counter", "rewards", "Missing rewards: the function raised, or returned no score."),
    Metric("rewards/out_of_memory", "counter", "rewards", "Missing rewards: the function raised a MemoryError."),
    Metric("rewards/quarantined", "counter", "rewards", "Missing rewards: the task had crashed too many workers."),
    Metric("rewards/retries", "counter", "calls", "Calls repeated after a timeout or a crash."),
    Metric("rewards/busy_workers", "last", "workers", "Reward workers with a group at the end of the step."),
    Metric("rewards/queue", "last", "groups", "Groups that wait for a reward worker at the end of the step."),
    Metric(
        "rewards/longest_call_s", "last", "s", "Age of the oldest running reward call at the end of the step; 0: none."
    ),
    Metric("rewards/nodes", "last", "nodes", "Reward nodes that serve at the end of the step. On a cluster only."),
    Metric("rewards/lost_nodes", "counter", "nodes", "Failures of reward nodes. On a cluster only."),
    Metric("rewards/lost_calls", "counter", "calls", "Calls repeated after a node failure. On a cluster only."),
    # Of the user's own
    Metric("own/{name}", "mean", "", "Value of this name from the function of track.metrics."),
    # Environments of workflow.environment; what evaluations do is not counted
    Metric("tools/calls", "counter", "calls", "Tool calls of the policy, malformed ones included."),
    Metric("tools/malformed", "counter", "calls", "Tool calls that cannot be parsed."),
    Metric(
        "tools/errors", "counter", "calls", "Tool calls to an unknown tool, with wrong arguments, or whose tool raised."
    ),
    Metric("tools/timeouts", "counter", "calls", "Tool calls without an answer within workflow.tool_timeout_s."),
    Metric("tools/time_s", "counter", "s", "Sum of the durations of all tool calls."),
    Metric("tools/left_behind", "counter", "threads", "Threads of tool calls that did not end in time."),
    Metric("episodes/done", "counter", "episodes", "Episodes that ended by themselves: no call, done, returned."),
    Metric("episodes/error", "counter", "episodes", "Episodes whose agent failed, after all retries."),
    Metric("episodes/restarted", "counter", "episodes", "Restarts after a failed agent or a lost environment."),
    Metric("episodes/restored", "counter", "episodes", "Environments restored from a snapshot."),
    Metric("episodes/unsaved", "counter", "episodes", "Environments whose snapshot failed."),
    Metric("episodes/replayed", "counter", "episodes", "Agents that ended with the process and were run again."),
    Metric("episodes/diverged", "counter", "episodes", "Replayed agents that did not repeat all their requests."),
    Metric("turns/continued", "counter", "turns", "Model calls of agents that continued a rollout."),
    Metric(
        "turns/breaks/{reason}",
        "counter",
        "turns",
        "Model calls, after a trajectory's first, that opened a new rollout.",
    ),
    Metric("episodes/max_turns", "counter", "episodes", "Episodes of environments that ended at workflow.max_turns."),
    Metric(
        "episodes/length",
        "counter",
        "episodes",
        "Episodes that ended at rollout.max_new_tokens; of agents: without tokens or turns left.",
    ),
    # Ledger
    Metric("tokens/generated", "counter", "tokens", "Sampled tokens since step 1. Equals trained + dropped + held."),
    Metric(
        "tokens/trained", "counter", "tokens", "Sampled tokens of consumed rollouts, rejected ones too; cumulative."
    ),
    Metric("tokens/dropped", "counter", "tokens", "Sampled tokens whose group was dropped, cumulative, all reasons."),
    Metric("tokens/environment", "counter", "tokens", "Tokens from environments; in no other account."),
    Metric("tokens/held", "last", "tokens", "Sampled tokens of groups in the system, unfinished ones included."),
    Metric(
        "tokens/step_generated",
        "sum",
        "tokens",
        "Tokens sampled in this step; after a restart within the step, since the restart.",
    ),
    Metric(
        "tokens/step_processed",
        "sum",
        "tokens",
        "Tokens computed by the engine in this step: prefilled, prefilled again and sampled.",
    ),
    Metric("tokens/step_trained", "sum", "tokens", "Loss tokens of this step, with those of replayed groups."),
    Metric(
        "dropped/{reason}/groups",
        "counter",
        "groups",
        "Groups dropped for this reason, cumulative (masked, abandoned: 0, as their groups are trained).",
    ),
    Metric("dropped/{reason}/tokens", "counter", "tokens", "Sampled tokens dropped for this reason, cumulative."),
    Metric(
        "filtered/{filter}/groups",
        "counter",
        "groups",
        "Part of dropped/filtered/groups that this filter dropped, cumulative; absent before its first.",
    ),
    Metric("watchdog/stalled_rollouts", "counter", "rollouts", "Stalls of rollouts (watchdog.rollout_timeout_s)."),
    Metric("watchdog/stalled_rewards", "counter", "groups", "Stalls of scorings (watchdog.reward_timeout_s)."),
    Metric(
        "watchdog/redispatched",
        "counter",
        "",
        "Stalled rollouts that were continued, and stalled scorings that were repeated.",
    ),
    Metric(
        "watchdog/refused_answers",
        "counter",
        "",
        "Rejected answers of the engine (docs/watchdog.md); their tokens count as never generated.",
    ),
    Metric(
        "groups/batches_drawn",
        "sum",
        "batches",
        "Groups admitted in the step / rollout.groups_per_step: verl's train/num_gen_batches.",
    ),
    Metric("groups/admitted", "counter", "groups", "Groups admitted since step 1. Equals consumed + dropped + held."),
    Metric("groups/consumed", "counter", "groups", "Groups trained, cumulative."),
    Metric("groups/dropped", "counter", "groups", "Groups dropped, cumulative, all reasons."),
    Metric("groups/held", "last", "groups", "Groups in the system."),
    Metric(
        "groups/in_flight_limit",
        "last",
        "groups",
        "Limit of groups held at once; rollout.in_flight_groups = auto adapts it.",
    ),
    Metric(
        "groups/zero_variance",
        "mean",
        "share",
        "Share of the trained groups with equal rewards in every role, among those with two or more rewards of a "
        "role; they give no signal.",
    ),
    Metric(
        "precomputed/groups",
        "sum",
        "groups",
        "TrajectoryGroups of the step with their own advantages (workflow.own_advantages = auto).",
    ),
    Metric(
        "precomputed/partial_groups",
        "sum",
        "groups",
        "TrajectoryGroups with own advantages for some turns only, which are estimated instead "
        "(workflow.own_advantages = auto).",
    ),
    Metric("tasks/left_out", "counter", "tasks", "Tasks for which tasks.before_produce returned None."),
    Metric("tasks/dropped_last", "counter", "tasks", "Tasks dropped at the end of a pass (tasks.drop_last)."),
    Metric("tasks/failed", "counter", "tasks", "Problems skipped because their generator failed, cumulative."),
    # Supervised training (only of examples)
    Metric("sft/loss", "mean", "nats", "Negative log-likelihood per trained token of the examples."),
    Metric("sft/epoch", "last", "passes", "Passes over the examples so far."),
    Metric("sft/examples", "counter", "examples", "Trained examples, those of earlier passes included."),
    Metric("sft/skipped", "last", "examples", "Examples skipped because they are longer than sft.max_tokens."),
    Metric(
        "eval/sft_loss",
        "mean",
        "nats",
        "sft/loss of the held-out examples, under the weights after the step (sft.eval_every_steps).",
    ),
    # Replay and re-roll (only when on)
    Metric(
        "tokens/replayed",
        "counter",
        "tokens",
        "Loss tokens of replayed groups after their first use, cumulative; the first use counts in tokens/trained.",
    ),
    Metric("replay/replaced", "counter", "groups", "Groups without signal replaced by groups from the replay buffer."),
    Metric("replay/size", "last", "groups", "Groups in the replay buffer."),
    Metric("replay/stale", "counter", "groups", "Groups removed from the replay buffer beyond replay.max_staleness."),
    Metric("replay/evicted", "counter", "groups", "Groups with the lowest score removed from a full replay buffer."),
    Metric("reroll/size", "last", "tasks", "Failed tasks in the queue."),
    Metric("reroll/queued", "counter", "tasks", "Failed tasks that were queued."),
    Metric("reroll/given", "counter", "tasks", "Failed tasks admitted again."),
    Metric("reroll/solved", "counter", "tasks", "Tasks admitted again that were trained without failing again."),
    Metric("reroll/dropped", "counter", "tasks", "Failed tasks that found a full queue (reroll.size)."),
    # Curriculum (only when on)
    Metric("curriculum/known", "last", "tasks", "Tasks (sources, levels) with a measured pass rate."),
    Metric("curriculum/easy", "last", "tasks", "Easy tasks with a measured pass rate (tasks.curriculum.easy_from)."),
    Metric("curriculum/normal", "last", "tasks", "Tasks with a measured pass rate, neither easy nor hard."),
    Metric("curriculum/hard", "last", "tasks", "Hard tasks with a measured pass rate (tasks.curriculum.hard_to)."),
    Metric("curriculum/pass_rate", "last", "share", "Mean of the measured pass rates."),
    Metric(
        "curriculum/given_pass_rate",
        "mean",
        "share",
        "Mean of the measured pass rates of the tasks admitted in the step; absent without any.",
    ),
    Metric("curriculum/passed_over", "counter", "tasks", "Tasks skipped at their turn."),
    Metric(
        "tasks/truncated_prompt", "counter", "tasks", "Tasks with a truncated prompt (tasks.truncation), cumulative."
    ),
    Metric("tasks/skipped_long_prompt", "counter", "tasks", "Tasks skipped by tasks.max_prompt_tokens, cumulative."),
    # Rollouts
    Metric("turns/mean", "mean", "turns", "Mean number of the policy's turns in a trained trajectory."),
    Metric("turns/max", "max", "turns", "Largest number of the policy's turns in a trained trajectory."),
    Metric(
        "turns/merged_share",
        "mean",
        "share",
        "Share of the later turns of trained trajectories that continued a rollout instead of opening one.",
    ),
    Metric("rollouts/acting", "last", "rollouts", "Rollouts with a working environment at the end of the step."),
    Metric("episodes/ended", "counter", "episodes", "Episodes that ended by their environment or function."),
    Metric("episodes/timeout", "counter", "episodes", "Episodes that ended at workflow.timeout_s, cumulative."),
    Metric("episodes/failed", "counter", "rollouts", "Rollouts whose environment failed in every retry, cumulative."),
    Metric("episodes/retried", "counter", "turns", "Turns repeated after a failure of the environment."),
    Metric(
        "episodes/timeout_share",
        "mean",
        "share",
        "Share of the episodes of this step that ended at workflow.timeout_s.",
    ),
    Metric("rollouts/resumed", "counter", "rollouts", "Continuations of unfinished rollouts."),
    Metric(
        "rollouts/partial_share", "mean", "share", "Share of trained rollouts with segments of >= 2 policy versions."
    ),
    Metric("rollouts/versions_mean", "mean", "versions", "Mean number of policy versions in a trained rollout."),
    Metric("rollouts/versions_max", "max", "versions", "Largest number of policy versions in a trained rollout."),
    Metric("length/mean", "mean", "tokens", "Mean length of the trained rollouts, without prompt."),
    Metric("length/min", "last", "tokens", "Shortest trained rollout, without prompt."),
    Metric("length/max", "max", "tokens", "Longest trained rollout, without prompt."),
    Metric("length/prompt_mean", "mean", "tokens", "Mean length of the trained rollouts' prompts."),
    Metric("length/prompt_min", "last", "tokens", "Shortest prompt of the trained rollouts."),
    Metric("length/prompt_max", "max", "tokens", "Longest prompt of the trained rollouts."),
    Metric(
        "length/longest_of_group", "last", "tokens", "Longest rollout of a group, running mean over finished groups."
    ),
    Metric(
        "length/repetition", "mean", "share", "Share of trained rollouts stopped by rollout.stop_repetition_tokens."
    ),
    Metric(
        "length/truncated", "mean", "share", "Share of trained rollouts truncated by a limit (as for mask_truncated)."
    ),
    Metric("staleness/max", "max", "versions", "Largest trainer_version - policy_version of a token in the loss."),
    Metric("staleness/mean", "mean", "versions", "Mean staleness over the tokens in the loss."),
    Metric(
        "staleness/replayed_max",
        "max",
        "versions",
        "Largest staleness of a replayed token in the loss, bounded by replay.max_staleness. The other staleness/ keys"
        " are of fresh rollouts.",
    ),
    Metric(
        "staleness/p{percent}",
        "mean",
        "versions",
        "50th, 95th and 99th percentile of the staleness over the loss tokens.",
    ),
    Metric(
        "staleness/rollout_mean", "mean", "versions", "Mean over trained rollouts of their oldest token in the loss."
    ),
    Metric(
        "staleness/rollout_p95",
        "mean",
        "versions",
        "95th percentile over trained rollouts of their oldest token in the loss.",
    ),
    Metric(
        "staleness/in_flight_mean",
        "mean",
        "versions",
        "Part of staleness/mean: policy versions from sampling the token to its group's READY.",
    ),
    Metric(
        "staleness/in_queue_mean",
        "mean",
        "versions",
        "The rest of staleness/mean: policy versions from the group's READY to its step.",
    ),
    Metric("staleness/bound", "last", "versions", "Bound of staleness/max: rollout.max_staleness."),
    Metric(
        "state/{state}_s",
        "mean",
        "s",
        "Mean time of a trained rollout in each state: waiting (for its first slot), running, parked, acting (its "
        "environment works), scoring (generation of its siblings, and the reward), ready (for its step). The sum "
        "is its life from admission.",
    ),
    # Waste
    Metric("waste/reprefilled_tokens", "sum", "tokens", "Tokens prefilled again in this step."),
    Metric(
        "waste/reprefilled_share",
        "rate",
        "share",
        "Share of the computed tokens that were prefilled again.",
        "waste/reprefilled_tokens",
        "tokens/step_processed",
    ),
    Metric(
        "waste/reprefilled_s",
        "sum",
        "s",
        "Estimate: prefill time of this step (engine/prefill_s) times the share of tokens prefilled again, if the "
        "engine measures it.",
    ),
    Metric("waste/dropped_tokens", "sum", "tokens", "Sampled tokens dropped in this step, masked ones included."),
    Metric("waste/dropped_share", "last", "share", "tokens/dropped / tokens/generated, over the whole run so far."),
    Metric("waste/dropped_s", "sum", "s", "Estimate: waste/dropped_tokens / speed/generated_tokens_per_s."),
    # Length bias
    Metric(
        "bias/trained_vs_dispatched_length",
        "last",
        "",
        "Mean length of all trained rollouts / mean length of all dispatched rollouts (with a token), so far. 1: "
        "no bias; below 1: short rollouts are trained first, or long ones dropped. Lengths of unfinished rollouts "
        "are lower bounds: the second mean is the Kaplan-Meier estimate.",
    ),
    Metric(
        "bias/wait_steps_q{quarter}",
        "mean",
        "versions",
        "Mean policy versions from admission to the step of the trained rollouts, by quarter of their lengths (1: "
        "shortest, 4: longest).",
    ),
    # Time
    Metric("time/step_s", "sum", "s", "Wall-clock time of the step: the sum of its phases, without streaming."),
    Metric("time/generate_s", "sum", "s", "Time the trainer waited for generation."),
    Metric("time/score_s", "sum", "s", "Time the trainer waited for rewards only."),
    Metric("time/schedule_s", "sum", "s", "Time for new tasks, scheduling and bookkeeping of rollouts."),
    Metric("time/train_s", "sum", "s", "Time for proximal log-probs, forward, backward and optimizer."),
    Metric("time/logprobs_s", "sum", "s", "Part of time/train_s: log-probs of the policy before the updates."),
    Metric("time/reference_s", "sum", "s", "Part of time/train_s: log-probs of the reference (algorithm.kl_coef)."),
    Metric("time/teacher_s", "sum", "s", "Part of time/train_s: passes of the teacher ([distill])."),
    Metric("time/values_s", "sum", "s", "Part of time/train_s: values of the critic."),
    Metric(
        "time/update_s",
        "sum",
        "s",
        "Part of time/train_s: forward, backward and optimizer, also of early groups (train.streaming_min_groups).",
    ),
    Metric("time/critic_s", "sum", "s", "Part of time/update_s: the critic."),
    Metric("time/weights_s", "sum", "s", "Time of the weight sync."),
    Metric("time/sleep_s", "sum", "s", "Time to put servers to sleep before training (cluster.colocate)."),
    Metric("time/checkpoint_s", "sum", "s", "Time to write checkpoints."),
    Metric("time/eval_s", "sum", "s", "Time of evaluations between steps."),
    Metric("time/other_s", "sum", "s", "The rest of the step."),
    Metric(
        "wait/engine_for_trainer_s",
        "sum",
        "s",
        "With rollout.overlap: idle time of the engine until the trainer has trained or synced weights. Waits of "
        "the trainer are in time/generate_s and time/score_s.",
    ),
    Metric(
        "wait/engine_for_rewards_s",
        "sum",
        "s",
        "With rollout.overlap: idle time of the engine while the trainer works and only rewards are pending.",
    ),
    Metric("wait/environment_s", "sum", "s", "Part of time/generate_s: time the trainer waited for environments only."),
    Metric(
        "speed/generated_tokens_per_s",
        "rate",
        "tokens/s",
        "Generation speed during generation.",
        "tokens/step_generated",
        "time/generate_s",
    ),
    Metric(
        "speed/trained_tokens_per_s",
        "rate",
        "tokens/s",
        "Training speed during training.",
        "tokens/step_trained",
        "time/train_s",
    ),
    Metric(
        "speed/step_tokens_per_s",
        "rate",
        "tokens/s",
        "Throughput of the whole loop: trained tokens / time of the step.",
        "tokens/step_trained",
        "time/step_s",
    ),
    Metric("perf/train_flops", "sum", "FLOP", "Model FLOPs of the step's training (docs/gpu.md); recomputation once."),
    Metric("perf/generate_flops", "sum", "FLOP", "Model FLOPs of the step's generation, repeated prefill included."),
    Metric("perf/mfu_train", "mean", "share", "perf/train_flops by the trainer's peak in time/train_s."),
    Metric(
        "perf/mfu_generate",
        "mean",
        "share",
        "perf/generate_flops by the engine's peak in time/generate_s (with rollout.overlap: in time/step_s).",
    ),
    Metric("perf/peak_tflops", "last", "TFLOP/s", "That peak, of the trainer's device: track.peak_tflops."),
    Metric(
        "perf/cpu_utilization",
        "mean",
        "share",
        "CPU time of the run's processes by step time and cores of this machine.",
    ),
    Metric(
        "perf/cpu/{role}",
        "mean",
        "share",
        "The same by role: controller, engine, rewards, ranks, servers, agents, others. On this machine only.",
    ),
    Metric(
        "perf/gpu_utilization",
        "mean",
        "share",
        "Mean of the utilization samples of the visible NVIDIA GPUs in the step; needs nvidia-ml-py.",
    ),
    Metric("weights/bytes", "sum", "bytes", "Bytes of weights handed to the engine."),
    # Optimization
    Metric("loss", "mean", "", "Loss of the step, as algorithm.aggregation defines it: the mean of its updates."),
    Metric("advantage/mean", "mean", "", "Mean advantage of the tokens in the loss, as the loss had them."),
    Metric("advantage/std", "mean", "", "Their standard deviation."),
    Metric("advantage/min", "last", "", "The least of them."),
    Metric("advantage/max", "max", "", "The largest of them."),
    Metric("train/zero_advantage_tokens", "sum", "tokens", "Loss tokens left out of passes: advantage 0."),
    Metric("train/threads", "mean", "threads", "Mean CPU threads of this step's micro-batches, by time."),
    Metric("train/masked_rollouts", "sum", "rollouts", "Rollouts that filters.mask_* or roles took out of the loss."),
    Metric("train/masked_tokens", "sum", "tokens", "Their sampled tokens, which are in tokens/trained all the same."),
    Metric("train/restarts", "counter", "restarts", "Losses of the trainer's backend after which the run went on."),
    Metric("train/skipped_steps", "sum", "updates", "Optimizer steps skipped because a gradient was not finite."),
    Metric(
        "train/updates", "sum", "updates", "Optimizer steps that were made: not skipped, nor left out by train.max_kl."
    ),
    Metric("grad_norm", "mean", "", "Global gradient norm before clipping: the mean of the step's updates."),
    Metric("grad_norm_max", "max", "", "The largest of the step's updates."),
    Metric("learning_rate", "last", "", "Learning rate of the step's last optimizer step."),
    Metric("entropy", "mean", "nats", "Mean entropy of the current policy over the computed tokens."),
    Metric("clip_fraction", "mean", "share", "Share of the computed tokens whose ratio was clipped."),
    Metric("ratio/mean", "mean", "", "Mean of current / proximal probability over the computed tokens."),
    Metric("ratio/max", "max", "", "Its maximum."),
    # Correction for tokens of other versions
    Metric("importance/mean", "mean", "", "Mean weight proximal / behavior of computed tokens, before the cap."),
    Metric("importance/max", "max", "", "Its maximum, before the cap."),
    Metric("importance/capped_share", "mean", "share", "Share of tokens whose weight passed algorithm.correction_cap."),
    Metric("mismatch/logprob_abs_mean", "mean", "nats", "Mean |proximal - behavior| log-prob of computed tokens."),
    Metric("mismatch/logprob_abs_max", "max", "nats", "Maximum of the differences in mismatch/logprob_abs_mean."),
    Metric("importance/below_share", "mean", "share", "Share of tokens whose weight was below its floor."),
    Metric("importance/weight_mean", "mean", "", "Mean importance weight as applied: capped, masked ones 0."),
    Metric("importance/normalizer", "mean", "", "What algorithm.correction_normalize divided the weights by."),
    Metric("importance/ess", "mean", "share", "Effective sample size of the weights as applied, by loss tokens."),
    Metric("importance/ess_token_ratio", "mean", "share", "The same of proximal/behavior per token, before any cap."),
    Metric("importance/ess_sequence_ratio", "mean", "share", "The same of whole sequences' proximal/behavior."),
    Metric("mismatch/bounded_share", "mean", "share", "Share of tokens whose log-ratio was bounded to +-20."),
    Metric("mismatch/k3", "mean", "nats", "KL(behavior, proximal), k3 estimate: never negative."),
    Metric("mismatch/chi2_token", "mean", "", "Chi-square divergence of proximal from behavior, by token ratios."),
    Metric("mismatch/chi2_sequence", "mean", "", "The same by ratios of whole sequences."),
    Metric("mismatch/proximal_ppl", "mean", "", "Mean perplexity of a rollout's loss tokens, proximal policy."),
    Metric("mismatch/behavior_ppl", "mean", "", "Mean perplexity of a rollout's loss tokens, behavior policy."),
    Metric("mismatch/ppl_ratio", "mean", "", "Mean ratio of the two, proximal / behavior."),
    Metric("mismatch/log_ppl_difference", "mean", "nats", "Mean difference of their logarithms."),
    Metric("mismatch/log_ppl_abs_difference", "mean", "nats", "Mean absolute difference of their logarithms."),
    Metric("mismatch/log_ppl_difference_max", "max", "nats", "The largest difference of a rollout."),
    Metric("mismatch/log_ppl_difference_min", "last", "nats", "The smallest difference of a rollout."),
    Metric(
        "kl/step_start",
        "max",
        "nats",
        "Largest mean KL (k3) between the policy at the step's start and at a later update of it, with train.max_kl.",
    ),
    Metric("kl/reference", "mean", "nats", "KL to the reference policy, as in the loss (algorithm.kl_coef)."),
    Metric("kl/in_reward", "mean", "nats", "KL in the reward: its mean over tokens, then rollouts, policy-weighted."),
    Metric("kl/coef", "last", "", "KL in the reward: the coefficient of the step, which kl_target may move."),
    Metric("distill/kl", "mean", "nats", "KL(policy || teacher) before distill.clip, times policy/behavior up to 2."),
    Metric("distill/clipped_share", "mean", "share", "Share of the loss tokens that distill.clip bounds."),
    Metric("off_policy/rejected_share", "mean", "share", "Share of the loss that algorithm.rejection leaves out."),
    Metric("off_policy/masked_share", "mean", "share", "Share left out by off_policy_mask_above."),
    Metric("critic/loss", "mean", "", "Value loss (algorithm.advantage = gae), clipped as critic.value_clip says."),
    Metric("critic/grad_norm", "mean", "", "Gradient norm of the critic, mean over the step's updates."),
    Metric("critic/grad_norm_max", "max", "", "Largest gradient norm of the critic's updates in the step."),
    Metric("critic/learning_rate", "last", "", "Learning rate of the critic's own model, else of the value head."),
    Metric(
        "critic/skipped_steps", "sum", "updates", "Skipped optimizer steps of the critic: a gradient was not finite."
    ),
    Metric("critic/clipped_share", "mean", "share", "Share of loss tokens whose value critic.value_clip holds."),
    Metric("critic/value_mean", "mean", "", "Mean value of a loss token before the step."),
    Metric("critic/return_mean", "mean", "", "Mean return of a loss token."),
    Metric(
        "critic/explained_variance",
        "mean",
        "share",
        "1 - Var(return - value) / Var(return) over loss tokens, by the values before the step.",
    ),
    Metric("mismatch/kl", "mean", "nats", "KL(behavior, proximal), k1 estimate: mean of behavior - proximal log-prob."),
    # Journal
    Metric("journal/time_s", "sum", "s", "Time spent on the journal; part of the time/ keys."),
    Metric("journal/bytes", "last", "bytes", "Size of the journal since the newest checkpoint."),
    Metric("journal/failed", "counter", "", "Failed writes of the journal (full disk), which end it."),
    Metric("journal/cut_bytes", "counter", "bytes", "Bytes of torn or damaged journals that were ignored on resume."),
    Metric("mirror/failed", "counter", "", "Failed copies of the run to a remote checkpoint.dir."),
    Metric(
        "trackers/failed",
        "counter",
        "",
        "Failures of track.trackers. Events that a custom tracker missed are not sent again; external trackers get "
        "them from the run's files.",
    ),
    Metric(
        "trackers/lost",
        "counter",
        "",
        "Rows, evaluations and samples that an external tracker did not take in time (docs/trackers.md).",
    ),
    Metric("engine/decode_steps", "counter", "steps", "Decode steps; with servers and services: tokens."),
    Metric(
        "engine/prefill_tokens",
        "counter",
        "tokens",
        "Tokens prefilled for the first time; with servers: sent tokens, cached ones included.",
    ),
    Metric("engine/reprefill_tokens", "counter", "tokens", "Tokens prefilled again (a cost)."),
    Metric("engine/prefill_s", "counter", "s", "Time in prefill. Not on a GPU, where it is not known without waiting."),
    Metric("engine/flops", "counter", "FLOP", "Model FLOPs computed; perf/generate_flops has those of the step."),
    Metric("engine/decode_s", "counter", "s", "Time in decode steps. Not on a GPU, as engine/prefill_s."),
    Metric("engine/decode_thread_s", "counter", "thread s", "The time of each decode step times its CPU threads."),
    Metric("engine/threads", "mean", "threads", "Mean CPU threads of this step's decode steps, by time."),
    Metric("engine/restarts", "counter", "processes", "Restarts of dead engine processes."),
    # Of servers (engine.kind = "remote")
    Metric("engine/servers", "last", "servers", "Serving servers of a remote engine."),
    Metric("engine/ejections", "counter", "servers", "Servers ejected: failed, silent, or restarted."),
    Metric(
        "engine/lost_requests",
        "counter",
        "requests",
        "Requests that broke off; the rollout continued on another server.",
    ),
    Metric(
        "engine/abandoned_requests", "counter", "requests", "Requests that ignored an abort, and were disconnected."
    ),
    Metric(
        "engine/resumed_in_place",
        "counter",
        "rollouts",
        "Rollouts resumed on the server with their tokens in the cache.",
    ),
    Metric(
        "engine/resumed_elsewhere",
        "counter",
        "rollouts",
        "Rollouts resumed on another server, because theirs had no room.",
    ),
    Metric("engine/surplus_tokens", "counter", "tokens", "Tokens sampled after a rollout's end, and removed."),
    Metric(
        "engine/span_mismatches",
        "counter",
        "requests",
        "Requests with inconsistent policy versions in the server's reply.",
    ),
    Metric("engine/refused_weights", "counter", "", "Weight syncs that a server rejected."),
    Metric("engine/weights_paused_s", "counter", "s", "Time that servers were paused for weight syncs."),
    # Of all
    Metric("engine/empty_answers", "counter", "", "Answers without a token for rollouts that were not interrupted."),
    Metric("engine/failed_extends", "counter", "", "Extensions that ended in an error, and were retried or dropped."),
    Metric("engine/preemptions", "counter", "rollouts", "Rollouts preempted for KV memory."),
    Metric("engine/{name}", "counter", "", "Further counters of a custom engine (its `stats`)."),
    Metric("kv/stale_prefix_tokens", "counter", "tokens", "Tokens served from KV of older weights."),
    Metric("kv/kept_tokens", "counter", "tokens", "Tokens of resumed rollouts with reused KV."),
    Metric("kv/shared_prompt_tokens", "counter", "tokens", "Prompt tokens shared with a sibling."),
    Metric("kv/bytes", "last", "bytes", "Memory of the KV cache."),
    Metric(
        "engine/kernels",
        "last",
        "",
        "1: compiled kernels do the small operations on the CPU; 0: torch does, more slowly (the start says why).",
    ),
    Metric("memory/peak_rss_bytes", "max", "bytes", "Peak resident memory of the process."),
    Metric("memory/servers_rss_bytes", "last", "bytes", "Resident memory of all servers. On a cluster only."),
    Metric("memory/ranks_rss_bytes", "last", "bytes", "Resident memory of all ranks. On a cluster only."),
    Metric("memory/reward_nodes_rss_bytes", "last", "bytes", "Resident memory of all reward nodes. On a cluster only."),
]
