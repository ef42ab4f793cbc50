"""Tasks from a dataset file: JSONL, Parquet or CSV, read by the `datasets` library; local paths and fsspec URLs.

Owns the reading of TRL's layout (`prompt` + columns), verl's (`prompt`, `data_source`, `reward_model`, `extra_info`)
and plain question/answer files. Never shuffles or splits (stream.py does) and never adds a system prompt.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from rollover.files import did_you_mean_path
from rollover.types import Task

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
_BUILDERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}


class DatasetSource:
    """The rows of one file as problems, in file order; rows are read from an on-disk Arrow table, not held in memory.

    `answer_column` empty: reward_model.ground_truth, answer, solution or ground_truth, if there is one;
    `needs_answer` makes a missing one an error. Raises ValueError naming file, column and config key.
    """

    def __init__(
        self,
        path: str,
        *,
        base_dir: str | os.PathLike[str],
        label: str,
        reward: str,
        prompt_column: str = "",
        answer_column: str = "",
        needs_answer: bool = False,
        problem_key: str = "",
        chat: bool = True,
        key: str = "path",
        task_prefix: str = "",
    ) -> None:
        self.path, self.label, self.reward, self.chat = path, label, reward, chat
        self.task_prefix = task_prefix or label
        self._rows = _load(path, base_dir, key)
        columns: list[str] = self._rows.column_names
        self.answer_column = answer_column
        self.prompt_column = prompt_column or next((c for c in PROMPT_COLUMNS if c in columns), "")
        found = f"its columns are {', '.join(columns)}"
        if self.prompt_column not in columns:
            wanted = repr(prompt_column) if prompt_column else "named " + ", ".join(PROMPT_COLUMNS)
            raise ValueError(
                f"dataset {path!r} has no prompt column {wanted}; {found}: set tasks.sources.prompt_column"
            )
        if answer_column and answer_column not in columns:
            raise ValueError(
                f"dataset {path!r} has no answer column {answer_column!r}; {found}: set tasks.sources.answer_column"
            )
        if problem_key and ":" not in problem_key and problem_key not in columns:
            raise ValueError(
                f"dataset {path!r} has no column {problem_key!r}; {found}: correct tasks.sources.problem_key"
            )
        has_answer = answer_column or "reward_model" in columns or any(c in columns for c in ANSWER_COLUMNS)
        if needs_answer and not has_answer:
            raise ValueError(
                f"dataset {path!r} has no answer column (reward_model, {', '.join(ANSWER_COLUMNS)}), which the reward"
                f" {reward!r} needs; {found}: set tasks.sources.answer_column"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Task:
        """Row `index` as a problem: chat messages as they are; a plain prompt as `prompt`."""
        row = dict(self._rows[index])
        prompt = row.pop(self.prompt_column)
        where = f"dataset {self.path!r}, {_place(self.path, index)}"
        columns = {name: _jsonable(value, where, name) for name, value in row.items()}
        if self.answer_column:
            columns["answer"] = _jsonable(
                prompt if self.answer_column == self.prompt_column else row[self.answer_column], where, "answer"
            )
            if isinstance(columns.get("reward_model"), dict):
                columns["reward_model"]["ground_truth"] = columns["answer"]
        task_id = f"{self.task_prefix}/{index}"
        if isinstance(prompt, str) and prompt.strip():
            return Task(task_id, self.label, self.reward, prompt=prompt, columns=columns)
        if not self.chat and not isinstance(prompt, str):
            raise ValueError(f"{where}: column {self.prompt_column!r} holds chat messages; set tasks.chat = true")
        return Task(task_id, self.label, self.reward, messages=self._messages(prompt, where), columns=columns)

    def fingerprint(self) -> str:
        """Of the number of rows and the prompts of up to 1,000 of them, evenly spaced: another file, another order."""
        num = len(self)
        digest = hashlib.blake2b(digest_size=8)
        for index in range(0, num, max(1, num // 1000)):
            digest.update(json.dumps(self._rows[index][self.prompt_column], default=str).encode())
        return f"{num} rows, {digest.hexdigest()}"

    def problems(self) -> Iterator[Task]:
        return (self.problem(index) for index in range(len(self)))

    def _messages(self, prompt: Any, where: str) -> tuple[dict[str, str], ...]:
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(
                f"{where}: column {self.prompt_column!r} holds {prompt!r}; expected a text that is not empty or a list"
                " of chat messages (set tasks.sources.prompt_column if another column has it)"
            )
        for message in prompt:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ValueError(
                    f"{where}: {message!r} in {self.prompt_column!r} is not a message with role and content"
                )
        return tuple({"role": m["role"], "content": m["content"]} for m in prompt)


def _place(path: str, index: int) -> str:
    """Where an editor shows row `index`: JSON lines have their number, the rows of other files are counted from 1."""
    lines = PurePosixPath(path.removesuffix(".gz")).suffix.lower() in (".jsonl", ".ndjson")
    return f"{'line' if lines else 'row'} {index + 1}"


def _load(path: str, base_dir: str | os.PathLike[str], key: str) -> Any:
    """The file as a `datasets.Dataset`, through that library's own cache."""
    try:
        import datasets
        from datasets.exceptions import DatasetGenerationError
    except ModuleNotFoundError as error:
        raise ValueError("tasks.sources.kind = 'dataset' needs the package datasets: pip install datasets") from error
    import fsspec

    located = path if "://" in path else os.path.join(base_dir, os.path.expanduser(path))
    suffix = PurePosixPath(located.removesuffix(".gz")).suffix.lower()
    if suffix not in _BUILDERS:
        raise ValueError(f"tasks.sources.{key} = {path!r}: expected a file ending in {', '.join(_BUILDERS)}")
    try:
        filesystem, inside = fsspec.core.url_to_fs(located)
    except (ValueError, ImportError) as error:  # unknown protocol, or its package is not installed
        raise ValueError(f"tasks.sources.{key} = {path!r} cannot be opened: {error}") from error
    if not filesystem.isfile(inside):
        near = "" if "://" in path else did_you_mean_path(located, _BUILDERS)
        raise ValueError(f"tasks.sources.{key} = {path!r}: there is no such file{near}")
    if filesystem.size(inside) == 0:
        raise ValueError(f"tasks.sources.{key}: {located!r} is empty")
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(_BUILDERS[suffix], data_files=located, split="train")
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise ValueError(f"tasks.sources.{key}: {located!r} cannot be read as {_BUILDERS[suffix]}: {cause}") from error
    except ValueError as error:  # what the library makes of a file with columns only
        raise ValueError(f"tasks.sources.{key}: {located!r} has no rows, or none that can be read: {error}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    return rows


def _jsonable(value: Any, where: str, column: str) -> Any:
    """A JSON value: rewards run in another process, and tasks are kept in checkpoints."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(k): _jsonable(v, where, column) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v, where, column) for v in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    raise ValueError(f"{where}: column {column!r} holds a {type(value).__name__}, which no reward can take: remove it")
