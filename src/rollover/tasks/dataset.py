"""Tasks from the rows of a dataset, in file order.

Reads TRL's layout (`prompt` + columns), verl's (`prompt`, `data_source`, `reward_model`, `extra_info`) and plain
question/answer rows. rows.py opens the files; stream.py shuffles, splits, and adds the system prompt.
"""

from __future__ import annotations

import datetime
import decimal
import re
from functools import partial
from typing import Any

from rollover.images import BadImage, Places, stored
from rollover.rewards.built_in import needs_answer
from rollover.tasks.image_parts import IMAGE_COLUMNS, PLACEHOLDER, images_of, shows_images, with_images
from rollover.tasks.rows import TableLocation, open_rows, row_name
from rollover.tasks.source import SourceSetup
from rollover.tasks.split import problem_text
from rollover.types import Task, images_in

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
_SEEN_OR_HEARD = ("video", "videos", "audio", "audios")
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")


def dataset_source(setup: SourceSetup) -> DatasetSource:
    """Build the source of one side: the held-out rows that the configuration names, else those of `path`."""
    config = setup.config
    named_rows = setup.held_out and config.names_held_out
    other_path = named_rows and bool(config.eval_path)
    place = TableLocation(
        config.eval_path if other_path else config.path,
        "" if other_path else config.subset,
        (config.eval_split or "train") if named_rows and not config.all_held_out else config.split,
        config.streaming,
        "eval_path" if other_path else "path",
        setup.base_dir,
    )
    return DatasetSource(setup, place, f"{setup.label}/eval" if named_rows else setup.label)


class DatasetSource:
    """The rows of one dataset as problems, in file order.

    Columns are those that `setup.config` names; by default the answer is reward_model.ground_truth, answer, solution or
    ground_truth, and images are in images or image. ValueError, with file, column and config key, for a missing column,
    and for a missing answer that the built-in reward needs.
    """

    endless = False

    def __init__(self, setup: SourceSetup, place: TableLocation, task_prefix: str = "") -> None:
        config = setup.config
        self.label, self.reward, self.chat = setup.label, setup.reward, setup.chat
        self.same = problem_text
        self.task_prefix = task_prefix or setup.label
        self._place, self._rows = place, open_rows(place)
        path, columns = place.path, self._rows.columns
        self.answer_column, self.data_source_column = config.answer_column, config.data_source_column
        self.prompt_column = config.prompt_column or next((c for c in PROMPT_COLUMNS if c in columns), "")
        found = f"its columns are {', '.join(columns)}"
        if self.prompt_column not in columns:
            wanted = repr(config.prompt_column) if config.prompt_column else "named " + ", ".join(PROMPT_COLUMNS)
            raise ValueError(
                f"dataset {path!r} has no prompt column {wanted}; {found}: set tasks.sources.prompt_column"
            )
        self.image_column = config.image_column or next((c for c in IMAGE_COLUMNS if c in columns), "")
        self._places = Places(place.folder, setup.image_urls)
        for what in ("answer", "data_source", "image"):
            column = getattr(config, f"{what}_column")
            if column and column not in columns:
                raise ValueError(
                    f"dataset {path!r} has no {what} column {column!r}; {found}: set tasks.sources.{what}_column"
                )
        problem_key = config.problem_key
        if problem_key and ":" not in problem_key and problem_key not in columns:
            raise ValueError(
                f"dataset {path!r} has no column {problem_key!r}; {found}: correct tasks.sources.problem_key"
            )
        has_answer = config.answer_column or "reward_model" in columns or any(c in columns for c in ANSWER_COLUMNS)
        if needs_answer(setup.reward) and not has_answer:
            raise ValueError(
                f"dataset {path!r} has no answer column (reward_model, {', '.join(ANSWER_COLUMNS)}), which the reward"
                f" {setup.reward!r} needs; {found}: set tasks.sources.answer_column"
            )

    @property
    def num_problems(self) -> int | None:
        """The number of rows; None for streamed rows."""
        return self._rows.num_rows

    def together(self, index: int) -> range:
        """Return the rows that are shuffled together with row `index`; a range without `index` beyond the last row."""
        return self._rows.together(index)

    def problem(self, index: int) -> Task:
        """Return row `index` as a problem, with `messages` or a plain `prompt`."""
        row = self._rows[index]
        prompt = row.pop(self.prompt_column)
        where = row_name(self._place, index)
        if other := [name for name in _SEEN_OR_HEARD if row.get(name)]:
            raise ValueError(
                f"{where}: column {other[0]!r} holds what a prompt shows (TRL's and verl's column for it), and it would"
                " be left out: models are trained on text and images here. Use rows of these; or remove the column, if"
                " they are enough"
            )
        messages = self._with_images(prompt, row, where)
        columns = {name: _jsonable(value, where, name) for name, value in row.items()}
        if self.answer_column:
            columns["answer"] = _jsonable(
                prompt if self.answer_column == self.prompt_column else row[self.answer_column], where, "answer"
            )
            if isinstance(columns.get("reward_model"), dict):
                columns["reward_model"]["ground_truth"] = columns["answer"]
        if self.data_source_column:
            if row.get(self.data_source_column) is None:
                name = self.data_source_column
                raise ValueError(f"{where}: column {name!r} is empty, and chooses the reward: fill it")
            columns["data_source"] = _jsonable(row[self.data_source_column], where, "data_source")
        task_id = f"{self.task_prefix}/{index}"
        if messages is not None:
            plain = isinstance(prompt, str)
            return Task(task_id, self.label, self.reward, messages=messages, columns=columns, plain=plain)
        if isinstance(prompt, str) and prompt.strip():
            if _MESSAGES_AS_TEXT.match(prompt):
                raise ValueError(
                    f"{where}: column {self.prompt_column!r} holds chat messages as the text of JSON: store them as a"
                    " list of tables with role and content"
                )
            return Task(task_id, self.label, self.reward, prompt=prompt, columns=columns)
        if not self.chat and not isinstance(prompt, str):
            raise ValueError(f"{where}: column {self.prompt_column!r} holds chat messages; set tasks.chat = true")
        return Task(task_id, self.label, self.reward, messages=self._messages(prompt, where), columns=columns)

    def fingerprint(self) -> str:
        """Return a text that changes with the rows, their prompts and their order."""
        return self._rows.fingerprint(self.prompt_column)

    # Private

    def _with_images(self, prompt: Any, row: dict[str, Any], where: str) -> tuple[dict[str, Any], ...] | None:
        """Return the messages of a row with images, or None without any. Sets the column in `row` to their paths."""
        name = self.image_column
        try:
            images = images_of(row[name], name) if name else None
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            shown = isinstance(messages, list) and any(
                isinstance(m, dict) and shows_images(m.get("content")) for m in messages
            )
            if not (images or shown or (images is not None and PLACEHOLDER in str(prompt))):
                return None
            if not self.chat:
                raise BadImage("it shows images, which a chat template puts into the prompt: set tasks.chat = true")
            if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
                return self._messages(prompt, where)
            found = with_images(messages, images, name, partial(stored, places=self._places))
        except BadImage as error:
            raise ValueError(f"{where}: {error}") from error
        if images is not None:
            row[name] = images_in(found)
        return tuple(self._message(message, where) for message in found)

    def _messages(self, prompt: Any, where: str) -> tuple[dict[str, Any], ...]:
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(
                f"{where}: column {self.prompt_column!r} holds {prompt!r}; expected a text that is not empty or a list"
                " of chat messages (set tasks.sources.prompt_column if another column has it)"
            )
        return tuple(self._message(message, where) for message in prompt)

    def _message(self, message: Any, where: str) -> dict[str, Any]:
        """Return a message without empty keys, which Arrow adds; text parts are joined."""
        found = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if isinstance(parts := found.get("content"), list) and parts and all(map(_is_text, parts)):
            found["content"] = "".join(part["text"] for part in parts)
        content = found.get("content")
        if not isinstance(found.get("role"), str) or not (isinstance(content, str) or shows_images(content)):
            raise ValueError(
                f"{where}: {message!r} in {self.prompt_column!r} is not a message with role and content, both texts"
                " (content may be a list of parts of type text and image)"
            )
        if other := next((k for k, value in found.items() if not isinstance(value, str) and k != "content"), None):
            raise ValueError(
                f"{where}: a message in {self.prompt_column!r} has {other} = {found[other]!r:.100}, which is no text"
                " and would not reach the chat template: write it into its content, or remove it"
            )
        return found


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _jsonable(value: Any, where: str, column: str) -> Any:
    """Convert to a JSON value, since rewards run in another process and checkpoints store tasks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(k): _jsonable(v, where, column) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v, where, column) for v in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    raise ValueError(f"{where}: column {column!r} holds a {type(value).__name__}, which no reward can take: remove it")
