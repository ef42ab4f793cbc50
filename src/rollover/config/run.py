"""[run], [checkpoint], [track], [watchdog] and [plan], and the rules about them."""

import json
from typing import Annotated, Literal

from pydantic import Field

from rollover.config.rollout import GENERATION, SAMPLING
from rollover.config.table import Inert, Refused, Rule, Table, option

_TRACKERS = ("track.trackers",)
TOOLS = ("wandb", "tensorboard", "trackio", "mlflow", "swanlab")
"""What track.trackers may name beside classes of the user's own."""
_WITH_ENTITY = {"wandb", "swanlab"}
_WITH_ARTIFACTS = {"wandb", "trackio", "mlflow", "swanlab"}


class RunConfig(Table):
    """[run]: what this run is called, where it writes, and its seed."""

    name: str = option("run", "Name of the run; part of the default directory.")
    dir: str = option("", "Directory the run writes to. Default: runs/<name>-<time>.")
    seed: int = option(0, "Seed of tasks, sampling and initial LoRA weights.")
    threads: Annotated[int, Field(ge=0)] | Literal["auto"] = option(
        "auto",
        "CPU threads for torch; 0 = one per core that this process may use. auto: of those the number that"
        " is fastest now, tried now and again, for engine and trainer each. Bit-equal results need a number.",
    )
    train_on_recorded: str = option(
        "", "Train from the recorded rollouts of this directory (a run's rollouts/) without generating."
    )
    hooks: str = option(
        "",
        "Your own class (module:Class or path.py:Class) whose methods on_train_start, on_step_start, on_publish,"
        " on_step_end, on_evaluate and on_train_end the run calls there, and waits for. One that fails ends the run.",
        entry_points="hooks",
    )


class CheckpointConfig(Table):
    """[checkpoint]: snapshots of weights, optimizer and every unfinished rollout."""

    every_steps: int = option(50, "Steps between two checkpoints; 0 = only at the end and on Ctrl-C.", ge=0)
    keep: int = option(2, "Checkpoints kept; older ones are deleted after a new one is committed.", ge=1)
    dir: str = option("", "Where checkpoints go: local path or fsspec URL. Default: <run.dir>/checkpoints.")
    resume_from: str = option("", "With --resume: name of the checkpoint to use (step-000020); empty = the newest.")
    journal_s: float = option(
        5.0,
        "Between checkpoints, write down at once what happens to rollouts, and every so many seconds the"
        " new tokens of those that run; the file is synced to disk as often. A killed run goes on from there. 0 = no"
        " journal.",
        ge=0,
    )
    journal_max_gb: float = option(
        2.0, "Write a checkpoint early when the journal is larger than that. inf = never.", gt=0, unlimited=True
    )
    lost_steps: Literal["replay", "roll_back"] = option(
        "replay",
        "What a resumed run does about steps that were trained after its checkpoint. replay: they are"
        " trained again on the same rollouts, from the journal (not if settings changed that change what training"
        " does). roll_back: training goes on from the checkpoint's weights; rollouts are kept where the staleness bound"
        " allows.",
    )
    save_final_model: bool = option(True, "Write <run.dir>/model for transformers at the end.")
    keep_best: bool = option(
        False,
        "Write a checkpoint after the best evaluation so far (eval.metric), and keep it beside the newest ones (keep).",
        only_if=("eval.num_tasks",),
    )
    save_best_model: bool = option(
        False,
        "Write <run.dir>/best_model for transformers after the best evaluation so far (eval.metric).",
        only_if=("eval.num_tasks",),
    )


class TrackConfig(Table):
    """[track]: what is shown and recorded."""

    live: Literal["auto", "rich", "plain", "verbose", "off"] = option(
        "auto", "Terminal view: rich on a TTY, plain lines elsewhere (auto). verbose: longer lines, with all figures."
    )
    rollouts: bool = option(True, "Record every trained or dropped rollout under rollouts/.")
    format: list[Literal["jsonl", "parquet"]] = Field(
        default_factory=lambda: ["jsonl"],
        description="How rollouts/ is written: as JSON lines, Parquet, or both. With parquet there is metrics.parquet,"
        " too, beside metrics.jsonl (docs/parquet.md).",
        min_length=1,
    )
    token_stats: bool = option(
        True,
        "Record with each trained rollout its loss mask, and of each token advantage, importance weight, weight in the"
        " loss and entropy, as the loss had them.",
        only_if=("track.rollouts",),
    )
    answers: bool = option(
        True,
        "Write every answer of every evaluation to evaluations/step-*.jsonl.",
        only_if=("eval.num_tasks",),
    )
    trace: bool = option(True, "Write what happened to every rollout, and when, to trace.jsonl (docs/trace.md).")
    metrics: str = option(
        "",
        "Your own function (module:function or path.py:function) of the groups that a step trains: numbers"
        " by name, which its row of metrics.jsonl has as own/NAME.",
        entry_points="metrics",
    )
    show_samples: int = option(3, "Answers before and after training shown in the summary.", ge=0)
    peak_tflops: float = option(
        0.0,
        "What one device computes at best, in TFLOP/s (1e12), for perf/mfu_*; 0 = by the name of a known"
        " GPU, else the fastest of a few matrix products at the start.",
        ge=0,
    )
    trackers: list[str] = option(
        [],
        "Where the run is shown beside its own files: wandb, tensorboard, trackio, mlflow, swanlab"
        " (docs/trackers.md), or by your own classes (module:Class or path.py:Class), told of every step, evaluation"
        " and group. One that fails does not end the run.",
        entry_points="trackers",
    )
    project: str = option(
        "",
        "Project of the run in its trackers, MLflow's experiment. Empty: as the tool's own variable says, else"
        " rollover.",
        only_if=_TRACKERS,
    )
    group: str = option("", "Group of the run in its trackers.", only_if=_TRACKERS)
    entity: str = option(
        "", "Team or user that the project belongs to: W&B's entity, SwanLab's workspace.", only_if=_TRACKERS
    )
    tags: list[str] = option([], "Tags of the run in its trackers.", only_if=_TRACKERS)
    tracker_rollouts: int = option(
        4, "So many rollouts of each step, and answers of each evaluation, go to the trackers as a table.", ge=0,
        only_if=_TRACKERS,
    )  # fmt: skip
    finish_s: float = option(
        30.0,
        "At the end of the run the tools of track.trackers have so long to take what is left; then they are ended.",
        ge=0,
        only_if=_TRACKERS,
    )
    artifacts: list[Literal["model", "best_model", "records"]] = option(
        [],
        "What of a finished run goes to the tools of track.trackers that keep files (all but tensorboard):"
        " the folders model and best_model, and records: metrics, evaluations, rollouts and trace.",
        only_if=_TRACKERS,
    )
    artifacts_s: float = option(
        600.0,
        "How long tools may take for track.artifacts, after track.finish_s; then they are ended.",
        ge=0,
        only_if=("track.artifacts",),
    )


class WatchdogConfig(Table):
    """[watchdog]: when a wait counts as a stall, which is named and ended (docs/watchdog.md)."""

    rollout_timeout_s: float = option(
        300.0,
        "A rollout that gets no token for this long is interrupted and continued from the tokens it has; 0 = off.",
        ge=0,
    )
    max_stalls: int = option(
        2,
        "A rollout that stalls this many times without a token in between is dropped, with its group"
        " (dropped/stalled).",
        ge=1,
        only_if=("watchdog.rollout_timeout_s",),
    )
    grace_s: float = option(
        30.0,
        "An interrupted rollout that does not return within this time is cancelled.",
        gt=0,
        only_if=("watchdog.rollout_timeout_s",),
    )
    max_failures: int = option(
        8,
        "A rollout at which the engine fails this many times in a row, with an error or an answer that cannot come"
        " next, is dropped, with its group (dropped/failed).",
        ge=1,
    )
    retry_s: float = option(
        0.5,
        "The engine is asked again this long after its first failure at a rollout, then after twice as long"
        " each time, up to 30 s.",
        gt=0,
    )
    reward_timeout_s: float = option(
        300.0,
        "A group's scoring that takes so much longer than the limits of [rewards] allow is cancelled and"
        " repeated once; then its rewards are missing. 0 = off.",
        ge=0,
    )
    weights_timeout_s: float = option(
        60.0,
        "Handing new weights to the engine gives a warning after this time, again at doubling times; 0 = off.",
        ge=0,
    )
    train_timeout_s: float = option(
        1800.0, "Training that takes this long in one step gives a warning, again at doubling times; 0 = off.", ge=0
    )


class PlanConfig(Table):
    """[plan]: what `rollover plan` assumes about lengths, machines and speeds. No other verb reads it."""

    steps: int = option(50, "Training steps to simulate.", ge=2)
    seed: int = option(0, "Seed of the lengths.", ge=0)
    engines: int = option(
        1,
        "Engines; each runs up to engine.max_running rollouts at once. Where it is not set: the servers of [engine], or"
        " one.",
        ge=1,
    )
    trainers: int = option(
        0,
        "Trainer devices. 0: the engines' devices train too, in turns (colocated). Where it is not set: the ranks of"
        " [backend]; 1 beside servers of other machines, or an engine.device of its own.",
        ge=0,
    )
    lengths: Literal["lognormal", "bimodal", "pareto"] = option(
        "lognormal",
        "Distribution of answer lengths, by its median and 99th percentile. bimodal: most answers near the"
        " median, long_share of them near the 99th percentile. pareto: a power-law tail.",
    )
    median_tokens: float = option(64, "Median answer length, in tokens.", gt=0)
    p99_tokens: float = option(512, "99th percentile of the answer lengths.", gt=0)
    long_share: float = option(0.1, "Share of long answers.", gt=0, lt=1, only_if=("plan.lengths", "bimodal"))
    sibling_correlation: float = option(
        0.0, "Correlation of the log lengths of siblings: hard tasks have long answers.", ge=0, le=1
    )
    prompt_tokens: int = option(32, "Prompt length.", ge=1)
    decode_batches: list[int] = option(
        [1, 32, 64, 256], "Batch sizes at which decode_step_s is given; linear between them."
    )
    decode_step_s: list[float] = option([0.017, 0.05, 0.08, 0.29], "Seconds of one decode step at these batch sizes.")
    prefill_tokens_per_s: float = option(1500, "Prompt tokens an engine computes per second.", gt=0)
    prefill_min_s: float = option(
        0.05, "Seconds of the shortest prefill; what joins together is prefilled together.", ge=0
    )
    train_tokens_per_s: float = option(
        250,
        "Tokens, prompts included, that one trainer device trains per second, in one of train.epochs_per_step.",
        gt=0,
    )
    parameters_b: float = option(
        0.0,
        "Parameters of the model in billions, for what the trainer holds in memory; 0 = it is stated for a parameter.",
        ge=0,
    )
    weight_sync_s: float = option(0.2, "Seconds from the end of a step to live weights.", ge=0)
    reward_s: float = option(0.0, "Seconds to score a group.", ge=0)
    turns: int = option(
        1, "Turns of the policy in an episode, which its sampled tokens are divided among; 1: nothing answers.", ge=1
    )
    tool_s: float = option(1.0, "Seconds that its environment, or its agent, works after each turn but the last.", ge=0)
    tool_tokens: int = option(16, "Tokens that the policy is told then.", ge=1)


RULES: tuple[Rule, ...] = (
    Refused(
        ("track.trackers",),
        lambda c: len(set(c.track.trackers)) < len(c.track.trackers),
        lambda c: f"track.trackers = {json.dumps(c.track.trackers)}: name each once",
    ),
    Inert(
        ("track.entity",),
        ("track.trackers",),
        lambda c: not _WITH_ENTITY & {*c.track.trackers},
        f"without {' or '.join(sorted(_WITH_ENTITY))} in track.trackers",
        'Set track.trackers = ["wandb"]',
    ),
    Inert(
        ("track.artifacts",),
        ("track.trackers",),
        lambda c: not _WITH_ARTIFACTS & {*c.track.trackers},
        f"without {' or '.join(sorted(_WITH_ARTIFACTS))} in track.trackers: TensorBoard keeps no files",
        'Set track.trackers = ["mlflow"], say',
    ),
    *(
        Refused(
            ("track.artifacts", f"checkpoint.{switch}"),
            lambda c, name=name, switch=switch: name in c.track.artifacts and not getattr(c.checkpoint, switch),
            lambda c, name=name, switch=switch: (
                f"track.artifacts has {name}, and checkpoint.{switch} = false: there is none. Set checkpoint.{switch} ="
                " true"
            ),
        )
        for name, switch in (("model", "save_final_model"), ("best_model", "save_best_model"))
    ),
    Refused(
        ("track.artifacts", "backend.type"),
        lambda c: "model" in c.track.artifacts and c.backend.type == "tinker",
        'track.artifacts has model, and backend.type = "tinker": the service has the weights. Leave it out',
    ),
    Inert(
        ("plan.tool_s", "plan.tool_tokens"),
        ("plan.turns",),
        lambda c: c.plan.turns == 1,
        "as an episode has one turn",
        "Set plan.turns",
    ),
    Inert(
        (
            *(f"rollout.{name}" for name in GENERATION + SAMPLING),
            "train.streaming_min_groups",
            "eval.num_tasks",
            "track.rollouts",
            "track.token_stats",
            *("tasks.drop_last", "reroll.max_groups"),
            *(f"workflow.{name}" for name in ("environment", "function", "command", "verifiers")),
            *(f"rewards.{name}" for name in ("num_workers", "memory_gb", "retries", "quarantine_after")),
            *(f"watchdog.{name}" for name in WatchdogConfig.model_fields if name != "train_timeout_s"),
        ),
        ("run.train_on_recorded",),
        lambda c: bool(c.run.train_on_recorded),
        "with run.train_on_recorded: nothing is generated or scored, recorded rollouts are trained as they are",
    ),
)
