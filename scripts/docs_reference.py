"""The pages of the site's reference, from what they are about: the configuration, the parser, the public names.

What a name of Python does stands in its docstring, which mkdocstrings puts in the place of `::: name`. metrics.md is no
page of these: `python -m rollover.track.metrics` writes it, so that it can be read on GitHub.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import rollover
from rollover import cli
from rollover.config.describe import toml_value
from rollover.config.schema import expected, leaves, tables
from rollover.config.table import Table, needs_of, row_of, table_of

# The public names by what a reader wants.
PUBLIC = {
    "Train": ("train", "train_async", "sft", "Session", "Step"),
    "Look at a run": ("open", "Run"),
    "Generate and plan": ("Engine", "Completion", "plan"),
    "Words": ("Task", "Prompt", "Segment", "Rollout", "Reward", "Group"),
    "Episodes": ("Episode", "Trajectory", "TrajectoryGroup", "Observation", "distilled"),
    "Groups of your own": ("ready_group", "ready_episodes", "Played"),
    "Trackers": ("Tracker", "RunInfo"),
}
# What a function or class of the user's own is given, and what it must do (docs/own-functions.md).
PROTOCOLS = {
    "Loss": ("rollover.algorithms.token_batch.TokenBatch",),
    "Order": ("rollover.rollout.order.RolloutView",),
    "Source of tasks": ("rollover.tasks.source.SourceSetup", "rollover.tasks.source.TaskSource"),
    "Curriculum": ("rollover.tasks.curriculum.Seen", "rollover.tasks.curriculum.Visit"),
    "Environment": (
        "rollover.envs.protocol.EnvironmentSetup",
        "rollover.envs.protocol.Environment",
        "rollover.envs.chat.Chat",
    ),
    "Agent": ("rollover.workflows.conversations.Call", "rollover.workflows.conversations.Reply"),
    "Engine": (
        "rollover.engine.build.EngineSetup",
        "rollover.engine.protocol.Engine",
        "rollover.engine.protocol.ExtendRequest",
        "rollover.engine.protocol.WeightLoad",
    ),
    "Producer": ("rollover.run.producer.Producer",),
    "Trainer backend": ("rollover.trainer.backend.BackendSetup", "rollover.trainer.backend.TrainerBackend"),
    "Verb of the command line": ("rollover.commands.Verb",),
}


def pages() -> dict[str, str]:
    """The generated pages by their place on the site."""
    return {
        "reference/python.md": public_names(),
        "reference/protocols.md": protocols(),
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
    }


# Python


def public_names() -> str:
    text = "# Python API\n\nEvery name of `import rollover`. How they go together: [Python](../python.md).\n"
    for section, names in PUBLIC.items():
        text += f"\n## {section}\n"
        for name in names:
            text += _documented(f"{rollover._PLACES[name]}.{name}", f"rollover.{name}")
    return text


def protocols() -> str:
    text = (
        "# What you implement\n\nWhat functions and classes of your own are given, and what they must do. Which option"
        " names them, with an example of each: [functions of your own](../own-functions.md). A reward is a plain"
        " function ([rewards](../rewards.md)), and so are an advantage, a filter and a metric.\n"
    )
    for section, names in PROTOCOLS.items():
        text += f"\n## {section}\n" + "".join(_documented(name, name.rpartition(".")[2]) for name in names)
    return text


def _documented(name: str, heading: str) -> str:
    return f"\n::: {name}\n    options:\n      heading: {heading}\n      toc_label: {heading}\n"


# Configuration

_CONFIGURATION = """# Configuration

Every key of a configuration file, with its default. `rollover config FILE.toml` prints the same for a file, with the
layer that set each value, `rollover config --schema` the JSON schema. How layers go together:
[start in five minutes](../start.md#a-configuration-of-your-own). Any key is also an option of the command line:
`--rollout.group_size 8`.
"""


def keys() -> set[str]:
    """The anchors of the configuration's page: each key, and those of a list of tables without an index."""
    found = {name for name, _ in leaves()}
    rows = ((name, row_of(info.annotation)) for name, info in leaves())
    return found | {f"{name}.{key}" for name, row in rows if row for key, _ in leaves(row)}


def configuration() -> str:
    text = _CONFIGURATION
    for name, table in tables():
        text += _table(name, f"[{name}]", table)
        for key, info in table.model_fields.items():
            if row := row_of(info.annotation):
                text += _table(f"{name}.{key}", f"[[{name}.{key}]]", row)
            elif named := _each_of(info):
                text += _table(f"{name}.{key}.NAME", f"[{name}.{key}.NAME]", named)
    return text


def _each_of(info: FieldInfo) -> type[Table] | None:
    """The table that stands under each name of one, if there is such."""
    return table_of(get_args(info.annotation)[1]) if get_origin(info.annotation) is dict else None


def _table(name: str, header: str, table: type[Table]) -> str:
    fields = [(key, info) for key, info in table.model_fields.items() if not table_of(info.annotation)]
    text = f"\n## `{header}` {{ #{name} }}\n"
    if doc := _prose(table.__doc__ or ""):
        text += f"\n{doc}\n"
    if not fields:
        return text
    text += "\n| key | default | |\n|---|---|---|\n"
    return text + "".join(_row(name, key, info) for key, info in fields)


def _row(table: str, key: str, info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    shown = "must be given" if default is PydanticUndefined else _code(toml_value(default))
    takes = "; ".join([expected(info), *map(str, needs_of(info))])
    return f"| `{key}`{{ #{table}.{key} }} | {shown} | {_cell(info.description or '')} *({_cell(takes)})* |\n"


def _prose(docstring: str) -> str:
    """Of a table's docstring what follows its name."""
    text = re.sub(r"^\[+[\w.]+\]+: ", "", re.sub(r"\n +", "\n", docstring.strip()))
    return text[:1].upper() + text[1:]


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """A text in a cell of a table: what Markdown would take for markup is itself."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


# Command line

_COMMANDS = """# Command line

Every verb of `rollover`, as `rollover VERB --help` prints it. `FILE.toml` is a configuration, or the name of a recipe
(`rollover init --list`), and later ones override earlier ones. Verbs that read one take any key as `--table.key VALUE`.
Exit codes: 0 done, 1 failed, 2 wrong input, with a sentence that says what to change, 130 Ctrl-C.
"""


def commands() -> str:
    parser = cli.build_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    text = _COMMANDS
    for name, verb in verbs.choices.items():
        actions = [action for action in verb._actions if "--help" not in action.option_strings]
        text += f"\n## rollover {name}\n\n{verb.description}\n\n```\n{_usage(name, actions, verb.epilog)}\n```\n"
        rows = [f"| {_code(_words(action))} | {_cell(_help(verb, action))} |\n" for action in actions]
        text += "\n| | |\n|---|---|\n" * bool(rows) + "".join(rows)
    return text


def _usage(name: str, actions: Iterable[argparse.Action], epilog: str | None) -> str:
    words = [f"rollover {name}"]
    for action in actions:
        word = _words(action)
        many = {"+": f"{word} [{word} ...]", "*": f"[{word} ...]", "?": f"[{word}]"}.get(str(action.nargs), word)
        words.append(many if not action.option_strings or action.required else f"[{word}]")
    return " ".join([*words, *(["[--table.key VALUE ...]"] if epilog else [])])


def _words(action: argparse.Action) -> str:
    named = max(action.option_strings, key=len, default="")
    if action.nargs == 0:
        return named
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper())
    return f"{named} {value}".strip()


def _help(verb: argparse.ArgumentParser, action: argparse.Action) -> str:
    return verb._get_formatter()._expand_help(action) if action.help else ""
