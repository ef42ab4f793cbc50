"""Converts another system's file to TOML, with the other system's option behind each key. Runs nothing in the file.

Add a system: its rows in SYSTEMS, its `FileFormat`s in FORMATS.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rollover.config.describe import toml_value
from rollover.config.load import PYTHON, load_config
from rollover.config.table import ConfigError, value_of
from rollover.plugins.convert.axolotl import AXOLOTL, is_axolotl, options_of_axolotl
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.files import is_file_of_rows, tables_of, text_of
from rollover.plugins.convert.lightrft import LIGHTRFT, is_lightrft, options_of_flags
from rollover.plugins.convert.mapping import Conversion, System, convert
from rollover.plugins.convert.trl.command import (
    is_trl_command,
    is_trl_yaml,
    options_of_trl_command,
    options_of_trl_flags,
)
from rollover.plugins.convert.trl.rows import TRL
from rollover.plugins.convert.trl.script import calls_grpo_trainer, options_of_trl_script
from rollover.plugins.convert.verl.options import options_of_script, options_of_yaml
from rollover.plugins.convert.verl.programs import is_rllm
from rollover.plugins.convert.verl.rllm import RLLM
from rollover.plugins.convert.verl.rows import VERL
from rollover.text import one_line

_STEPS = "train.num_steps"
_SOURCES = "tasks.sources"


def convert_file(
    path: Path, overrides: Sequence[tuple[str, str]] = (), accepted: Sequence[str] = (), system_name: str = ""
) -> tuple[str, list[str]]:
    """Convert a file to TOML. Return it, and a line for each option without a counterpart.

    overrides: of our keys, as on the command line. accepted: options to leave out although results change. system_name:
    "" detects it from the content. ValueError for an unreadable file, open questions, and an invalid configuration.
    """
    system, options = read_options(path, system_name)
    conversion = convert(system, options)
    answered = {key for key, _ in overrides}
    _check_questions(system, conversion, answered, accepted, path)
    of_sources = any(key.startswith(_SOURCES) for key in answered)
    if of_sources:
        conversion.values.setdefault(_SOURCES, ([{"kind": "dataset"}], "command line"))
        _drop_splits(conversion, overrides)
    try:
        config = load_config([{key: value for key, (value, _) in conversion.values.items()}], overrides).config
    except ConfigError as error:
        raise ValueError(
            f"{path}: what it says is refused here; set --table.key VALUE to change it:\n"
            + str(error).replace(f"{PYTHON}: ", "")
        ) from error
    for key, _ in overrides:
        if not key.startswith(_SOURCES):
            conversion.values[key] = (value_of(config, key), "command line")
    if of_sources:
        rows = [row.model_dump(exclude_defaults=True) for row in config.tasks.sources]
        conversion.values[_SOURCES] = (rows, conversion.values[_SOURCES][1])
    notices = [f"{one_line(name)} is left out: {reason}" for name, reason in sorted(conversion.left_out.items())]
    return _to_toml(conversion, f"{path.name}, of {system.name}"), notices


def _drop_splits(conversion: Conversion, overrides: Sequence[tuple[str, str]]) -> None:
    """Remove subset and splits of each source whose path is overridden by a single file."""
    rows, shown = conversion.values[_SOURCES]
    for i, row in enumerate(rows):
        if any(key == f"{_SOURCES}.{i}.path" and is_file_of_rows(value) for key, value in overrides):
            gone = ("subset", "split") if "eval_path" in row else ("subset", "split", "eval_split")
            rows[i] = {name: item for name, item in row.items() if name not in gone}
    conversion.values[_SOURCES] = (rows, shown)


def _check_questions(
    system: System, conversion: Conversion, answered: set[str], accepted: Sequence[str], path: Path
) -> None:
    """Raise ValueError for open questions, and move accepted options to `left_out`."""
    keys = {row.option: row.keys for row in system.rows}
    if _STEPS not in conversion.values:
        reason = f"how many steps its epochs are depends on the rows of the data: set --{_STEPS} N"
        unread = conversion.questions.get(system.steps)
        conversion.questions[system.steps] = f"{unread}: set --{_STEPS} N" if unread else reason
        keys[system.steps] = (_STEPS,)
    open_questions = []
    for option, reason in conversion.questions.items():
        ours = keys.get(option, ())
        if any(key == one or key.startswith(f"{one}.") for key in answered for one in ours):
            continue
        if option != system.steps and any(option == pattern or fnmatchcase(option, pattern) for pattern in accepted):
            conversion.left_out[option] = f"accepted; {reason}"
            continue
        answers = [f"--{key} VALUE".replace(f"{_SOURCES} ", f"{_SOURCES}.0.path ") for key in ours]
        answers.append(f"--accept{'=' if option.startswith('-') else ' '}{shlex.quote(option)}")
        how = "" if f"--{_STEPS}" in reason else f" (answer with {' or '.join(answers)})"
        open_questions.append((option, reason, how))
    if open_questions:
        lines = "\n".join(_question_lines(system, open_questions))
        raise ValueError(f"{path}: this changes what is learned, and has to be answered:\n{lines}")


def _question_lines(system: System, questions: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a line per question, or per pattern of several options."""
    lines: dict[tuple[str, str], tuple[list[str], str]] = {}
    for option, reason, how in questions:
        pattern = next((row.option for row in system.rows if "*" in row.option and row.matches(option)), option)
        lines.setdefault((pattern, reason), ([], how))[0].append(option)
    return [
        f"  {', '.join(options)}: {reason}"
        + (how if len(options) == 1 else f" (answer with --accept {shlex.quote(pattern)})")
        for (pattern, reason), (options, how) in lines.items()
    ]


def _to_toml(conversion: Conversion, source: str) -> str:
    tables: dict[str, list[str]] = {}
    for key, (value, shown) in conversion.values.items():
        table, _, name = key.rpartition(".")
        if key != _SOURCES:
            tables.setdefault(table, []).append(f"{name} = {toml_value(value)}  # {one_line(shown)}")
    lines = [f"# {one_line(source)}. Behind each key: the option that it is there."]
    for table in sorted(tables):
        lines += ["", f"[{table}]", *tables[table]]
    rows, shown = conversion.values.get(_SOURCES, ([], ""))
    for row in rows:
        lines += [
            "",
            f"[[tasks.sources]]  # {one_line(shown)}",
            *(f"{name} = {toml_value(item)}" for name, item in row.items()),
        ]
    for heading, of_options in (("Notes", conversion.notes), ("Left out", conversion.left_out)):
        if of_options:
            lines += ["", f"# {heading}:"]
            lines += [f"# {one_line(f'{name}: {text}')}" for name, text in sorted(of_options.items())]
    return "\n".join(lines) + "\n"


# Reading

SYSTEMS: dict[str, System] = {"verl": VERL, "trl": TRL, "axolotl": AXOLOTL, "lightrft": LIGHTRFT}
_YAML = (".yaml", ".yml")
_SCRIPTS = (".sh", ".sbatch", ".slurm", ".txt", "")
_OVERRIDE = re.compile(
    r"(?<![\w.-])\+{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_model)\.[\w.]+="
    r"|\bverl\.trainer\.main_|\bmain_(?:ppo|dapo)\b"
)


@dataclass(frozen=True)
class FileFormat:
    """A file format of a system. Content is the tables of a YAML, or the text of another file.

    matches(content): whether it has options that only this system has. options(content, path): reads them; ValueError
    if there are none or one cannot be read.
    """

    system: str
    suffixes: tuple[str, ...]
    matches: Callable[[Any], bool]
    options: Callable[[Any, Path], dict[str, Any]]


def _is_verl(tables: Mapping[str, Any]) -> bool:
    return any(name in tables for name in ("actor_rollout_ref", "critic", "reward_model", "algorithm", "trainer"))


def _has_overrides(text: str) -> bool:
    return bool(_OVERRIDE.search(text))


FORMATS = (
    FileFormat("verl", _YAML, _is_verl, options_of_yaml),
    FileFormat("axolotl", _YAML, is_axolotl, options_of_axolotl),
    FileFormat("trl", _YAML, is_trl_yaml, lambda tables, path: options_of_trl_flags(tables)),
    FileFormat("trl", (".py",), calls_grpo_trainer, options_of_trl_script),
    FileFormat("trl", _SCRIPTS, is_trl_command, options_of_trl_command),
    FileFormat("verl", _SCRIPTS, _has_overrides, options_of_script),
    FileFormat("lightrft", _SCRIPTS, is_lightrft, options_of_flags),
)


def read_options(path: Path, system: str = "") -> tuple[System, dict[str, Any]]:
    """Return the system of a file and its options. ValueError for an unreadable file or an unclear system.

    system: "" detects it from the content.
    """
    text = text_of(path)
    try:
        content = tables_of(text) if path.suffix in _YAML else text
        called, why = _called_scripts(text, path) if path.suffix in _SCRIPTS else ("", "")
        form = _find_format(path.suffix, f"{content}\n{called}" if called else content, system, why)
        options = form.options(content, path)
        return RLLM if form.system == "verl" and is_rllm(options) else SYSTEMS[form.system], options
    except (ValueError, ImportError) as error:
        raise ValueError(f"{path}: {error}") from error
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}: what it says is nested too deeply") from None


def _called_scripts(text: str, path: Path) -> tuple[str, str]:
    """Return the texts of the scripts that a launch script starts, and why they are unknown.

    ValueError if it only starts one that cannot be read.
    """
    try:
        script = read_script(text, str(path))
    except (ValueError, ImportError) as error:
        return "", str(error)  # perhaps no bash; the reader of that format reports the error
    if script.missing and not script.may_have_trained:
        line, name, reason = script.missing[0]
        shown, reason = shlex.quote(one_line(name)[:200]), one_line(reason)
        raise ValueError(
            f"line {line} starts {shown}, which cannot be read ({reason}), and nothing else here trains: convert it"
        )
    return "\n".join(script.called), ""


def _find_format(suffix: str, content: Any, system: str, why: str = "") -> FileFormat:
    """Return the format of a file. why: why the scripts that it starts are unknown."""
    of_suffix = [form for form in FORMATS if suffix in form.suffixes] or [f for f in FORMATS if "" in f.suffixes]
    if system:
        found: Sequence[FileFormat] = [form for form in of_suffix if form.system == system]
        if not found:
            forms = ", ".join(sorted({s or "no suffix" for f in FORMATS if f.system == system for s in f.suffixes}))
            raise ValueError(f"a file of {system} is one of {forms}")
        return found[0]
    found = [form for form in of_suffix if form.matches(content)]
    if len(found) == 1:
        return found[0]
    what = "more than one system has" if found else "no system has"
    names = " or ".join(f"--from {form.system}" for form in found or of_suffix)
    unread = f" (as bash it is not read: {one_line(why)})" if why and not found else ""
    raise ValueError(f"{what} such options{unread}: say which one's it is with {names}")
