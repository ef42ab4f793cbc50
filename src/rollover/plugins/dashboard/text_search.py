"""Which recorded rollouts have a text in their prompt, their answer or their names: by reading them, and nothing kept.

A text is looked for in either case. Of a line of JSONL only what stands before its tokens is read; where the text is of
ASCII it is decoded only where the bytes are somewhere in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.files import line_of, open_regular
from rollover.plugins.dashboard.rollout_index import RolloutIndex, short_line
from rollover.text import encodable
from rollover.track.rollout_table import read_columns

_OWN, _OF_GROUP = ("rollout_id", "task_id", "completion"), ("prompt", "messages")


class TextSearch:
    """For `text` in what `index` has. Keeps of the groups that it met whether their prompt has it."""

    def __init__(self, index: RolloutIndex, text: str) -> None:
        self.index = index
        self._wanted = _folded(text)
        self._as_json = (
            json.dumps(text, ensure_ascii=False)[1:-1].lower().encode() if text.isascii() else b""
        )  # of bytes only ASCII is folded
        self._prompts: dict[tuple[Path, int], bool] = {}

    def has(self, entries: np.ndarray) -> np.ndarray:
        """[entry] bool, of entries of the index. ValueError where a file is gone since."""
        found = np.zeros(len(entries), bool)
        for file in np.unique(entries["file"]):
            of_file = np.flatnonzero(entries["file"] == file)
            path = self.index.path(entries[int(of_file[0])])
            try:
                look = self._rows if path.suffix == ".parquet" else self._lines
                found[of_file] = look(path, entries[of_file])
            except (OSError, ValueError, IndexError) as error:
                raise ValueError(f"{path}: it cannot be searched any more ({error}): look again") from error
        return found

    def _lines(self, path: Path, entries: np.ndarray) -> list[bool]:
        with open_regular(path) as file:

            def at(place: int) -> bytes:
                file.seek(place)
                return line_of(file, path)

            return [
                self._in_line(at(int(entry["place"])), _OWN) or self._of_group(path, int(entry["head"]), at)
                for entry in entries
            ]

    def _of_group(self, path: Path, head: int, at: Any) -> bool:
        if (path, head) not in self._prompts:
            self._prompts[path, head] = self._in_line(at(head), _OF_GROUP)
        return self._prompts[path, head]

    def _in_line(self, line: bytes, keys: Sequence[str]) -> bool:
        return self._as_json in line.lower() and self._in_record(short_line(line), keys)

    def _rows(self, path: Path, entries: np.ndarray) -> list[bool]:
        columns = read_columns(path, (*_OWN, *_OF_GROUP))

        def record(row: int) -> dict[str, Any]:
            of = {key: values[row] for key, values in columns.items()}
            return of | {"messages": of["messages"] and json.loads(of["messages"])}

        return [self._in_record(record(int(entry["place"])), (*_OWN, *_OF_GROUP)) for entry in entries]

    def _in_record(self, record: Mapping[str, Any], keys: Sequence[str]) -> bool:
        return any(self._wanted in _folded(text) for key in keys for text in _texts(record[key]))


def _texts(value: Any) -> Iterator[str]:
    """Of a value of a record: a text, chat messages, or nothing."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for message in value:
            said = [part for key, part in message.items() if key != "role"]
            yield from (part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in said)


def _folded(text: str) -> str:
    return encodable(text).lower()
