"""A file of another system, converted and checked, as TOML with the other's option behind each key."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rollover.config.describe import toml_value
from rollover.config.load import PYTHON, load_config
from rollover.config.table import ConfigError, value_of
from rollover.plugins.convert.files import is_file_of_rows
from rollover.plugins.convert.mapping import Conversion, System, convert
from rollover.plugins.convert.read import read
from rollover.text import one_line

_STEPS = "train.num_steps"
_SOURCES = "tasks.sources"


def converted(
    path: Path, overrides: Sequence[tuple[str, str]] = (), accepted: Sequence[str] = (), of_system: str = ""
) -> tuple[str, list[str]]:
    """The TOML, and a line for each option without a counterpart. `overrides`: of our keys, as on the command line.

    accepted: options of the other system that are left out though they change what is learned. of_system: whose file it
    is; empty: by its content. ValueError for a file that cannot be read, questions that are not answered, and a
    configuration that is refused.
    """
    system, options = read(path, of_system)
    done = convert(system, options)
    answered = {key for key, _ in overrides}
    _check(system, done, answered, accepted, path)
    of_sources = any(key.startswith(_SOURCES) for key in answered)
    if of_sources:
        done.values.setdefault(_SOURCES, ([{"kind": "dataset"}], "command line"))
        _of_new_files(done, overrides)
    try:
        config = load_config([{key: value for key, (value, _) in done.values.items()}], overrides).config
    except ConfigError as error:
        raise ValueError(
            f"{path}: what it says is refused here; set --table.key VALUE to change it:\n"
            + str(error).replace(f"{PYTHON}: ", "")
        ) from error
    for key, _ in overrides:
        if not key.startswith(_SOURCES):
            done.values[key] = (value_of(config, key), "command line")
    if of_sources:
        rows = [row.model_dump(exclude_defaults=True) for row in config.tasks.sources]
        done.values[_SOURCES] = (rows, done.values[_SOURCES][1])
    notices = [f"{one_line(name)} is left out: {reason}" for name, reason in sorted(done.without.items())]
    return _as_toml(done, f"{path.name}, of {system.name}"), notices


def _of_new_files(done: Conversion, overrides: Sequence[tuple[str, str]]) -> None:
    """Remove subset and splits of each source whose path is overridden by a single file: it has none."""
    rows, shown = done.values[_SOURCES]
    for i, row in enumerate(rows):
        if any(key == f"{_SOURCES}.{i}.path" and is_file_of_rows(value) for key, value in overrides):
            gone = ("subset", "split") if "eval_path" in row else ("subset", "split", "eval_split")
            rows[i] = {name: item for name, item in row.items() if name not in gone}
    done.values[_SOURCES] = (rows, shown)


def _check(system: System, done: Conversion, answered: set[str], accepted: Sequence[str], path: Path) -> None:
    """ValueError for the questions that neither `answered` nor `accepted` answers; the latter are noted as left out."""
    keys = {row.option: row.keys for row in system.rows}
    if _STEPS not in done.values:
        reason = f"how many steps its epochs are depends on the rows of the data: set --{_STEPS} N"
        unread = done.questions.get(system.steps)
        done.questions[system.steps] = f"{unread}: set --{_STEPS} N" if unread else reason
        keys[system.steps] = (_STEPS,)
    open_questions = []
    for option, reason in done.questions.items():
        ours = keys.get(option, ())
        if any(key == one or key.startswith(f"{one}.") for key in answered for one in ours):
            continue
        if option != system.steps and any(option == pattern or fnmatchcase(option, pattern) for pattern in accepted):
            done.without[option] = f"accepted; {reason}"
            continue
        answers = [f"--{key} VALUE".replace(f"{_SOURCES} ", f"{_SOURCES}.0.path ") for key in ours]
        answers.append(f"--accept{'=' if option.startswith('-') else ' '}{shlex.quote(option)}")
        how = "" if f"--{_STEPS}" in reason else f" (answer with {' or '.join(answers)})"
        open_questions.append((option, reason, how))
    if open_questions:
        lines = "\n".join(_together(system, open_questions))
        raise ValueError(f"{path}: this changes what is learned, and has to be answered:\n{lines}")


def _together(system: System, questions: Sequence[tuple[str, str, str]]) -> list[str]:
    """A line for each question; one for several options of a row whose name has a pattern."""
    lines: dict[tuple[str, str], tuple[list[str], str]] = {}
    for option, reason, how in questions:
        pattern = next((row.option for row in system.rows if "*" in row.option and row.names(option)), option)
        lines.setdefault((pattern, reason), ([], how))[0].append(option)
    return [
        f"  {', '.join(options)}: {reason}"
        + (how if len(options) == 1 else f" (answer with --accept {shlex.quote(pattern)})")
        for (pattern, reason), (options, how) in lines.items()
    ]


def _as_toml(done: Conversion, source: str) -> str:
    tables: dict[str, list[str]] = {}
    for key, (value, shown) in done.values.items():
        table, _, name = key.rpartition(".")
        if key != _SOURCES:
            tables.setdefault(table, []).append(f"{name} = {toml_value(value)}  # {one_line(shown)}")
    lines = [f"# {one_line(source)}. Behind each key: the option that it is there."]
    for table in sorted(tables):
        lines += ["", f"[{table}]", *tables[table]]
    rows, shown = done.values.get(_SOURCES, ([], ""))
    for row in rows:
        lines += [
            "",
            f"[[tasks.sources]]  # {one_line(shown)}",
            *(f"{name} = {toml_value(item)}" for name, item in row.items()),
        ]
    for heading, of_options in (("Notes", done.notes), ("Left out", done.without)):
        if of_options:
            lines += ["", f"# {heading}:"]
            lines += [f"# {one_line(f'{name}: {text}')}" for name, text in sorted(of_options.items())]
    return "\n".join(lines) + "\n"
