from typing import Any, Literal, NamedTuple

from pydantic import Field

from rollover.config.base import Table

AnswerRule = Literal["last_number", "last_line", "answer_tag", "boxed", "full_text"]


class SourceKind(NamedTuple):
    """A kind of source: the key that it cannot do without, the keys that not every kind has, and its own reward."""

    needs: str
    keys: tuple[str, ...]
    reward: str = "exact_match"


# Of rollover.tasks.build, which config may not import; a test compares them.
SOURCES = {
    "reasoning_gym": SourceKind("name", ("params",), "reasoning_gym"),
    "dataset": SourceKind(
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
        ),
    ),
}
_OWN = SourceKind("", ("params",))


class TaskSourceConfig(Table):
    """[[tasks.sources]]: one source of tasks."""

    kind: str = Field(
        default="",
        description="reasoning_gym: a generator by name. dataset: a file, a folder or a data set of the hub. Or your"
        " own function (module:function or path.py:function), which makes a source of tasks.",
    )
    name: str = Field(
        default="",
        description="Generator name (reasoning_gym), or the label of another source (default: the name of its file or"
        " function).",
    )
    weight: float = Field(default=1.0, gt=0, description="Share of this source among all sources.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the generator, or of a source of your own."
    )
    path: str = Field(
        default="",
        description="dataset: JSONL, Parquet or CSV file (local path or fsspec URL), a folder of such files, or a data"
        " set of the hub (owner/name).",
    )
    subset: str = Field(
        default="", description="dataset: subset (configuration) of a data set of the hub; empty = the only one."
    )
    split: str = Field(default="train", description="dataset: split of a folder or of the hub that is trained.")
    eval_path: str = Field(
        default="", description="dataset: held-out rows, as `path`; empty = a share of `path` (tasks.eval_fraction)."
    )
    eval_split: str = Field(
        default="",
        description="dataset: split that is held out, of `eval_path` or else of `path`; empty = none is (of an"
        " `eval_path`: train).",
    )
    streaming: bool = Field(
        default=False,
        description="dataset: read rows as they are needed, in their order, and store none; tasks.shuffle then"
        " shuffles them within each 1,000.",
    )
    prompt_column: str = Field(
        default="", description="dataset: prompt column; empty = prompt, question, problem or messages."
    )
    answer_column: str = Field(
        default="",
        description="dataset: answer column; empty = reward_model.ground_truth (verl), answer, solution or"
        " ground_truth.",
    )
    problem_key: str = Field(
        default="",
        description="What makes two problems the same, so that one is not trained where the other is held out. dataset:"
        " a column; or your own function (module:function or path.py:function) of a task to a text. Empty: the prompt"
        " without regard to case and white space; of some generators (chain_sum, products, ...) also without regard"
        " to the order of operands.",
    )
    reward: str = Field(
        default="",
        description="Reward of this source: module:function, path.py:function, or a built-in name; empty ="
        " [rewards].function, then the generator's own scorer (reasoning_gym) or exact_match (any other).",
    )
    answer_rule: AnswerRule | Literal[""] = Field(
        default="", description="Overrides tasks.answer_rule for this source."
    )

    @property
    def about(self) -> SourceKind:
        """What holds of every source of this kind."""
        return SOURCES.get(self.kind, _OWN)

    @property
    def missing(self) -> str:
        """The key that is not set, though this kind needs it; "" if there is none."""
        needs = self.about.needs if self.kind else "kind"
        return "" if not needs or getattr(self, needs) else needs

    @property
    def names_held_out(self) -> bool:
        """Whether the held-out rows are named (a file or a split of their own), and not chosen by a hash."""
        return bool(self.eval_path or self.eval_split)


class TasksConfig(Table):
    """[tasks]: where the problems come from and how they are put to the model."""

    sources: list[TaskSourceConfig] = Field(default_factory=list, description="Sources of tasks, mixed by weight.")
    system_prompt: str = Field(default="", description="System message put before every task's messages.")
    instruction: str = Field(
        default="", description="Text appended to the last user message of every task (after a newline)."
    )
    chat: bool = Field(
        default=True, description="Put plain prompts into a user message and apply the model's chat template."
    )
    producer: str = Field(
        default="",
        description="Your own class (module:Class or path.py:Class), made with (config, tokenizer, engine), whose"
        " produce(step, version) returns the groups of each step; empty: the tasks are generated from.",
    )
    before_produce: str = Field(
        default="",
        description="Your own function (module:function or path.py:function) of a task and the trainer's version,"
        " called before the task is admitted: it returns the task to use, or None to leave it out.",
    )
    answer_rule: AnswerRule = Field(
        default="last_number",
        description="How the final answer is read from a completion before a scorer sees it: last_number (the last"
        " number), last_line, answer_tag (the last <answer>...</answer>), boxed (the last \\boxed{...}), full_text.",
    )
    epochs: int = Field(
        default=0, ge=0, description="Passes over the datasets; 0 = endless. Generators are always endless."
    )
    shuffle: bool = Field(default=True, description="Shuffle datasets each epoch (seeded).")
    eval_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Share of all distinct problems held out for evaluation (by a hash of what makes them the same:"
        " tasks.sources.problem_key).",
    )
    max_prompt_tokens: int = Field(
        default=1024, ge=1, description="A task with a longer prompt is skipped, and counted."
    )
