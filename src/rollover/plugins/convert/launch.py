"""Training commands of a launch script: the program, its flags, and the merged options of several commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.plugins.convert.bash.programs import Command, Script
from rollover.plugins.convert.bash.text import Text
from rollover.plugins.convert.files import text_of
from rollover.plugins.convert.hydra import parse_value
from rollover.plugins.convert.mapping import LeftOut, Unknown

_LAUNCHERS = re.compile(r"torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed(?:\.launcher.*)?")
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.S)
# Names that usually hold several options: not the value of the flag before them.
_SEVERAL = re.compile(r"\$\{?\w*(?:ARG|OPT|FLAG|EXTRA|PARAM|CONF)", re.I)


def find_program(words: Sequence[Text]) -> int:
    """Return the index of the training program: a .py file, the module behind `-m`, or the verb of `trl`; else -1."""
    for i, word in enumerate(words):
        text, before = word.text, words[i - 1].text if i else ""
        if before == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", text) and not _LAUNCHERS.fullmatch(text):
            return i
        if before == "trl" and re.fullmatch(r"\w+", text):
            return i
        if text.endswith(".py") and not text.startswith("-"):
            while i + 1 < len(words) and words[i + 1].text.endswith(".py"):
                i += 1
            return i
    return -1


def unknown_value(text: Text, line: int) -> Unknown:
    """Return the reason of a text without a value."""
    return Unknown(f"line {line}: {f'{text.text} is ' if text.in_doubt else ''}{text.why}")


def read_value(text: Text, line: int, read: Callable[[str], Any] = parse_value) -> Any:
    """Return the value of a text, or why it has none."""
    try:
        return read(text.text) if text.known else unknown_value(text, line)
    except ValueError as error:
        return Unknown(f"line {line}: {error}")


def parse_argument(text: str) -> Any:
    """Return the value of a flag. argparse reads `none` as a text, unlike Hydra."""
    value = parse_value(text)
    return text if value is None else value


def not_an_option(word: Text, line: int) -> dict[str, Any]:
    """Return a word of a training command that is no option, as an unknown option."""
    reason = word.why or "a word of the training command that is no option"
    return {word.text[:80]: Unknown(f"line {line}: {reason}")}


def read_flags(words: Sequence[Text], line: int) -> dict[str, Any]:
    """Return the values of `--name value ...`: True for a flag alone, a list for several values, or Unknown."""
    values: dict[str, list[Any]] = {}
    lost: dict[str, Any] = {}
    held: list[Any] | None = None
    for word in words:
        match = _FLAG.fullmatch(word.text)
        if match and (word.known or word.in_doubt or word.head.startswith(f"--{match[1]}")):
            held = values[match[1]] = []
            if match[2] is not None:
                start = len(match[1]) + 3
                held.append(read_value(word, line, lambda text, start=start: parse_argument(text[start:])))
                held = None
            elif not word.known:
                held.append(unknown_value(word, line))
            continue
        several = not word.known and not word.head and _SEVERAL.match(word.text)
        is_short = re.fullmatch(r"-[A-Za-z]\w*", word.text) is not None
        if held is None or several or is_short:
            lost |= not_an_option(word, line)
        else:
            held.append(read_value(word, line, parse_argument))
    return {name: _flag_value(held) for name, held in values.items()} | lost


def _flag_value(held: list[Any]) -> Any:
    missing = [item for item in held if isinstance(item, Unknown)]
    return missing[0] if missing else True if not held else held[0] if len(held) == 1 else held


def merge_commands(found: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge the options of all training commands; Unknown where they differ. found: (line, options) of each."""
    options: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, each in found for name in each):
        values = [each.get(name, _ABSENT) for _, each in found]
        options[name] = values[0]
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            shown = [f"line {line}: {_describe(value)}" for (line, _), value in zip(found, values, strict=True)]
            options[name] = Unknown(f"{len(found)} commands train, and differ in it ({'; '.join(shown[:4])})")
    return options


_ABSENT = object()


def _describe(value: Any) -> str:
    return "not given" if value is _ABSENT else value.reason if isinstance(value, Unknown | LeftOut) else str(value)


def find_text(script: Script, places: Iterable[Path]) -> str | None:
    """Return the text of the first file that the script writes or that exists. ValueError if it cannot be read."""
    for place in places:
        if (written := script.files.get(os.path.normpath(place))) is not None:
            if not written.known:
                raise ValueError(f"{place} is written by the script: {written.why}")
            return written.text
        if os.path.exists(place):  # Path.exists raises for a name that is too long
            return text_of(place)
    return None


def candidate_paths(name: str, directories: Iterable[str | Path]) -> list[Path]:
    """Return the possible paths of a file that a command names."""
    return list(dict.fromkeys(Path(directory) / name for directory in directories))


def directories(command: Command, path: str) -> list[Path]:
    """Return the folders in which a command may find its files."""
    return [Path(command.directory), Path(path).parent, Path()]
