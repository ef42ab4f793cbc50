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

    `kind` says how the rows of several steps become one: mean, sum, max, the last one (gauges), the last one of a
    counter that grows over the whole run, or, for a rate, sum of `numerator` / sum of `denominator` (both keys of
    METRICS).
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
    # Of the user's own
    Metric("own/{name}", "mean", "", "What the function of track.metrics returned under this name."),
    # Environments of workflow.environment; what evaluations do is not counted
    Metric("tools/calls", "counter", "calls", "Calls that the policy wrote, malformed ones included."),
    Metric("tools/malformed", "counter", "calls", "Of them, those that cannot be read."),
    Metric("tools/errors", "counter", "calls", "Of them: no such tool, wrong arguments, or the tool raised."),
    Metric("tools/timeouts", "counter", "calls", "Of them, those without an answer within workflow.tool_timeout_s."),
    Metric("tools/time_s", "counter", "s", "Time in tools, of each call."),
    Metric("tools/left_behind", "counter", "threads", "Threads of the class that did not come back in time."),
    Metric("episodes/done", "counter", "episodes", "Those that ended by themselves: no call, done, returned."),
    Metric("episodes/error", "counter", "episodes", "Runs of an agent that failed, and were not tried again."),
    Metric("episodes/restarted", "counter", "episodes", "Failed runs of agents, and lost environments, begun again."),
    Metric("episodes/restored", "counter", "episodes", "Objects of an environment that went on from a snapshot."),
    Metric("episodes/unsaved", "counter", "episodes", "Those of environments whose snapshot failed."),
    Metric("episodes/replayed", "counter", "episodes", "Those whose agent ended with the process, and was run again."),
    Metric(
        "episodes/diverged", "counter", "episodes", "Of them, those that did not ask again for all that they had asked."
    ),
    Metric("turns/continued", "counter", "turns", "Model calls of agents that continued a rollout."),
    Metric("turns/breaks/{reason}", "counter", "turns", "Calls after a trajectory's first that opened a rollout."),
    Metric("episodes/max_turns", "counter", "episodes", "Those of environments that ended at workflow.max_turns."),
    Metric(
        "episodes/length",
        "counter",
        "episodes",
        "Those that ended at rollout.max_new_tokens; runs of agents for want of tokens or turns.",
    ),
    # Ledger
    Metric("tokens/generated", "counter", "tokens", "Sampled tokens since step 1. Equals trained + dropped + held."),
    Metric(
        "tokens/trained", "counter", "tokens", "Sampled tokens of consumed rollouts, rejected ones too; cumulative."
    ),
    Metric("tokens/dropped", "counter", "tokens", "Sampled tokens whose group was dropped, cumulative, all reasons."),
    Metric("tokens/environment", "counter", "tokens", "Tokens that environments wrote; in none of the others."),
    Metric("tokens/held", "last", "tokens", "Sampled tokens of groups now in the system, unfinished ones included."),
    Metric(
        "tokens/step_generated",
        "sum",
        "tokens",
        "Tokens sampled in this step; after a restart in it, since then, as are its times.",
    ),
    Metric(
        "tokens/step_processed",
        "sum",
        "tokens",
        "Tokens that the engine computed while this step was generated: prefilled, prefilled again and sampled.",
    ),
    Metric("tokens/step_trained", "sum", "tokens", "Tokens in the loss of this step, of replayed groups too."),
    Metric(
        "dropped/{reason}/groups",
        "counter",
        "groups",
        "Groups dropped for this reason (masked, abandoned: 0, their tokens are of trained groups), cumulative.",
    ),
    Metric("dropped/{reason}/tokens", "counter", "tokens", "Sampled tokens dropped for this reason, cumulative."),
    Metric(
        "filtered/{filter}/groups",
        "counter",
        "groups",
        "Of dropped/filtered/groups, those that this filter dropped, cumulative; absent before its first.",
    ),
    Metric(
        "watchdog/stalled_rollouts", "counter", "rollouts", "Times that a rollout stalled (watchdog.rollout_timeout_s)."
    ),
    Metric("watchdog/stalled_rewards", "counter", "groups", "Scorings that stalled (watchdog.reward_timeout_s)."),
    Metric("watchdog/redispatched", "counter", "", "Of these, rollouts continued and scorings repeated."),
    Metric(
        "watchdog/refused_answers",
        "counter",
        "",
        "Answers of the engine that are refused, as docs/watchdog.md says; their tokens count as never generated.",
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
    Metric("groups/held", "last", "groups", "Groups now in the system."),
    Metric(
        "groups/in_flight_limit", "last", "groups", "Groups held at once; rollout.in_flight_groups = auto moves it."
    ),
    Metric(
        "groups/zero_variance",
        "mean",
        "share",
        "Of the trained groups with two or more rewards of a role, the share in which those of each role are all equal:"
        " compared, they teach nothing.",
    ),
    Metric(
        "precomputed/groups",
        "sum",
        "groups",
        "TrajectoryGroups of the step trained with advantages that they bring (workflow.own_advantages = auto).",
    ),
    Metric(
        "precomputed/partial_groups",
        "sum",
        "groups",
        "TrajectoryGroups that bring advantages for some of their turns only, and are estimated instead; with"
        " workflow.own_advantages = auto only.",
    ),
    Metric("tasks/left_out", "counter", "tasks", "Tasks for which tasks.before_produce returned None."),
    Metric("tasks/dropped_last", "counter", "tasks", "Tasks dropped at the end of a pass (tasks.drop_last)."),
    Metric("tasks/failed", "counter", "tasks", "Problems left out because their generator failed, cumulative."),
    # Supervised training (only of examples)
    Metric(
        "sft/loss", "mean", "nats", "Negative log-likelihood of a trained token of the examples, as they are trained."
    ),
    Metric("sft/epoch", "last", "passes", "Passes over the examples so far."),
    Metric("sft/examples", "counter", "examples", "Examples trained, those of earlier passes too."),
    Metric("sft/skipped", "last", "examples", "Examples left out as they are longer than sft.max_tokens."),
    Metric(
        "eval/sft_loss",
        "mean",
        "nats",
        "The same of the held-out examples, under the weights after the step (sft.eval_every_steps).",
    ),
    # Replay and re-roll (only when on)
    Metric(
        "tokens/replayed",
        "counter",
        "tokens",
        "Loss tokens of replayed groups, cumulative: in tokens/trained at their first use, here at each other.",
    ),
    Metric("replay/replaced", "counter", "groups", "Groups without signal whose place in a step a kept one took."),
    Metric("replay/size", "last", "groups", "Groups now in the replay buffer."),
    Metric("replay/stale", "counter", "groups", "Groups that left the replay buffer past replay.max_staleness."),
    Metric("replay/evicted", "counter", "groups", "Groups that left a full replay buffer: the lowest score."),
    Metric("reroll/size", "last", "tasks", "Failed tasks that wait to be given again."),
    Metric("reroll/queued", "counter", "tasks", "Failed tasks that were queued."),
    Metric("reroll/given", "counter", "tasks", "Failed tasks given again."),
    Metric("reroll/solved", "counter", "tasks", "Of them: trained since, and not failed again."),
    Metric("reroll/dropped", "counter", "tasks", "Failed tasks that found reroll.size of them waiting."),
    # Curriculum (only when on)
    Metric("curriculum/known", "last", "tasks", "Tasks (sources, levels) with a pass rate from visits."),
    Metric("curriculum/easy", "last", "tasks", "Of them: easy (tasks.curriculum.easy_from)."),
    Metric("curriculum/normal", "last", "tasks", "Of them: neither easy nor hard."),
    Metric("curriculum/hard", "last", "tasks", "Of them: hard (tasks.curriculum.hard_to)."),
    Metric("curriculum/pass_rate", "last", "share", "Mean of the pass rates known."),
    Metric(
        "curriculum/given_pass_rate",
        "mean",
        "share",
        "Mean of the pass rates known of the tasks given since the step before; left out where none was known.",
    ),
    Metric("curriculum/passed_over", "counter", "tasks", "Times that a task's turn came and it was not given."),
    Metric("tasks/truncated_prompt", "counter", "tasks", "Tasks whose prompt was cut (tasks.truncation), cumulative."),
    Metric("tasks/skipped_long_prompt", "counter", "tasks", "Tasks skipped by tasks.max_prompt_tokens, cumulative."),
    # Rollouts
    Metric("turns/mean", "mean", "turns", "Mean number of the policy's turns in a trained trajectory."),
    Metric("turns/max", "max", "turns", "Most turns of the policy in one trained trajectory."),
    Metric(
        "turns/merged_share",
        "mean",
        "share",
        "Of the turns of trained trajectories after the first, those that continued a rollout: 1 where each did, 0"
        " where each opened one.",
    ),
    Metric("rollouts/acting", "last", "rollouts", "Rollouts whose environment is at work at the end of the step."),
    Metric("episodes/ended", "counter", "episodes", "Those that ended with what their environment or function did."),
    Metric("episodes/timeout", "counter", "episodes", "Of them: given up at workflow.timeout_s, cumulative."),
    Metric("episodes/failed", "counter", "rollouts", "Rollouts at which the environment failed each time, cumulative."),
    Metric("episodes/retried", "counter", "turns", "Turns that an environment failed at, and was asked again."),
    Metric("episodes/timeout_share", "mean", "share", "Share of those that ended in this step that were given up so."),
    Metric("rollouts/resumed", "counter", "rollouts", "Times that an unfinished rollout was continued."),
    Metric(
        "rollouts/partial_share", "mean", "share", "Share of trained rollouts with segments of >= 2 policy versions."
    ),
    Metric("rollouts/versions_mean", "mean", "versions", "Mean number of policy versions in a trained rollout."),
    Metric("rollouts/versions_max", "max", "versions", "Most policy versions in one trained rollout."),
    Metric("length/mean", "mean", "tokens", "Mean length of the trained rollouts, without prompt."),
    Metric("length/min", "last", "tokens", "Shortest trained rollout, without prompt."),
    Metric("length/max", "max", "tokens", "Longest trained rollout, without prompt."),
    Metric("length/prompt_mean", "mean", "tokens", "Mean length of the trained rollouts' prompts."),
    Metric("length/prompt_min", "last", "tokens", "Shortest prompt of them."),
    Metric("length/prompt_max", "max", "tokens", "Longest prompt of them."),
    Metric(
        "length/longest_of_group", "last", "tokens", "Longest rollout of a group, running mean over finished groups."
    ),
    Metric(
        "length/repetition", "mean", "share", "Share of trained rollouts stopped by rollout.stop_repetition_tokens."
    ),
    Metric("length/truncated", "mean", "share", "Share of trained rollouts cut off by a limit, as of mask_truncated."),
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
        "staleness/p{percent}", "mean", "versions", "Its 50th, 95th and 99th percentile over the tokens in the loss."
    ),
    Metric(
        "staleness/rollout_mean", "mean", "versions", "Mean over trained rollouts of their oldest token in the loss."
    ),
    Metric("staleness/rollout_p95", "mean", "versions", "Its 95th percentile over trained rollouts."),
    Metric(
        "staleness/in_flight_mean",
        "mean",
        "versions",
        "Part of staleness/mean: policy versions between the sampling of the token and its group's being READY.",
    ),
    Metric(
        "staleness/in_queue_mean",
        "mean",
        "versions",
        "The rest of it: policy versions between the group's being READY and its step.",
    ),
    Metric("staleness/bound", "last", "versions", "The bound that holds for staleness/max: rollout.max_staleness."),
    Metric(
        "state/{state}_s",
        "mean",
        "s",
        "Mean time that a trained rollout spent waiting (for its first slot), running, parked, acting (its"
        " environment's work, where there was any), scoring (its siblings' generation and the reward) and ready (for"
        " its step). They add up to its life from admission.",
    ),
    # Waste
    Metric("waste/reprefilled_tokens", "sum", "tokens", "Tokens prefilled again while this step was generated."),
    Metric(
        "waste/reprefilled_share",
        "rate",
        "share",
        "Share of the tokens that the engine computed which were prefilled again.",
        "waste/reprefilled_tokens",
        "tokens/step_processed",
    ),
    Metric(
        "waste/reprefilled_s",
        "sum",
        "s",
        "Estimate: measured prefill time of this step (engine/prefill_s) by the share of prefilled tokens that were"
        " prefilled again. Only where the engine measures it.",
    ),
    Metric("waste/dropped_tokens", "sum", "tokens", "Sampled tokens dropped in this step, masked ones included."),
    Metric("waste/dropped_share", "last", "share", "tokens/dropped by tokens/generated: of the whole run so far."),
    Metric(
        "waste/dropped_s",
        "sum",
        "s",
        "Estimate: waste/dropped_tokens by speed/generated_tokens_per_s, what they cost at this step's speed.",
    ),
    # Length bias
    Metric(
        "bias/trained_vs_dispatched_length",
        "last",
        "",
        "Mean length of all rollouts trained so far by that of all dispatched (that got a token) so far. 1: no bias;"
        " below 1: short ones are trained first, or long ones dropped. Of a rollout that is unfinished, or was dropped"
        " so, only a lower bound of its length is known: the second mean is Kaplan and Meier's, which allows for that.",
    ),
    Metric(
        "bias/wait_steps_q{quarter}",
        "mean",
        "versions",
        "Mean policy versions between admission and step of the trained rollouts, by quarter of their lengths: 1 the"
        " shortest, 4 the longest.",
    ),
    # Time
    Metric(
        "time/step_s",
        "sum",
        "s",
        "Wall-clock time of the step. Without streaming the phases add up to it (not their parts).",
    ),
    Metric("time/generate_s", "sum", "s", "Time in which the trainer waited for generation."),
    Metric("time/score_s", "sum", "s", "Time in which the trainer waited for rewards only."),
    Metric("time/schedule_s", "sum", "s", "New tasks, the scheduler's decisions and the bookkeeping of rollouts."),
    Metric("time/train_s", "sum", "s", "Proximal log-probs, forward, backward and optimizer."),
    Metric("time/logprobs_s", "sum", "s", "Of time/train_s: log-probs of the policy before the updates."),
    Metric("time/reference_s", "sum", "s", "Of time/train_s: log-probs of the reference (algorithm.kl_coef)."),
    Metric("time/teacher_s", "sum", "s", "Of time/train_s: the teacher's passes ([distill])."),
    Metric("time/values_s", "sum", "s", "Of time/train_s: the critic's values."),
    Metric(
        "time/update_s",
        "sum",
        "s",
        "Of time/train_s: forward, backward and optimizer; train.streaming_min_groups: that of early groups, too.",
    ),
    Metric("time/critic_s", "sum", "s", "Of time/update_s: the critic's own part."),
    Metric("time/weights_s", "sum", "s", "Handing the new weights to the engine."),
    Metric("time/sleep_s", "sum", "s", "Sending servers to sleep before training (cluster.colocate)."),
    Metric("time/checkpoint_s", "sum", "s", "Writing checkpoints."),
    Metric("time/eval_s", "sum", "s", "Evaluation between steps."),
    Metric("time/other_s", "sum", "s", "The rest of the step."),
    Metric(
        "wait/engine_for_trainer_s",
        "sum",
        "s",
        "With rollout.overlap: time in which the engine was idle, since nothing may start before the trainer has"
        " trained or handed over new weights. What the trainer waited for is in time/generate_s and time/score_s.",
    ),
    Metric(
        "wait/engine_for_rewards_s",
        "sum",
        "s",
        "With rollout.overlap: time in which the engine was idle while the trainer worked, and only rewards were under"
        " way.",
    ),
    Metric(
        "wait/environment_s",
        "sum",
        "s",
        "Part of time/generate_s: time in which the trainer waited for environments alone. Only where one answers the"
        " policy, as all of turns/ and episodes/.",
    ),
    Metric(
        "speed/generated_tokens_per_s",
        "rate",
        "tokens/s",
        "Generation speed while generating.",
        "tokens/step_generated",
        "time/generate_s",
    ),
    Metric(
        "speed/trained_tokens_per_s",
        "rate",
        "tokens/s",
        "Training speed while training.",
        "tokens/step_trained",
        "time/train_s",
    ),
    Metric(
        "speed/step_tokens_per_s",
        "rate",
        "tokens/s",
        "Throughput of the whole loop: trained tokens by the time of the step.",
        "tokens/step_trained",
        "time/step_s",
    ),
    Metric("perf/train_flops", "sum", "FLOP", "Model FLOPs of the step's training (docs/gpu.md); recomputation once."),
    Metric("perf/generate_flops", "sum", "FLOP", "Model FLOPs of the step's generation: prefilled again ones, too."),
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
    Metric("mismatch/logprob_abs_max", "max", "nats", "Its maximum."),
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
    Metric("critic/grad_norm", "mean", "", "The same of the critic."),
    Metric("critic/grad_norm_max", "max", "", "The largest of the step's updates."),
    Metric("critic/learning_rate", "last", "", "Of the critic's own model, else of the value head."),
    Metric("critic/skipped_steps", "sum", "updates", "Its skipped optimizer steps: a gradient was not finite."),
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
    Metric("journal/time_s", "sum", "s", "Time spent on the journal; it is part of the time/ keys."),
    Metric("journal/bytes", "last", "bytes", "Size of the journal since the newest checkpoint."),
    Metric("journal/failed", "counter", "", "Times that the journal could not be written (full disk), and ended."),
    Metric("journal/cut_bytes", "counter", "bytes", "Of journals read back, what was not trusted: torn, damaged."),
    Metric("mirror/failed", "counter", "", "Times that the run could not be copied to a remote checkpoint.dir."),
    Metric(
        "trackers/failed",
        "counter",
        "",
        "Failures of track.trackers. What your own missed is not told again; tools are told from the run's files.",
    ),
    Metric(
        "trackers/lost",
        "counter",
        "",
        "Rows, evaluations and samples that a tool of track.trackers did not take in time (docs/trackers.md).",
    ),
    Metric("engine/decode_steps", "counter", "steps", "Decode steps; of servers and services: tokens."),
    Metric(
        "engine/prefill_tokens",
        "counter",
        "tokens",
        "Tokens prefilled for the first time; of servers: sent, cached ones included.",
    ),
    Metric("engine/reprefill_tokens", "counter", "tokens", "Tokens prefilled again (a cost)."),
    Metric("engine/prefill_s", "counter", "s", "Time in prefill. Not on a GPU, where it is not known without waiting."),
    Metric("engine/flops", "counter", "FLOP", "Model FLOPs computed; what a step added is perf/generate_flops."),
    Metric("engine/decode_s", "counter", "s", "Time in decode steps. Not on a GPU, as engine/prefill_s."),
    Metric("engine/decode_thread_s", "counter", "thread s", "The time of each decode step times its CPU threads."),
    Metric("engine/threads", "mean", "threads", "Mean CPU threads of this step's decode steps, by time."),
    Metric("engine/restarts", "counter", "processes", "Engine processes that died and were started again."),
    # Of servers (engine.kind = "remote")
    Metric("engine/servers", "last", "servers", "Servers of a remote engine that serve now."),
    Metric("engine/ejections", "counter", "servers", "Servers given up: failed, silent, or restarted."),
    Metric("engine/lost_requests", "counter", "requests", "Requests that broke off; the rollout went on elsewhere."),
    Metric("engine/abandoned_requests", "counter", "requests", "Requests that no abort ended: disconnected."),
    Metric("engine/resumed_in_place", "counter", "rollouts", "Resumed on the server that has their tokens."),
    Metric("engine/resumed_elsewhere", "counter", "rollouts", "Resumed on another one, as theirs had no room."),
    Metric("engine/surplus_tokens", "counter", "tokens", "Sampled after a rollout's end, and cut off."),
    Metric("engine/span_mismatches", "counter", "requests", "Whose versions the server told otherwise."),
    Metric("engine/refused_weights", "counter", "", "New weights that a server refused."),
    Metric("engine/weights_paused_s", "counter", "s", "Time that servers stood still for new weights."),
    # Of all
    Metric("engine/empty_answers", "counter", "", "Answers without a token to rollouts that nobody interrupted."),
    Metric("engine/failed_extends", "counter", "", "Extensions that ended in an error, each tried again or given up."),
    Metric("engine/preemptions", "counter", "rollouts", "Rollouts preempted for KV memory."),
    Metric("engine/{name}", "counter", "", "What an engine of your own counts besides (its `stats`)."),
    Metric("kv/stale_prefix_tokens", "counter", "tokens", "Tokens served from KV of older weights."),
    Metric("kv/kept_tokens", "counter", "tokens", "Tokens of resumed rollouts with reused KV."),
    Metric("kv/shared_prompt_tokens", "counter", "tokens", "Prompt tokens shared with a sibling."),
    Metric("kv/bytes", "last", "bytes", "Memory of the KV cache now."),
    Metric(
        "engine/kernels",
        "last",
        "",
        "1: compiled kernels do the small operations on the CPU; 0: torch does, more slowly (the start says why).",
    ),
    Metric("memory/peak_rss_bytes", "max", "bytes", "Peak resident memory of the process."),
    Metric("memory/servers_rss_bytes", "last", "bytes", "Resident memory of all servers. On a cluster only."),
    Metric("memory/ranks_rss_bytes", "last", "bytes", "Resident memory of all ranks. On a cluster only."),
    Metric("memory/reward_nodes_rss_bytes", "last", "bytes", "Of all reward nodes. On a cluster only."),
]
