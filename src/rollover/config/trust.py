"""Settings of a run's directory that name code, programs or addresses: the directory may come from somebody else.

    TEXTS, PLACES, FUNCTIONS ──what each option may hold──▶ named(values) ──▶ refuse (resume, --from), without_functions

Owns which options can name such a thing. An option that may hold a text and stands in no list below counts as a
program: a new one is refused until it is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

from rollover.config.schema import leaves
from rollover.config.table import ConfigError, Table, entry_points_of, row_of, table_of
from rollover.live_objects import is_live
from rollover.registry import resolved

# Keys of rows and of named tables are written without index and name: `tasks.sources.reward`.
# A built-in name, a function as `module:function` or `path.py:function`, or the name of an entry point, which counts as
# the function that it stands for: it is code of an installed distribution, but the directory chose to run it.
FUNCTIONS = (
    "run.hooks", "tasks.sources.kind", "tasks.sources.problem_key", "tasks.sources.reward", "tasks.producer",
    "tasks.before_produce", "tasks.curriculum.kind", "rollout.order", "rollout.environment", "workflow.environment",
    "workflow.function", "workflow.tool_format", "workflow.group_by", "workflow.roles.advantage", "engine.kind",
    "engine.dialect", "algorithm.advantage", "algorithm.after_scoring", "algorithm.loss", "distill.privileged",
    "backend.type", "cluster.type", "rewards.function", "rewards.functions.function", "rewards.eval_function",
    "rewards.by_data_source", "filters.custom", "track.metrics", "track.trackers",
)  # fmt: skip
# A path, a name at the hub, or a URL: fsspec's file systems reach other machines, and some run code. (`params`: of a
# function that is itself in FUNCTIONS, or of a taskset.)
PLACES = (
    "run.train_on_recorded", "model.path", "model.lora.path", "tasks.sources.path", "tasks.sources.eval_path",
    "tasks.sources.params", "tasks.sources.eval_params", "algorithm.reference_path", "critic.model", "distill.teacher",
    "sft.path", "sft.eval_path", "sft.rollouts",
)  # fmt: skip
# Data: never imported, executed, connected to or written to. (`run.dir` is the directory itself: `settings_of_run`.)
TEXTS = (
    "run.name", "run.dir", "model.revision", "model.device", "model.chat_template_kwargs", "model.processor_kwargs",
    "model.lora.target_modules", "model.lora.exclude_modules", "tasks.sources.name", "tasks.sources.subset",
    "tasks.sources.split", "tasks.sources.eval_split", "tasks.sources.prompt_column", "tasks.sources.answer_column",
    "tasks.sources.data_source_column", "tasks.sources.image_column", "tasks.sources.order_column",
    "tasks.system_prompt", "tasks.instruction", "tasks.curriculum.by", "tasks.curriculum.prior_column", "rollout.stop",
    "rollout.logits.logit_bias", "rollout.logits.regex", "rollout.logits.json_schema", "workflow.env", "engine.device",
    "algorithm.reward_weights", "algorithm.loss_options", "algorithm.rejection", "distill.roles", "backend.base_model",
    "rewards.functions.name", "filters.metric", "eval.settings.name", "eval.metric", "checkpoint.resume_from",
    "track.project", "track.group", "track.entity", "track.tags", "sft.subset", "sft.split", "sft.prompt_column",
    "sft.completion_column",
)  # fmt: skip
FLAGS = ("model.trust_remote_code", "tasks.allow_image_urls")  # of the options that are true or false
_T = TypeVar("_T", bound=Table)


class Named(NamedTuple):
    """A `value` at `key`; `option`: the key without indices and names, as in the lists above."""

    option: str
    value: Any
    key: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}"


@dataclass(frozen=True)
class OfRun:
    """Settings of a run's directory, as a layer of `load_config`. `given`: values that count as given by the user, who
    gave them to the same run before. `asked_by` and `flag`: the option that named the directory, and the one that
    trusts it. `unused`: beginnings of keys whose values the caller never runs."""

    settings: Mapping[str, Any]
    directory: str
    trusted: bool
    asked_by: str
    flag: str
    given: Mapping[str, Any]
    unused: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"the run in {self.directory}"

    def refuse_unless_given(self, used: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError for values of `used` that come from this directory alone, and from none of `layers`."""
        if self.trusted:
            return
        given = {of[:2] for layer in (self.given, *layers) for of in named(layer)}
        theirs = {of[:2] for of in named(self.settings)} - given
        if found := [of for of in named(used) if of[:2] in theirs and not of.option.startswith(self.unused)]:
            raise ConfigError(
                f"{self.asked_by} {self.directory}: its configuration names what would run, be connected to or be"
                f" written to here: {', '.join(map(str, found))}. If the directory is yours, or you have read what it"
                f" names, add {self.flag}; or give each of these again (the same value is enough) or another value"
            )


def named(values: Mapping[str, Any]) -> Iterator[Named]:
    """Yield what `values` (tables, or values by dotted keys) name of code, programs and addresses."""
    for key, value in values.items():
        path = tuple(part for part in key.split(".") if not part.isdigit())
        for of, text, where in _texts(value, path, key):
            option = _option_of(of)
            kind = _kinds().get(option)
            spec = resolved(kind, text) if kind else text
            if option and _names(option, spec):
                yield Named(option, spec, where)


def without_functions(table: _T, prefix: str) -> tuple[_T, list[Named]]:
    """Return a table with defaults in place of functions, for a reader that runs nothing, and the values replaced."""
    found = list(named({prefix: table.model_dump()}))
    usual = {name: info.get_default(call_default_factory=True) for name, info in type(table).model_fields.items()}
    update = {name: usual[name] for of in found if (name := of.option.removeprefix(f"{prefix}.")) in usual}
    return table.model_copy(update=update), found


def text_options(table: type[Table]) -> Iterator[str]:
    """Yield the options that may hold any text, as the lists above name them."""
    for name, info in _fields(table):
        if _holds_text(info.annotation):
            yield name


# Private


def _names(option: str, value: Any) -> bool:
    if option in FUNCTIONS or option in PLACES:
        return isinstance(value, str) and ":" in value and not is_live(value)
    return bool(value)


def _option_of(path: tuple[str, ...]) -> str:
    """Return the option that holds a value at this path; "" where it is data, or no option."""
    options = _options()
    for end in range(len(path), 0, -1):
        if (option := options.get(path[:end])) is not None:
            return option
    if len(path) > 3 and path[:2] == ("workflow", "roles"):
        return _option_of((*path[:2], path[-1]))
    return ""


def _fields(table: type[Table], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in leaves(table, prefix):
        if row := row_of(info.annotation) or _named_tables(info):
            yield from _fields(row, f"{name}.")
        else:
            yield name, info


@cache
def _kinds() -> dict[str, str]:
    """Option -> the kind of registry.KINDS whose names it takes."""
    from rollover.config.schema import Config

    return {name: kind for name, info in _fields(Config) if (kind := entry_points_of(info))}


@cache
def _options() -> dict[tuple[str, ...], str]:
    from rollover.config.schema import Config

    keys = [*(key for key in text_options(Config) if key not in TEXTS), *FLAGS]
    return {tuple(key.split(".")): key for key in keys}


def _holds_text(annotation: Any) -> bool:
    """Whether a text that is none of a few words may stand in a value of this annotation."""
    if get_origin(annotation) is Literal:
        return False
    return annotation in (str, Any) or any(map(_holds_text, get_args(annotation)))


def _named_tables(info: FieldInfo) -> type[Table] | None:
    """Return the Table of a field that has one for each name."""
    return table_of(get_args(info.annotation)[1]) if get_origin(info.annotation) is dict else None


def _texts(value: Any, path: tuple[str, ...], key: str) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """(path without indices, text or True, key with them) of all that are in `value`."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, (*path, str(name)), f"{key}.{name}")
    elif isinstance(value, list | tuple):
        rows = any(isinstance(item, Mapping) for item in value)
        for i, item in enumerate(value):
            yield from _texts(item, path, f"{key}.{i}" if rows else key)
    elif isinstance(value, str) or value is True:
        yield path, value, key
