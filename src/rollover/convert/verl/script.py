"""Reads the options out of a verl launch script (bash with Hydra overrides), of a file of overrides, or of a YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from rollover.convert.bash import InDoubt, Script, value_of
from rollover.convert.mapping import Unread

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:[./@][\w.\-]+)*)=(.*)", re.S)


def options_of_script(text: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The overrides by name, with their values, `Unread` where a condition decides. ValueError where there are none,
    and for what cannot be expanded."""
    script = Script(text, environment)
    options: dict[str, Any] = {}
    for number, words in script.commands():
        for word in words:
            match = _OVERRIDE.fullmatch(word)
            if match and not word.startswith("-") and ("." in match[1] or match[1] in ("model_engine",)):
                try:
                    options[match[1]] = value_of(script.expand(match[2]))
                except InDoubt as error:
                    options[match[1]] = Unread(f"line {number}: {error}")
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error
    if not options:
        raise ValueError("no overrides (name.of.option=value) are in it")
    return options


def flat(tables: Mapping[str, Any], prefix: str = "", whole: str = "chat_template_kwargs") -> dict[str, Any]:
    """Values of a YAML by dotted names. whole: how the names of tables end that are values."""
    out: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping) and value and not str(name).endswith(whole)
        out |= flat(value, f"{prefix}{name}.", whole) if inner else {f"{prefix}{name}": value}
    return {name: value for name, value in out.items() if not name.endswith("_target_") and name != "defaults"}
