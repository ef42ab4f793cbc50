"""Reads LightRFT's flags out of a launch script: those behind the last .py file that a command names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.launch import entry, flags, together

_SIGNS = re.compile(r"lightrft|train_colocate\.py", re.I)
# Flags whose absence says something: argparse's store_true.
_ABSENT = {"text_only": False, "reward_pretrain": ""}


def is_lightrft(text: str) -> bool:
    """Whether a script starts LightRFT: OpenRLHF, of which it is made, has many of its flags."""
    return bool(_SIGNS.search(text)) and "--pretrain" in text


def options_of_flags(text: str, path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The flags by name, with their values (True of one alone, a list of several, `Unread` of what has no value).
    ValueError where there are none."""
    found: list[tuple[int, dict[str, Any]]] = []
    for command in read_script(text, str(path), environment).commands:
        start = entry(command.words)
        if start >= 0 and (options := flags(command.words[start + 1 :], command.line)) and "pretrain" in options:
            found.append((command.line, options))
    if not found:
        raise ValueError("no flags (--pretrain MODEL ...) behind a .py file are in it")
    return _ABSENT | together(found)
