"""Reads one TOML file, and says in words what is wrong with one that is not TOML, or not a file at all."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from rollover.config.recipes import hint, near
from rollover.config.schema import names
from rollover.config.suggest import ALL_KEYS, near_keys
from rollover.config.table import ConfigError
from rollover.files import near_paths

# What tomllib says -> what it means and what to do. {key}, {value}: of the line it was found in; {name}: of the table.
_MEANINGS = (
    (r"Cannot declare \((.*)\) twice", "the table [{name}] is there twice. Write all its keys under one [{name}]"),
    (r"Cannot overwrite a value", "{key} is there twice. Keep one of them"),
    (r"Duplicate inline table key", "{key} has the same name twice in its braces. Keep one of them"),
    (r"Expected '=' after a key", "a line that sets something is: key = value"),
    (r"Expected '\]", "a bracket is not closed. A table begins with [name], one of several with [[name]]"),
    (r"Unclosed array", "the list is not closed. Add ] at its end"),
    (
        r"Unclosed inline table|Invalid initial character",
        "a table in braces stands on one line: {key} = {{ a = 1, b = 2 }}",
    ),
    (r"Illegal character '\\n'|Expected \"'\"", "a string is not closed. It ends with the quote that it begins with"),
    (r"Invalid hex value|Unescaped '\\\\'", "a backslash in double quotes needs another one. Use single quotes"),
    (r"Invalid statement", "a line is [table], key = value, or a # comment"),
    (r"Expected newline", "something is left over after the value of {key}. A comment begins with #"),
)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the file's tables. ConfigError for one that is not there, is no text or no TOML."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give a TOML file in it{_tomls(path)}")
    if not path.is_file() and "=" in path.name:  # hydra's form of an override
        key, _, value = str(path).partition("=")
        keys = near_keys(key.lstrip("+~"), names())
        raise ConfigError(f"{path}: no such file{f'. Did you mean --{keys[0]} {value}?' if keys else f'. {ALL_KEYS}'}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file{_meant(path)}")
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        raise ConfigError(
            f"{path} is no TOML file. `rollover config FILE.toml > mine.toml` writes every value as TOML that loads"
            " again"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: TOML files are ({error.reason} at byte {error.start})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", str(error))
        lines = text.rstrip().splitlines() or [""]
        number = int(place[1]) if place and place[1] else len(lines)
        problem = str(error)[: place.start()] if place else str(error)
        meaning = _meaning(problem, lines[number - 1], text)
        raise ConfigError(f"{path}, line {number}: not valid TOML: {meaning}") from error
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits; 5,000 lists in each other
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error


def _meant(path: Path) -> str:
    """Return the end of the error of a missing file: a similar name, a recipe, or the folder's files."""
    files = [name for name in near_paths(path, (".toml",)) if Path(name).is_file()]
    if files:
        return f". Did you mean {' or '.join(files)}?"
    if str(path) == path.stem:  # a word, as recipes are
        return f", and no recipe{hint(path.stem)}"
    return f". Did you mean the recipe {near(path.stem)}?" if near(path.stem) else _tomls(path.parent)


def _tomls(folder: Path) -> str:
    found = sorted(folder.glob("*.toml"))[:5]
    return f". Did you mean {' or '.join(map(str, found))}?" if found else ". Check the path"


def _meaning(problem: str, line: str, text: str) -> str:
    key, _, value = (part.strip() for part in line.partition("="))
    header = re.fullmatch(r"\[+([^\[\]]*)\]+", key)
    key = f"[{header[1]}]" if header else key
    if problem == "Invalid value":
        return _wrong_value(key, value.partition("#")[0].strip())
    if header and re.search(rf"^\s*\[\[{re.escape(header[1])}\]\]", text, re.M):
        return f"{key} and [{key}] are both there. Use one of the two forms"
    for pattern, meaning in _MEANINGS:
        if match := re.search(pattern, problem):
            name = ".".join(re.findall(r"'([^']*)'", match[1])) if match.groups() else ""
            return meaning.format(key=key, name=name)
    return f"{problem} ({line.strip()})"


def _wrong_value(key: str, value: str) -> str:
    if value.lower() in ("true", "false"):
        return f"true and false have small letters. Write {key} = {value.lower()}"
    if value.startswith("["):
        return "the list is not closed. Add ] at its end"
    if not value or value.lower() in ("none", "null", "nil"):
        return f"{key} has no value. Give it one, or remove the line"
    if re.fullmatch(r"[+-]?\.\d+\S*", value):
        return f"a number begins with a digit. Write {key} = {value.replace('.', '0.', 1)}"
    return f'{key} = {value} has no quotes, which strings need. Write {key} = "{value}"'
