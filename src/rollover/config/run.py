"""[run], [eval], [checkpoint], [track], [watchdog] and [plan], and the rules about them."""

from typing import Annotated, Literal

from pydantic import Field

from rollover.config.rollout import GENERATION, SAMPLING
from rollover.config.table import Inert, Rule, Table


class RunConfig(Table):
    """[run]: what this run is called, where it writes, and its seed."""

    name: str = Field(default="run", description="Name of the run; part of the default directory.")
    dir: str = Field(default="", description="Directory the run writes to. Default: runs/<name>-<time>.")
    seed: int = Field(default=0, description="Seed of tasks, sampling and initial LoRA weights.")
    threads: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="CPU threads for torch; 0 = one per core that this process may use. auto: of those the number that"
        " is fastest now, tried now and again, for engine and trainer each. Bit-equal results need a number.",
    )
    replay_rollouts: str = Field(
        default="",
        description="Train from the recorded rollouts of this directory (a run's rollouts/) without generating.",
    )


class EvalConfig(Table):
    """[eval]: evaluation on held-out tasks, before, during and after training."""

    num_tasks: int = Field(default=0, ge=0, description="Held-out tasks; 0 = no evaluation.")
    samples_per_task: int = Field(default=1, ge=1, description="Rollouts per held-out task; pass@k up to this k.")
    every_steps: int = Field(
        default=0, ge=0, description="Evaluate every so many steps; 0 = only before and after training."
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of evaluation; 0 = greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling of evaluation; 1 = off.")
    pass_threshold: float = Field(default=1.0, description="A rollout passes if its score is at least this.")
    seed: int = Field(default=1_000_003, description="Seed of the held-out tasks and of their sampling.")


class CheckpointConfig(Table):
    """[checkpoint]: snapshots of weights, optimizer and every unfinished rollout."""

    every_steps: int = Field(
        default=50, ge=0, description="Write a checkpoint every so many steps; 0 = only at the end and on Ctrl-C."
    )
    keep: int = Field(
        default=2, ge=1, description="Checkpoints kept; older ones are deleted after a new one is committed."
    )
    dir: str = Field(
        default="", description="Where checkpoints go: local path or fsspec URL. Default: <run.dir>/checkpoints."
    )
    resume_from: str = Field(
        default="", description="With --resume: name of the checkpoint to use (step-000020); empty = the newest."
    )
    journal_s: float = Field(
        default=5.0,
        ge=0,
        description="Between checkpoints, write down at once what happens to rollouts, and every so many seconds the"
        " new tokens of those that run; as often it is brought to the disk. A killed run goes on from there. 0 = no"
        " journal.",
    )
    journal_max_gb: float = Field(
        default=2.0, gt=0, description="Write a checkpoint early when the journal is larger than that."
    )
    lost_steps: Literal["replay", "roll_back"] = Field(
        default="replay",
        description="What a resumed run does about steps that were trained after its checkpoint. replay: they are"
        " trained again on the same rollouts, from the journal (not if settings changed that change what training"
        " does). roll_back: training goes on from the checkpoint's weights; rollouts are kept where the staleness bound"
        " allows.",
    )
    save_final_model: bool = Field(default=True, description="Write <run.dir>/model for transformers at the end.")


class TrackConfig(Table):
    """[track]: what is shown and recorded."""

    live: Literal["auto", "rich", "plain", "off"] = Field(
        default="auto", description="Terminal view: rich on a TTY, plain lines elsewhere (auto)."
    )
    rollouts: bool = Field(default=True, description="Record every trained or dropped rollout under rollouts/ (JSONL).")
    trace: bool = Field(
        default=True, description="Write what happened to every rollout, and when, to trace.jsonl (docs/trace.md)."
    )
    metrics: str = Field(
        default="",
        description="Your own function (module:function or path.py:function) of the groups that a step trains: numbers"
        " by name, which its row of metrics.jsonl has as own/NAME.",
    )
    show_samples: int = Field(default=3, ge=0, description="Answers before and after training shown in the summary.")
    peak_tflops: float = Field(
        default=0.0,
        ge=0,
        description="What one device computes at best, in TFLOP/s (1e12), for perf/mfu_*; 0 = by the name of a known"
        " GPU, else the fastest of a few matrix products at the start.",
    )


class WatchdogConfig(Table):
    """[watchdog]: when a wait counts as a stall, which is named and ended (docs/watchdog.md)."""

    rollout_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="A rollout that gets no token for so long is interrupted and continued from the tokens it has;"
        " 0 = off.",
    )
    max_stalls: int = Field(
        default=2,
        ge=1,
        description="A rollout that stalls so often without a token in between is dropped, with its group"
        " (dropped/stalled).",
    )
    grace_s: float = Field(
        default=30.0, gt=0, description="An interrupted rollout that does not return within so long is cancelled."
    )
    max_failures: int = Field(
        default=8,
        ge=1,
        description="A rollout at which the engine fails so often in a row, with an error or an answer that cannot come"
        " next, is dropped, with its group (dropped/failed).",
    )
    retry_s: float = Field(
        default=0.5,
        gt=0,
        description="The engine is asked again so long after its first failure at a rollout, then after twice as long"
        " each time, up to 30 s.",
    )
    reward_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="A group's scoring that takes so much longer than the limits of [rewards] allow is cancelled and"
        " repeated once; then its rewards are missing. 0 = off.",
    )
    weights_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Handing new weights to the engine gives a warning after so long, again at doubling times; 0 ="
        " off.",
    )
    train_timeout_s: float = Field(
        default=1800.0,
        ge=0,
        description="Training that takes so long in one step gives a warning, again at doubling times; 0 = off.",
    )


class PlanConfig(Table):
    """[plan]: what `rollover plan` assumes about lengths, machines and speeds. No other verb reads it."""

    steps: int = Field(default=50, ge=2, description="Training steps to simulate.")
    seed: int = Field(default=0, ge=0, description="Seed of the lengths.")
    engines: int = Field(default=1, ge=1, description="Engines; each runs up to engine.max_running rollouts at once.")
    trainers: int = Field(
        default=0, ge=0, description="Trainer devices. 0: the engines' devices train too, in turns (colocated)."
    )
    lengths: Literal["lognormal", "bimodal", "pareto"] = Field(
        default="lognormal",
        description="Distribution of answer lengths, by its median and 99th percentile. bimodal: most answers near the"
        " median, long_share of them near the 99th percentile. pareto: a power-law tail.",
    )
    median_tokens: float = Field(default=64, gt=0, description="Median answer length.")
    p99_tokens: float = Field(default=512, gt=0, description="99th percentile of the answer lengths.")
    long_share: float = Field(default=0.1, gt=0, lt=1, description="Share of long answers (lengths = bimodal).")
    sibling_correlation: float = Field(
        default=0.0, ge=0, le=1, description="Correlation of the log lengths of siblings: hard tasks have long answers."
    )
    prompt_tokens: int = Field(default=32, ge=1, description="Prompt length.")
    decode_batches: list[int] = Field(
        default=[1, 32, 64, 256], description="Batch sizes at which decode_step_s is given; linear between them."
    )
    decode_step_s: list[float] = Field(
        default=[0.017, 0.05, 0.08, 0.29], description="Seconds of one decode step at these batch sizes."
    )
    prefill_tokens_per_s: float = Field(default=1500, gt=0, description="Prompt tokens an engine computes per second.")
    prefill_min_s: float = Field(
        default=0.05, ge=0, description="Seconds of the shortest prefill; what joins together is prefilled together."
    )
    train_tokens_per_s: float = Field(
        default=250, gt=0, description="Tokens, prompts included, that one trainer device trains per second."
    )
    weight_sync_s: float = Field(default=0.2, ge=0, description="Seconds from the end of a step to live weights.")
    reward_s: float = Field(default=0.0, ge=0, description="Seconds to score a group.")


RULES: tuple[Rule, ...] = (
    Inert(
        (
            *(f"rollout.{name}" for name in GENERATION + SAMPLING),
            "train.streaming_min_groups",
            "eval.num_tasks",
            "track.rollouts",
            *(f"watchdog.{name}" for name in WatchdogConfig.model_fields if name != "train_timeout_s"),
        ),
        ("run.replay_rollouts",),
        lambda c: bool(c.run.replay_rollouts),
        "with run.replay_rollouts: nothing is generated or scored, recorded rollouts are trained as they are",
    ),
    Inert(
        tuple(f"eval.{name}" for name in EvalConfig.model_fields if name != "num_tasks"),
        ("eval.num_tasks",),
        lambda c: c.eval.num_tasks == 0,
        "with eval.num_tasks = 0 (no evaluation)",
        "Set eval.num_tasks",
    ),
    Inert(
        ("eval.top_p", "eval.samples_per_task"),
        ("eval.temperature",),
        lambda c: c.eval.temperature == 0,
        "with eval.temperature = 0: greedy answers to a task are all the same",
    ),
    Inert(
        ("watchdog.max_stalls", "watchdog.grace_s"),
        ("watchdog.rollout_timeout_s",),
        lambda c: c.watchdog.rollout_timeout_s == 0,
        "with watchdog.rollout_timeout_s = 0: no rollout is watched",
        "Set watchdog.rollout_timeout_s",
    ),
    Inert(
        ("plan.long_share",),
        ("plan.lengths",),
        lambda c: c.plan.lengths != "bimodal",
        'unless plan.lengths = "bimodal"',
    ),
)
