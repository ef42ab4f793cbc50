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
    """[run]: name, directory and seed of the run."""

    name: str = option("run", "Name of the run; part of the default directory.")
    dir: str = option("", "Directory of the run's files. Default: runs/<name>-<time>.")
    seed: int = option(0, "Seed of tasks, sampling and initial LoRA weights.")
    threads: Annotated[int, Field(ge=0)] | Literal["auto"] = option(
        "auto",
        "CPU threads for torch; 0 = one per core that this process may use. auto: at most that many, tuned for speed"
        " during the run, separately for engine and trainer. Bit-identical results need a number.",
    )
    train_on_recorded: str = option(
        "", "Train on the recorded rollouts in this directory (a run's rollouts/) without generating."
    )
    hooks: str = option(
        "",
        "Custom class (module:Class or path.py:Class). The run calls and awaits its methods on_train_start,"
        " on_step_start, on_publish, on_step_end, on_evaluate and on_train_end. A failing hook ends the run.",
        entry_points="hooks",
    )


class CheckpointConfig(Table):
    """[checkpoint]: snapshots of weights, optimizer and every unfinished rollout."""

    every_steps: int = option(50, "Steps between checkpoints; 0 = only at the end and on Ctrl-C.", ge=0)
    keep: int = option(2, "Number of checkpoints to keep. Older ones are deleted after a new one is committed.", ge=1)
    dir: str = option("", "Location of checkpoints: local path or fsspec URL. Default: <run.dir>/checkpoints.")
    resume_from: str = option("", "With --resume: name of the checkpoint (step-000020); empty = the newest.")
    journal_s: float = option(
        5.0,
        "Interval in seconds at which the journal records the new tokens of running rollouts and syncs to disk;"
        " other events are written at once. A killed run resumes from there. 0 = no journal.",
        ge=0,
    )
    journal_max_gb: float = option(
        2.0, "Write a checkpoint early when the journal exceeds this size. inf = never.", gt=0, unlimited=True
    )
    lost_steps: Literal["replay", "roll_back"] = option(
        "replay",
        "Handling of steps after the checkpoint when a run resumes. replay: train them again on the same rollouts,"
        " from the journal (unless settings changed that affect training). roll_back: continue from the checkpoint's"
        " weights, and keep rollouts within the staleness bound.",
    )
    save_final_model: bool = option(True, "Write <run.dir>/model for transformers at the end of the run.")
    keep_best: bool = option(
        False,
        "Write a checkpoint after the best evaluation (eval.metric), and keep it in addition to the newest ones.",
        only_if=("eval.num_tasks",),
    )
    save_best_model: bool = option(
        False,
        "Write <run.dir>/best_model for transformers after the best evaluation (eval.metric).",
        only_if=("eval.num_tasks",),
    )


class TrackConfig(Table):
    """[track]: terminal view, records and experiment trackers."""

    live: Literal["auto", "rich", "plain", "verbose", "off"] = option(
        "auto", "Terminal view: rich on a TTY, plain lines elsewhere (auto). verbose: longer lines, with all metrics."
    )
    rollouts: bool = option(True, "Record every trained or dropped rollout under rollouts/.")
    format: list[Literal["jsonl", "parquet"]] = Field(
        default_factory=lambda: ["jsonl"],
        description="Format of rollouts/: JSON lines, Parquet, or both. parquet also writes metrics.parquet, beside"
        " metrics.jsonl (docs/parquet.md).",
        min_length=1,
    )
    token_stats: bool = option(
        True,
        "Record the loss mask of each trained rollout, and advantage, importance weight, loss weight and entropy of"
        " each token.",
        only_if=("track.rollouts",),
    )
    answers: bool = option(
        True,
        "Write every answer of every evaluation to evaluations/step-*.jsonl.",
        only_if=("eval.num_tasks",),
    )
    trace: bool = option(True, "Write the events of every rollout, with times, to trace.jsonl (docs/trace.md).")
    metrics: str = option(
        "",
        "Custom function (module:function or path.py:function) from the trained groups of a step to numbers by name,"
        " logged in metrics.jsonl as own/NAME.",
        entry_points="metrics",
    )
    show_samples: int = option(3, "Number of answers before and after training in the summary.", ge=0)
    peak_tflops: float = option(
        0.0,
        "Peak throughput of one device in TFLOP/s (1e12), for perf/mfu_*; 0 = by the name of a known GPU, else the"
        " fastest of a few matrix products at the start.",
        ge=0,
    )
    trackers: list[str] = option(
        [],
        "Experiment trackers: wandb, tensorboard, trackio, mlflow, swanlab (docs/trackers.md), or custom classes"
        " (module:Class or path.py:Class) that receive every step, evaluation and group. A failing tracker does not"
        " end the run.",
        entry_points="trackers",
    )
    project: str = option(
        "",
        "Project of the run in its trackers, MLflow's experiment. Empty: the tracker's environment variable, else"
        " rollover.",
        only_if=_TRACKERS,
    )
    group: str = option("", "Group of the run in its trackers.", only_if=_TRACKERS)
    entity: str = option(
        "", "Team or user that owns the project: W&B's entity, SwanLab's workspace.", only_if=_TRACKERS
    )
    tags: list[str] = option([], "Tags of the run in its trackers.", only_if=_TRACKERS)
    tracker_rollouts: int = option(
        4, "Number of rollouts per step, and answers per evaluation, sent to the trackers as a table.", ge=0,
        only_if=_TRACKERS,
    )  # fmt: skip
    finish_s: float = option(
        30.0,
        "Time limit in seconds for the trackers to finish at the end of the run.",
        ge=0,
        only_if=_TRACKERS,
    )
    artifacts: list[Literal["model", "best_model", "records"]] = option(
        [],
        "Files of a finished run to upload to trackers that store files (all but tensorboard): the folders model and"
        " best_model, and records (metrics, evaluations, rollouts and trace).",
        only_if=_TRACKERS,
    )
    artifacts_s: float = option(
        600.0,
        "Time limit in seconds for uploading track.artifacts, after track.finish_s.",
        ge=0,
        only_if=("track.artifacts",),
    )


class WatchdogConfig(Table):
    """[watchdog]: time limits after which a wait is reported and ended (docs/watchdog.md)."""

    rollout_timeout_s: float = option(
        300.0,
        "Interrupt a rollout that receives no token for this long, and continue it from its tokens; 0 = off.",
        ge=0,
    )
    max_stalls: int = option(
        2,
        "Consecutive stalls of a rollout, without a token in between, after which its group is dropped"
        " (dropped/stalled).",
        ge=1,
        only_if=("watchdog.rollout_timeout_s",),
    )
    grace_s: float = option(
        30.0,
        "Cancel an interrupted rollout that does not return within this time.",
        gt=0,
        only_if=("watchdog.rollout_timeout_s",),
    )
    max_failures: int = option(
        8,
        "Consecutive engine failures of a rollout, errors or invalid answers, after which its group is dropped"
        " (dropped/failed).",
        ge=1,
    )
    retry_s: float = option(
        0.5,
        "Delay before the first retry after an engine failure. It doubles with each failure, up to 30 s.",
        gt=0,
    )
    reward_timeout_s: float = option(
        300.0,
        "Cancel and repeat the scoring of a group once when it exceeds the limits of [rewards] by this time; after"
        " that, its rewards are missing. 0 = off.",
        ge=0,
    )
    weights_timeout_s: float = option(
        60.0,
        "Warn when a weight sync takes this long, and again at doubling times; 0 = off.",
        ge=0,
    )
    train_timeout_s: float = option(
        1800.0, "Warn when the training of a step takes this long, and again at doubling times; 0 = off.", ge=0
    )


class PlanConfig(Table):
    """[plan]: assumptions of `rollover plan` about lengths, machines and speeds. Other verbs ignore it."""

    steps: int = option(50, "Training steps to simulate.", ge=2)
    seed: int = option(0, "Seed of the lengths.", ge=0)
    engines: int = option(
        1,
        "Number of engines, each with up to engine.max_running rollouts. Default: the servers of [engine], or one.",
        ge=1,
    )
    trainers: int = option(
        0,
        "Number of trainer devices. 0: the engines' devices also train, in turns (colocated). Default: the ranks of"
        " [backend]; 1 with servers of other machines, or with a separate engine.device.",
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
        0.05, "Duration in seconds of the shortest prefill; concurrent prompts share one prefill.", ge=0
    )
    train_tokens_per_s: float = option(
        250,
        "Tokens, prompts included, that one trainer device trains per second, in one of train.epochs_per_step.",
        gt=0,
    )
    parameters_b: float = option(
        0.0,
        "Parameters of the model in billions, to estimate the trainer's memory; 0 = report it per parameter.",
        ge=0,
    )
    weight_sync_s: float = option(0.2, "Duration in seconds of a weight sync.", ge=0)
    reward_s: float = option(0.0, "Seconds to score a group.", ge=0)
    turns: int = option(
        1, "Turns of the policy in an episode, which share its sampled tokens; 1 = no environment.", ge=1
    )
    tool_s: float = option(1.0, "Duration in seconds of the environment's response after each turn but the last.", ge=0)
    tool_tokens: int = option(16, "Tokens of that response.", ge=1)


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
