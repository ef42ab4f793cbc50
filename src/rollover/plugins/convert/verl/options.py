"""Reads verl's options from a launch script (bash with Hydra overrides), a file of overrides, or a YAML.

YAMLs are composed as by Hydra: with their defaults lists, and the other YAMLs that these name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.plugins.convert.bash.programs import Command, Script
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.bash.text import Text
from rollover.plugins.convert.files import flatten, tables_of
from rollover.plugins.convert.hydra import interpolate, parse_value
from rollover.plugins.convert.launch import (
    directories,
    find_program,
    find_text,
    merge_commands,
    not_an_option,
    read_value,
    unknown_value,
)
from rollover.plugins.convert.mapping import LeftOut, Unknown
from rollover.plugins.convert.verl.programs import with_program

ROOTS = ("data", "actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "reward")
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@:\-]*)=(.*)", re.S)
_MAIN = re.compile(r"(?:^|[./])\w*main\w*(?:\.py)?$|^verl\.trainer\.\w*ppo\w*$")
_OTHERS = re.compile(r"sft|main_eval|main_generation|model_merger|preprocess|hf_convert|converter")
# Hydra's own flags: long and short.
_NAME, _PLACE, _FOLDER = ("--config-name", "-cn"), ("--config-path", "-cp"), ("--config-dir", "-cd")
_HYDRA_OUTPUT = re.compile(r"hydra\.(?:run|output_subdir|job_logging|hydra_logging|verbose|job)\b.*|hydra/\w+")


def options_of_script(text: str, path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read the options of the training commands by name. ValueError if there are none."""
    script = read_script(text, str(path), environment)
    found: list[tuple[int, dict[str, Any]]] = []
    left_out: dict[str, Any] = {}
    loose = [c for c in script.commands if all(_OVERRIDE.fullmatch(word.text) for word in c.words)]
    if loose and len(loose) == len(script.commands):  # a file of overrides
        words = tuple(word for command in loose for word in command.words)
        found.append((loose[0].line, _Training(Command(loose[0].line, words), -1, script, path).options()))
    for command in script.commands if not found else ():
        start = find_program(command.words)
        program = command.words[start].text
        if not _trains(command.words, start):
            continue
        if start >= 0 and _OTHERS.search(program):
            left_out[program] = LeftOut(f"line {command.line} runs it, and trains on no rollouts")
        else:
            found.append((command.line, _Training(command, start, script, path).options()))
    if not any(options for _, options in found):
        raise ValueError("no overrides (name.of.option=value) are in it")
    return interpolate(merge_commands(found) | left_out, environment)


def _trains(words: Sequence[Text], start: int) -> bool:
    """Return whether a command trains with verl: by its module, or by overrides of verl's tables."""
    if start >= 0 and words[start].text.startswith("verl.") and _MAIN.search(words[start].text):
        return True
    if start >= 0 and re.search(r"(?:^|[./])main_\w+(?:\.py)?$", words[start].text):
        return True
    return any((m := _OVERRIDE.fullmatch(word.text)) and m[2].split(".")[0] in ROOTS for word in words)


class _Training:
    """One training command. start: the index of its program."""

    def __init__(self, command: Command, start: int, script: Script, path: Path) -> None:
        self._command, self._script, self._line = command, script, command.line
        self._program = command.words[start].text if start >= 0 else ""
        words = command.words
        if start < 0:  # a program of another name: its options begin with the first override
            start = next((i for i, word in enumerate(words) if _OVERRIDE.fullmatch(word.text)), len(words)) - 1
        self._words = list(words[start + 1 :])
        self._directories = directories(command, str(path))
        if self._program.endswith(".py"):
            self._directories.append(Path(command.directory) / Path(self._program).parent)
        self._flags: dict[str, Text] = {}

    def options(self) -> dict[str, Any]:
        """Return the overrides, over the options of the YAML of `--config-name`."""
        options: dict[str, Any] = {}
        lost: dict[str, Any] = {}
        while self._words:
            word = self._words.pop(0)
            match = _OVERRIDE.fullmatch(word.text)
            if self._is_flag(word):
                continue
            if match is None or "=" not in (word.text if word.in_doubt else word.head) or match[1] == "~":
                lost |= not_an_option(word, self._line)
            elif _HYDRA_OUTPUT.fullmatch(match[2]):
                lost[match[2]] = LeftOut("where Hydra writes its own files")
            else:
                start = match.start(3)
                value = read_value(word, self._line, lambda text, start=start: parse_value(text[start:]))
                if isinstance(value, Unknown) and word.in_doubt:
                    value = unknown_value(Text(word.pieces).with_text(match[3]), self._line)
                _set(options, match[2], value)
        return with_program(self._config() | options | lost, self._program)

    def _is_flag(self, word: Text) -> bool:
        """Keep one of Hydra's flags for the YAML. Return whether it is one."""
        flag, equals, value = word.text.partition("=")
        names = next((names for names in (_NAME, _PLACE, _FOLDER) if flag in names), None)
        if names is None or not (equals or self._words):
            return False
        given = word.with_text(value) if word.known or word.in_doubt else Text(word.pieces[1:])
        self._flags[names[0]] = given if equals else self._words.pop(0)
        return True

    def _config(self) -> dict[str, Any]:
        flag = next(iter(self._flags), "")
        missing = {name: unknown_value(value, self._line) for name, value in self._flags.items() if not value.known}
        if not flag or missing:
            return missing
        name = self._flags[_NAME[0]].text if _NAME[0] in self._flags else ""
        folders = [self._flags[one[0]].text for one in (_PLACE, _FOLDER) if one[0] in self._flags]
        if not name and not folders:
            return {}
        shown = f"line {self._line}: the YAML {name or 'of the program'}"
        where = [folder / inner for inner in folders or [""] for folder in self._directories]
        if not name:
            return {flag: Unknown(f"{shown} is not known: add --config-name, or name the YAML to `rollover convert`")}
        try:
            found = options_of_config(name, where, lambda paths: find_text(self._script, paths))
        except ValueError as error:
            return {flag: Unknown(f"{shown} cannot be read: {error}")}
        if found is not None:
            return found
        if is_of_verl(name) and all(folder.strip("./") in ("", "config") for folder in folders):
            return {}
        places = ", ".join(dict.fromkeys(str(folder) for folder in where))
        return {flag: Unknown(f"{shown} is not there (looked in {places}), and most of the run is in it: put it there")}


def _set(options: dict[str, Any], name: str, value: Any) -> None:
    """Set an option, or each option of a table. chat_template_kwargs stays one value."""
    table, dot, part = name.partition("chat_template_kwargs.")
    if dot:
        whole = f"{table}chat_template_kwargs"
        before = options.get(whole)
        if isinstance(value, Unknown):
            options[whole] = value
        elif not isinstance(before, Unknown):
            options[whole] = {**(before if isinstance(before, dict) else {}), part: value}
    elif isinstance(value, dict) and value:
        options |= flatten(value, f"{name}.") if not name.endswith("chat_template_kwargs") else {name: value}
    else:
        options[name] = value


# YAML


# Configurations of verl itself, and in its groups: their values are the defaults of rows.py.
_VERL = re.compile(
    r"(?:_generated_)?(?:ppo|dapo|entropy|fully_async_ppo|one_step_off_ppo)(?:_megatron|_torchtitan|_veomni)?_trainer"
    r"|legacy_reward_impl"
)
_BACKENDS = r"(?:dp|fsdp|megatron|torchtitan|veomni|automodel)"
_VERL_IN_GROUPS = re.compile(
    rf"(?:{_BACKENDS}_)?(?:actor|critic|ref|reward_model|reward_loop)|{_BACKENDS}|rollout|rollout_correction|hf_model"
    r"|legacy_data|distillation|npu_profile|profiler|reward|reward_manager|transfer_queue|algorithm"
)
_PACKAGE = re.compile(r"\A(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)")
_MOST_FILES = 20

Find = Callable[[Sequence[Path]], str | None]


def is_of_verl(name: str) -> bool:
    """Return whether a configuration of this name is part of verl."""
    return bool(_VERL.fullmatch(name.removesuffix(".yaml")))


def options_of_yaml(tables: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read the options of a YAML by dotted names. The YAMLs of its defaults list are beside `path`."""
    script = Script()
    composed = _compose(tables, [path.parent], lambda places: find_text(script, places), [0])
    return with_program(interpolate(composed))


def options_of_config(name: str, directories: Sequence[Path], find: Find) -> dict[str, Any] | None:
    """Read the options of a YAML by its name; None if it is in no directory. ValueError if it is unreadable."""
    return _options_of_file(name, directories, find, [0])


def _options_of_file(
    name: str, directories: Sequence[Path], find: Find, num: list[int], group: str = "", package: str = ""
) -> dict[str, Any] | None:
    """Read the options of a YAML of a group (a folder), by their names in its package; None if it is missing."""
    num[0] += 1
    if num[0] > _MOST_FILES:
        raise ValueError(f"it names more than {_MOST_FILES} others")
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    text = find([directory / group / file for directory in directories])
    if text is None:
        return None
    said = _PACKAGE.match(text)
    package = {"_global_": "", "_group_": group.replace("/", ".")}.get(said[1], said[1]) if said else package
    found = _compose(tables_of(text), directories, find, num, group)
    return {f"{package}.{option}" if package else option: value for option, value in found.items()}


def _compose(
    tables: Mapping[str, Any], directories: Sequence[Path], find: Find, num: list[int], group: str = ""
) -> dict[str, Any]:
    own = flatten({name: value for name, value in tables.items() if name not in ("defaults", "hydra")})
    entries = tables.get("defaults") or []
    entries = entries if isinstance(entries, list) else [entries]
    options: dict[str, Any] = {}
    for item in [*entries, *([] if "_self_" in entries else ["_self_"])]:
        if item == "_self_":
            options |= own
        elif isinstance(item, str):
            folder, _, name = item.rpartition("/")
            options |= _options_of_entry(_group_of_entry(group, folder, item), name, "", directories, find, num)
        elif isinstance(item, dict):
            for folder, names in item.items():
                folder, _, package = re.sub(r"^(?:override|optional)\s+", "", str(folder)).partition("@")
                package = "" if package == "_global_" else package or folder.strip("/").replace("/", ".")
                for name in names if isinstance(names, list) else [names]:
                    options |= _options_of_entry(
                        _group_of_entry(group, folder, folder), name, package, directories, find, num
                    )
    return options


def _group_of_entry(group: str, folder: str, said: str) -> str:
    """Return the group of an entry of a defaults list in a YAML of `group`."""
    return os.path.normpath(folder.strip("/") if said.startswith("/") else f"{group}/{folder}").strip("./")


def _options_of_entry(
    group: str, name: Any, package: str, directories: Sequence[Path], find: Find, num: list[int]
) -> dict[str, Any]:
    """Read the options of one YAML of a defaults list."""
    if name is None or group.split("/")[0] == "hydra":
        return {}
    found = _options_of_file(str(name), directories, find, num, group, package)
    if found is not None:
        return found
    own = _VERL_IN_GROUPS if group else _VERL
    if own.fullmatch(str(name).removesuffix(".yaml")):
        return {}
    place = f"{group}/{name}" if group else str(name)
    return {f"defaults.{place}": Unknown(f"{place.removesuffix('.yaml')}.yaml is not there: put it beside its YAML")}
