"""[tasks], and the rules about it."""

import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import Field

from rollover.config import curriculum
from rollover.config.curriculum import CurriculumConfig
from rollover.config.rollout import GENERATION
from rollover.config.table import Inert, Refused, Rule, Table, option, wrong
from rollover.registry import PLUGINS, why_unknown

AnswerRule = Literal["last_number", "last_line", "answer_tag", "boxed", "full_text"]

Truncation = Literal["skip", "left", "right", "middle"]


class SourceKind(NamedTuple):
    """A kind of source: the function of a `SourceSetup` that makes one, the key that it cannot do without, the keys
    that not every kind has, and its own reward."""

    make: str
    needs: str
    keys: tuple[str, ...]
    reward: str = "exact_match"
    generates: bool = False
    """Its problems never end, and are made when they are asked for."""


SOURCES = {
    "reasoning_gym": SourceKind(
        "rollover.tasks.generators:generator_source", "name", ("params",), "reasoning_gym", generates=True
    ),
    "arithmetic": SourceKind("rollover.tasks.generators:arithmetic_source", "name", ("params",), generates=True),
    "dataset": SourceKind(
        "rollover.tasks.dataset:dataset_source",
        "path",
        (
            "path",
            "subset",
            "split",
            "eval_path",
            "eval_split",
            "streaming",
            "prompt_column",
            "answer_column",
            "data_source_column",
            "image_column",
            "order_column",
        ),
    ),
    "verifiers": SourceKind(PLUGINS["task_sources"]["verifiers"], "name", ("params", "eval_params")),
}
_OWN = SourceKind("rollover.tasks.source:CustomSource", "", ("params",))


class TaskSourceConfig(Table):
    """[[tasks.sources]]: one source of tasks."""

    kind: str = option(
        "",
        "reasoning_gym: a generator by name. arithmetic: its chain_sum or products, without that package. dataset: a"
        " file, a folder or a dataset of the hub. verifiers: a taskset (added by workflow.verifiers). Or a custom"
        " function (module:function or path.py:function) that makes a source of tasks.",
        entry_points="task_sources",
    )
    name: str = option(
        "",
        "Generator name (reasoning_gym, arithmetic), or the label of another source (default: the name of its file"
        " or function).",
    )
    weight: float = option(
        1.0,
        "Share of this source among all sources. 0: evaluated, never trained; all rows of a dataset are then held out.",
        ge=0,
    )
    params: dict[str, Any] = option({}, "Parameters of the generator, the taskset, or the custom source.")
    eval_params: dict[str, Any] = option({}, "verifiers: parameters that differ for held-out tasks.")
    path: str = option(
        "",
        "dataset: JSONL, Parquet or CSV file (local path or fsspec URL), a folder of such files, or a dataset of the"
        " hub (owner/name).",
    )
    subset: str = option("", "dataset: subset (configuration) of a dataset of the hub; empty = the only one.")
    split: str = option("train", "dataset: training split of a folder or of the hub.")
    eval_path: str = option("", "dataset: held-out rows, as `path`; empty = a share of `path` (tasks.eval_fraction).")
    eval_split: str = option(
        "",
        "dataset: held-out split, of `eval_path` if that is set, else of `path`. Empty: the split train of"
        " `eval_path`; none of `path`.",
    )
    streaming: bool = option(
        False,
        "dataset: read rows on demand, in their order, without storing them; tasks.shuffle then shuffles within each"
        " 1,000 rows.",
    )
    prompt_column: str = option("", "dataset: prompt column; empty = prompt, question, problem or messages.")
    answer_column: str = option(
        "", "dataset: answer column; empty = reward_model.ground_truth (verl), answer, solution or ground_truth."
    )
    data_source_column: str = option(
        "", "dataset: column that selects the reward of a task, as verl's data.reward_fn_key; empty = data_source."
    )
    image_column: str = option("", "dataset: column with the image or images of a prompt; empty = images or image.")
    order_column: str = option(
        "",
        "dataset: numeric column, such as a difficulty (extra_info.difficulty for a nested one). Each pass goes from"
        " the smallest to the largest value, and shuffles rows of equal value. Not with streaming.",
    )
    problem_key: str = option(
        "",
        "Identity of a problem: duplicates of held-out problems are not trained. dataset: a column; or a custom"
        " function (module:function or path.py:function) from a task to a text. Empty: the prompt, ignoring case and"
        " white space; for some generators (chain_sum, products, ...) also the order of operands.",
    )
    reward: str = option(
        "",
        "Reward of this source: module:function, path.py:function, or a built-in name; empty = [rewards].function,"
        " then the generator's own scorer (reasoning_gym) or exact_match (any other).",
        entry_points="rewards",
    )
    answer_rule: AnswerRule | Literal[""] = option("", "Overrides tasks.answer_rule for this source.")

    @property
    def about(self) -> SourceKind:
        """Return the properties of every source of this kind."""
        return SOURCES.get(self.kind, _OWN)

    @property
    def missing(self) -> str:
        """The key that is not set, though this kind needs it; "" if there is none."""
        needs = self.about.needs if self.kind else "kind"
        return "" if not needs or getattr(self, needs) else needs

    @property
    def names_held_out(self) -> bool:
        """Whether the held-out problems are named (a file or a split of their own, all), and not chosen by a hash."""
        return bool(self.eval_path or self.eval_split or self.eval_params) or self.all_held_out

    @property
    def all_held_out(self) -> bool:
        """Whether all rows of `path` are held out."""
        return self.weight == 0 and self.kind == "dataset" and not self.eval_path and not self.eval_split


class TasksConfig(Table):
    """[tasks]: sources of problems, and their prompts."""

    sources: list[TaskSourceConfig] = option([], "Sources of tasks, mixed by weight.")
    system_prompt: str = option("", "System message, prepended to the messages of every task.", only_if=("tasks.chat",))
    instruction: str = option("", "Text appended to the last user message of every task, after a newline.")
    chat: bool = option(True, "Put plain prompts into a user message and apply the model's chat template.")
    allow_image_urls: bool = option(
        False,
        "Fetch images that the data references by http or https. The data then choose which addresses this machine"
        " connects to, including those of its own network.",
    )
    producer: str = option(
        "",
        "Custom class (module:Class or path.py:Class), constructed with (config, tokenizer, engine), whose"
        " produce(step, version) returns the groups of each step. Empty: the scheduler generates rollouts of the"
        " tasks.",
        entry_points="producers",
    )
    before_produce: str = option(
        "",
        "Custom function (module:function or path.py:function) of a task and the trainer's version, called before"
        " the task is admitted. Returns the task to use, or None to skip it.",
        entry_points="before_produce",
    )
    answer_rule: AnswerRule = option(
        "last_number",
        "How the final answer is read from a completion before a scorer sees it: last_number (the last"
        " number, fraction or time), last_line, answer_tag (the last <answer>...</answer>), boxed (the last"
        " \\boxed{...}), full_text.",
    )
    epochs: int = option(0, "Passes over the datasets; 0 = endless. Generators are always endless.", ge=0)
    drop_last: bool = option(
        False,
        "Drop the last tasks of a pass if they are fewer than rollout.groups_per_step, as verl does, so that all"
        " steps have the same number of groups. With several sources, only at the end of all passes.",
    )
    shuffle: bool = option(True, "Shuffle datasets in each epoch (seeded).")
    mixing_temperature: float = option(
        0.0,
        "T in the sampling weight of a source, weight * size^(1/T). 1: all problems are equally likely. Large: all"
        " sources are equally likely. 0: by weight alone.",
        ge=0,
    )
    eval_fraction: float = option(
        0.1,
        "Share of distinct problems (tasks.sources.problem_key) that is held out for evaluation, selected by a hash;"
        " 0 = none.",
        ge=0,
        lt=1,
    )
    max_prompt_tokens: int = option(
        1024, "Limit of a prompt. Longer prompts are counted, and handled by tasks.truncation.", ge=1
    )
    truncation: Truncation = option(
        "skip",
        "Handling of prompts above tasks.max_prompt_tokens. skip: skip the task. left, right, middle: remove that"
        " part of the tokens, chat template included, as verl's data.truncation.",
    )
    curriculum: CurriculumConfig = Field(
        default_factory=CurriculumConfig, description="How often a task is given, by its pass rate."
    )


def _may_end(config: Any) -> bool:
    """Whether a source may have an order and an end, which generators do not have."""
    return any(not source.about.generates for source in config.tasks.sources)


def _all_have_answer_rules(config: Any) -> bool:
    return bool(config.tasks.sources) and all(source.answer_rule for source in config.tasks.sources)


def source_rules(sources: list[TaskSourceConfig]) -> list[Inert]:
    """One rule for each source: the fields of other kinds have no effect."""
    rules = []
    for i, source in enumerate(sources):
        others = tuple(name for kind in SOURCES.values() for name in kind.keys if name not in source.about.keys)
        key = f"tasks.sources.{i}"
        options = tuple(f"{key}.{name}" for name in others)
        rules.append(Inert(options, (f"{key}.kind",), lambda _: True, f'in a source of kind "{source.kind}"'))
    return rules


def _no_source(config: Any) -> str:
    """Return the error of the first invalid source; "" if all are valid."""
    one_of = "one of " + ", ".join(map(json.dumps, SOURCES)) + ", or a function (module:function or path.py:function)"
    for i, source in enumerate(config.tasks.sources):
        key = f"tasks.sources.{i}"
        if not source.kind:
            return f"{key}.kind is missing: expected {one_of}"
        if why := why_unknown("task_sources", source.kind):
            return f'{key}.kind = "{source.kind}" {why}'
        if missing := source.missing:
            return f'{key}.{missing} is missing: a source of kind "{source.kind}" needs it'
    return ""


def _first(config: Any, like: Callable[[TaskSourceConfig], bool]) -> str:
    """Return the key of the first source of which `like` holds, such as tasks.sources.0; "" if there is none."""
    return next((f"tasks.sources.{i}" for i, s in enumerate(config.tasks.sources) if like(s)), "")


def _streamed(config: Any) -> str:
    return _first(config, lambda s: s.streaming)


def _with_keys(config: Any) -> str:
    return _first(config, lambda s: not s.about.generates and bool(s.problem_key))


def _streamed_and_named(config: Any) -> str:
    return _first(config, lambda s: s.streaming and s.names_held_out)


def _trained(config: Any) -> list[TaskSourceConfig]:
    return [source for source in config.tasks.sources if source.weight]


def _not_counted(config: Any) -> str:
    return _first(config, lambda s: bool(s.weight) and (s.about.generates or s.streaming))


def _streamed_in_order(config: Any) -> str:
    return _first(config, lambda s: s.streaming and bool(s.order_column))


NO_SOURCES = Refused(
    ("tasks.sources",),
    lambda c: not c.tasks.sources and not (c.algorithm.supervised and not c.eval.num_tasks),
    "tasks.sources is empty: there is nothing to train on. Add a [[tasks.sources]] table, for instance with"
    ' kind = "reasoning_gym" and name = "chain_sum"',
)

RULES: tuple[Rule, ...] = (
    *curriculum.RULES,
    Inert(
        (
            *(f"rollout.{name}" for name in GENERATION if name != "max_staleness"),
            "rollout.groups_per_step",
            "rollout.group_size",
            "rollout.greedy_baseline",
            "tasks.before_produce",
            "tasks.drop_last",
            "train.streaming_min_groups",
            "reroll.max_groups",
            "run.train_on_recorded",
            "watchdog.max_stalls",  # the others are of the engine, of evaluations and of the trainer
        ),
        ("tasks.producer",),
        lambda c: bool(c.tasks.producer),
        "with tasks.producer, which makes the groups by itself",
        "Remove one of the two",
    ),
    Inert(
        ("tasks.epochs",),
        ("tasks.sources",),
        lambda c: bool(c.tasks.sources) and not _may_end(c),
        'without a source of kind "dataset": generators are always endless',
    ),
    Inert(
        ("tasks.drop_last",),
        ("tasks.sources", "tasks.epochs"),
        lambda c: bool(c.tasks.sources) and (not _may_end(c) or (c.tasks.epochs == 0 and len(_trained(c)) > 1)),
        "without a pass that ends: generators are endless, and so are several sources with tasks.epochs = 0",
    ),
    Refused(
        ("tasks.drop_last", "tasks.curriculum.kind", "tasks.before_produce"),
        lambda c: c.tasks.drop_last and bool(c.tasks.curriculum.kind or c.tasks.before_produce),
        lambda c: (
            "tasks.drop_last with"
            f" {'tasks.curriculum' if c.tasks.curriculum.kind else 'tasks.before_produce'}: the tasks of a step are"
            " chosen at once, before what it looks at is known. Remove one of the two"
        ),
    ),
    Inert(
        ("tasks.shuffle",),
        ("tasks.sources",),
        lambda c: bool(c.tasks.sources) and not _may_end(c),
        'without a source of kind "dataset": generators have no order to shuffle',
    ),
    Inert(
        ("tasks.mixing_temperature",),
        ("tasks.sources",),
        lambda c: bool(c.tasks.sources) and len(_trained(c)) < 2,
        "with one source that is trained: there is nothing to mix",
    ),
    Refused(
        ("tasks.mixing_temperature", "tasks.sources"),
        lambda c: bool(c.tasks.mixing_temperature and len(_trained(c)) > 1 and _not_counted(c)),
        lambda c: (
            f"tasks.mixing_temperature = {c.tasks.mixing_temperature:g} with {_not_counted(c)}: how many problems a"
            " generator or a stream has is not known. Remove it, and mix by tasks.sources.weight"
        ),
    ),
    Inert(
        ("tasks.answer_rule",),
        ("tasks.sources",),
        _all_have_answer_rules,
        "as every source sets its own answer_rule",
    ),
    Refused(
        ("tasks.eval_fraction", "eval.num_tasks", "tasks.sources"),
        lambda c: bool(c.tasks.eval_fraction == 0 and c.eval.num_tasks and _first(c, lambda s: not s.names_held_out)),
        lambda c: (
            f"tasks.eval_fraction = 0 with eval.num_tasks = {c.eval.num_tasks}: nothing is held out of"
            f" {_first(c, lambda s: not s.names_held_out)}. Raise tasks.eval_fraction, or give held-out rows"
            " (eval_path, eval_split)"
        ),
    ),
    Refused(
        ("tasks.sources",),
        lambda c: bool(_streamed_in_order(c)),
        lambda c: (
            f"{_streamed_in_order(c)}.order_column with streaming: all rows would have to be read before the first"
            " task. Remove one of the two, or sort the file itself and set tasks.shuffle = false"
        ),
    ),
    Refused(
        ("tasks.sources",),
        lambda c: bool(_streamed(c) and _with_keys(c)),
        lambda c: (
            f"{_with_keys(c)}.problem_key with {_streamed(c)}.streaming: a text may have one key that is held out and"
            " another that is trained. To keep it from one side, all rows would have to be read before the first"
            " task, and a stream may have no end. Remove one of the two"
        ),
    ),
    Refused(
        ("tasks.sources",),
        lambda c: bool(_streamed_and_named(c) and _first(c, lambda s: not s.names_held_out)),
        lambda c: (
            f"{_streamed_and_named(c)}.streaming with held-out rows of its own, beside"
            f" {_first(c, lambda s: not s.names_held_out)}, of which a hash holds some rows out: the stream may have"
            " the same ones, and all of it would have to be read to know. Give both held-out rows of their own"
            " (eval_path, eval_split), or none"
        ),
    ),
    wrong(("tasks.sources",), _no_source),
)
