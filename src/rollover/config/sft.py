"""[sft]: supervised training on examples (`rollover sft`), and the rules about it."""

from __future__ import annotations

from typing import Any, Literal

from rollover.config.presets import PRESETS
from rollover.config.rollout import GENERATION, SAMPLING
from rollover.config.table import Inert, Layer, Refused, Rule, Table, option

_OF_PATH = ("sft.path",)
_OF_ROLLOUTS = ("sft.rollouts",)

SUPERVISED = Layer(
    "rollover sft",
    {"algorithm.preset": "sft", **{f"algorithm.{name}": value for name, value in PRESETS["sft"].items()}},
)
"""Values that `rollover sft` sets above its files, which can be recipes of `rollover train`."""


class SftConfig(Table):
    """[sft]: the examples of supervised training (algorithm.preset = "sft")."""

    only_if = ("algorithm.loss", "nll")

    path: str = option(
        "",
        "Examples: a JSONL, Parquet or CSV file (local path or fsspec URL), a folder of such files, or a dataset of"
        " the hub (owner/name). A row has messages that end with the assistant's, a prompt and a completion (each a"
        " text or messages), or a text.",
    )
    subset: str = option("", "Subset (configuration) of a dataset of the hub; empty = the only one.", only_if=_OF_PATH)
    split: str = option("train", "Split of a folder or of the hub.", only_if=_OF_PATH)
    eval_path: str = option("", "Held-out examples, as `path`; empty = a share of all examples (sft.eval_fraction).")
    prompt_column: str = option(
        "",
        "Column of the prompt, the messages or the text; empty = prompt, question, problem, messages or text.",
        only_if=_OF_PATH,
    )
    completion_column: str = option(
        "", "Column of the completion; empty = completion, response or answer.", only_if=_OF_PATH
    )
    rollouts: str = option(
        "",
        "Directory of a run: its recorded, naturally finished rollouts with a reward of at least sft.min_reward are"
        " the examples, without duplicates.",
    )
    min_reward: float = option(1.0, "Lowest reward of a rollout that becomes an example.", only_if=_OF_ROLLOUTS)
    per_task: int = option(
        0, "Maximum number of rollouts per task, the best first; 0 = all.", ge=0, only_if=_OF_ROLLOUTS
    )
    turns: Literal["all", "last"] = option(
        "all",
        "Assistant messages in the loss. last: only the last one; earlier messages are context, as rendered by the"
        " chat template (some remove earlier reasoning).",
        only_if=_OF_PATH,
    )
    epochs: int = option(0, "Passes over the examples, which determine train.num_steps; 0 = use train.num_steps.", ge=0)
    batch_examples: int = option(8, "Examples per step.", ge=1)
    max_tokens: int = option(
        2048, "Limit of an example (prompt and answer). Longer ones are skipped and counted.", ge=2
    )
    eval_fraction: float = option(
        0.0,
        "Share of the examples that is held out, selected by a hash of the conversation; 0 = none.",
        ge=0,
        lt=1,
        unless=("sft.eval_path",),
    )
    eval_every_steps: int = option(
        0, "Steps between evaluations of the held-out loss; 0 = only after the last step.", ge=0
    )


def _on(config: Any) -> bool:
    return config.algorithm.supervised


# Options of [algorithm] that act on examples.
_KEPT = {"preset", "loss", "loss_options", "aggregation", "aggregation_norm", "entropy_coef", "correction"}


def rules(algorithm: type[Table], others: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules. `algorithm`: the table [algorithm]. `others`: options about generated groups."""
    return (
        Refused(
            ("algorithm.loss", "sft.path", "sft.rollouts"),
            lambda c: _on(c) and not (c.sft.path or c.sft.rollouts),
            "there are no examples to train on: set sft.path to a file of them, or sft.rollouts to the directory of"
            " a run whose rollouts are the examples",
        ),
        Refused(
            ("algorithm.preset", "algorithm.loss"),
            lambda c: c.algorithm.preset == "sft" and not _on(c),
            lambda c: (
                f'algorithm.loss = "{c.algorithm.loss}" with algorithm.preset = "sft": examples are trained by "nll".'
                " Remove it, or train rollouts (rollover train, with another preset)"
            ),
        ),
        Inert(
            ("sft.eval_every_steps",),
            ("sft.eval_path", "sft.eval_fraction"),
            lambda c: not (c.sft.eval_path or c.sft.eval_fraction),
            "as no example is held out",
            "Set sft.eval_fraction",
        ),
        Inert(
            ("rollout.groups_per_step",),
            ("algorithm.loss",),
            lambda c: _on(c) and c.rollout.groups_per_step != c.sft.batch_examples,
            "where examples are trained",
            "Set sft.batch_examples in its place",
        ),
        Inert(
            (
                *(f"algorithm.{name}" for name in algorithm.model_fields if name not in _KEPT),
                *(f"rollout.{name}" for name in (*GENERATION, *SAMPLING, "group_size", "greedy_baseline")),
                *("train.streaming_min_groups", "train.publish_every", "train.max_kl", "train.skip_zero_advantage"),
                *("tasks.producer", "tasks.before_produce", "tasks.epochs", "tasks.drop_last", "tasks.curriculum.kind"),
                *("checkpoint.journal_s", "checkpoint.journal_max_gb", "checkpoint.lost_steps"),
                *("run.train_on_recorded", "replay.size", "reroll.max_groups", "distill.teacher"),
                *("track.rollouts", "track.token_stats"),
                *others,
            ),
            ("algorithm.loss",),
            _on,
            'with algorithm.loss = "nll": examples are trained, and nothing is generated but for evaluations',
        ),
        Refused(
            ("algorithm.loss", "cluster.colocate"),
            lambda c: _on(c) and c.cluster.colocate,
            "cluster.colocate with supervised training: no servers take turns with the trainer. Set it to false",
        ),
    )
