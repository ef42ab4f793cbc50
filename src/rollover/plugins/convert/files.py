"""Reads files to convert: bounded texts of regular files, and YAML with numbers as OmegaConf reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.files import open_regular
from rollover.tasks.text_rows import CSV_SUFFIXES, JSON_SUFFIXES, suffix_of

MOST_BYTES = 1 << 20  # a launch script has some kilobytes
_MOST_VALUES = 100_000  # of a YAML, whose aliases can multiply them
# 1e-6 is a text in YAML 1.1, and a number in OmegaConf, pydantic and argparse.
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?$
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)$
    |[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$
    |[-+]?\.(?:inf|Inf|INF)$
    |\.(?:nan|NaN|NAN)$""",
    re.X,
)


def text_of(path: Path) -> str:
    """Read a file. ValueError if it is unreadable, endless (a pipe, a device) or too large."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: it is not a regular file. Write its content to one") from error
    try:
        with file:
            data = file.read(MOST_BYTES + 1)
        if data is None:  # /proc/kmsg claims to be a regular file
            raise ValueError(f"{path} cannot be read: it has no end. Write its content to a regular file")
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} is no configuration: it has more than {MOST_BYTES:,} bytes")
    return text


def tables_of(text: str) -> dict[str, Any]:
    """Parse a YAML mapping. ValueError for other text and too many values."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads numbers as OmegaConf does."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        tables = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tables, dict):
        raise ValueError("no tables are in it")
    _check_size(tables)
    return tables


def flatten(tables: Mapping[str, Any], prefix: str = "", whole: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return values of a YAML by dotted names. whole: suffix of the names of tables that stay whole."""
    out: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping) and value and not str(name).endswith(whole)
        out |= flatten(value, f"{prefix}{name}.", whole) if inner else {f"{prefix}{name}": value}
    return {name: value for name, value in out.items() if not name.endswith("_target_") and value != "???"}


def _check_size(tables: dict[str, Any]) -> None:
    """Raise ValueError for too many values. Aliases count each time, so that recursive ones exceed the limit."""
    left: list[Any] = [tables]
    num = 0
    while left:
        value = left.pop()
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        left += inner
        num += len(inner)
        if num > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values: do its aliases (*) multiply them?")


def is_file_of_rows(path: str) -> bool:
    """Return whether `path` names a single data file, which has no subsets and no splits."""
    return suffix_of(path) in (*JSON_SUFFIXES, *CSV_SUFFIXES, ".parquet")
