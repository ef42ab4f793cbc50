"""Reads LightRFT's flags out of a launch script: those behind the last .py file that a command names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from rollover.convert.bash import Script, value_of

_SIGNS = re.compile(r"lightrft|train_colocate\.py", re.I)
_FLAG = re.compile(r"--([A-Za-z]\w*)(?:=(.*))?", re.S)
_END = re.compile(r"\d?[<>].*|[|&;].*")
# Flags whose absence says something: argparse's store_true.
_ABSENT = {"text_only": False, "reward_pretrain": ""}


def is_lightrft(text: str) -> bool:
    """Whether a script starts LightRFT: OpenRLHF, of which it is made, has many of its flags."""
    return bool(_SIGNS.search(text)) and "--pretrain" in text


def options_of_flags(text: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The flags by name, with their values (True of one alone, a list of several). ValueError where there are none, or
    for what cannot be expanded."""
    script = Script(text, environment)
    options: dict[str, Any] = {}
    for number, words in script.commands():
        start = max((i for i, word in enumerate(words) if word.endswith(".py")), default=None)
        if start is None:
            continue
        try:
            options |= _flags([script.expand(word) for word in _until_end(words[start + 1 :])])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    if not options:
        raise ValueError("no flags (--name value) behind a .py file are in it")
    return _ABSENT | options


def _until_end(words: list[str]) -> list[str]:
    """The words of a command before its output goes elsewhere, or another command begins."""
    end = next((i for i, word in enumerate(words) if _END.fullmatch(word)), len(words))
    return words[:end]


def _flags(words: list[str]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in words:
        if flag := _FLAG.fullmatch(word):
            values = found[flag[1]] = [] if flag[2] is None else [value_of(flag[2])]
        elif found:
            values.append(value_of(word))
    return {name: True if not held else held[0] if len(held) == 1 else held for name, held in found.items()}
