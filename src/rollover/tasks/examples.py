"""Examples of supervised training: rows of a dataset -> token ids, and which of them are trained.

    messages                 the chat template up to each answer | the answer and its end of turn (trained) | ...
    prompt and completion    the same, as a user's and an assistant's message; without tasks.chat as plain text and EOS
    text                     plain text and EOS, trained from the second token on

A prompt has the tokens that the policy gets in a rollout, an answer those of the whole conversation. A row is refused
if the two disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from rollover.config import SftConfig, TasksConfig, TaskSourceConfig
from rollover.tasks.dataset import PROMPT_COLUMNS, DatasetSource
from rollover.tasks.rows import TableLocation, open_rows, row_name
from rollover.tasks.source import SourceSetup
from rollover.tasks.stream import decorated
from rollover.types import Media, Prompt, Task, images_in

if TYPE_CHECKING:
    from rollover.models.processor import Processor

COMPLETION_COLUMNS = ("completion", "response", "answer")
_MESSAGES, _TEXT = "messages", "text"
_ASSISTANT = "assistant"
_OPENING, _ANSWER = {"role": "user", "content": "Hello there."}, "It is four."
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)  # a template is a program


@dataclass(frozen=True, eq=False)
class TokenSpan:
    """Consecutive tokens after the prompt, int32 [n], all `trained` or none."""

    token_ids: np.ndarray
    trained: bool


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation or text to train: its prompt, then `spans` in order, the last of them trained."""

    task: Task
    prompt: Prompt
    spans: tuple[TokenSpan, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(span.token_ids) for span in self.spans)

    def token_ids(self) -> np.ndarray:
        """Return all tokens, the prompt's included [n]."""
        return np.concatenate([np.asarray(self.prompt.ids), *(span.token_ids for span in self.spans)])


class ExampleRows:
    """The rows of a dataset as examples. ValueError, with file, row or option, for an invalid one."""

    def __init__(
        self,
        place: TableLocation,
        sft: SftConfig,
        tasks: TasksConfig,
        tokenizer: Any,
        processor: Processor | None = None,
    ) -> None:
        columns = open_rows(place).columns
        names = (_MESSAGES, *(name for name in PROMPT_COLUMNS if name != _MESSAGES), _TEXT)
        prompt_column = sft.prompt_column or next((name for name in names if name in columns), "")
        for option, name, wanted in (
            ("prompt_column", prompt_column, ", ".join(names)),
            ("completion_column", sft.completion_column, ""),
        ):
            if (name and name not in columns) or (wanted and not name):
                raise ValueError(
                    f"dataset {place.path!r} has no column {name or wanted}; its columns are {', '.join(columns)}: set"
                    f" sft.{option}"
                )
        self.place, self.tasks, self.tokenizer, self.processor = place, tasks, tokenizer, processor
        self.completion_column = sft.completion_column
        self.last_only = sft.turns == "last"
        self.is_text = prompt_column == _TEXT and not sft.completion_column
        setup = SourceSetup(
            TaskSourceConfig(prompt_column=prompt_column), place.path, "", 0,
            chat=tasks.chat, image_urls=tasks.allow_image_urls,
        )  # fmt: skip
        self.source = DatasetSource(setup, place)

    def __len__(self) -> int:
        number = self.source.num_problems
        if number is None:
            raise ValueError(f"{self.place.option}: an iterable without a length; give a list, or a file")
        return number

    def example(self, index: int) -> Example:
        """Return row `index` as an example."""
        try:
            task = self.source.problem(index)
        except ValueError as error:
            raise ValueError(str(error).replace("tasks.sources.", "sft.")) from error
        try:
            if self.is_text and task.prompt is not None:
                return Example(task, *_plain(self.tokenizer, "", task.prompt))
            completion = self._completion(task)
            if task.messages is None and not self.tasks.chat:
                if not isinstance(completion, str):
                    raise ValueError("a prompt without tasks.chat needs a completion that is a text")
                task = decorated(task, self.tasks)
                return Example(task, *_plain(self.tokenizer, task.prompt or "", completion))
            task = decorated(task, self.tasks)
            messages = [*(task.messages or ()), *_as_messages(completion)]
            return Example(task, *chat_spans(messages, self.tokenizer, self.processor, last_only=self.last_only))
        except ValueError as error:
            raise ValueError(f"{row_name(self.place, index)}: {error}") from error

    def _completion(self, task: Task) -> Any:
        """Return the completion; None if the row's messages contain it."""
        if task.messages is not None and task.messages[-1]["role"] == _ASSISTANT and not self.completion_column:
            return None
        names = (self.completion_column,) if self.completion_column else COMPLETION_COLUMNS
        found = next((task.columns[name] for name in names if task.columns.get(name) not in (None, "", [])), None)
        if found is None and task.messages is not None:
            raise ValueError(
                "its messages do not end with one of the assistant, and there is no column"
                f" {' or '.join(names)} with the answer"
            )
        if found is None:
            raise ValueError(f"there is no completion: the column {' or '.join(names)} is missing or empty")
        return found


def chat_spans(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    processor: Processor | None = None,
    *,
    last_only: bool = False,
) -> tuple[Prompt, tuple[TokenSpan, ...]]:
    """Return the prompt and spans of a conversation. The assistant's messages are trained, with their end-of-turn
    token.

    `processor`: the model's, for images. `last_only`: train the last one only. The template's text after an end-of-turn
    token is context of the next turn. ValueError if no message precedes an assistant's, or if the template changes
    earlier text when a conversation continues.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template: set tasks.chat = false, or choose a chat model")
    answers = [i for i, message in enumerate(messages) if i and message.get("role") == _ASSISTANT]
    if not answers:
        raise ValueError("there is no message of the assistant after another one: nothing would be trained")
    if answers[-1] != len(messages) - 1:
        raise ValueError(f"the last message is one of the role {messages[-1].get('role')!r}, not the assistant's")
    if not str(messages[-1].get("content", "")).strip():
        raise ValueError("the last message of the assistant is empty")
    sources = images_in(messages)
    if sources and processor is None:
        raise ValueError("it shows images, and the model (model.path) takes text alone: choose a vision-language model")
    shown = processor if sources else None
    tail, closing = _end_of_turn(tokenizer)
    if last_only:
        answers = answers[-1:]
    elif not closing and len(answers) > 1:
        raise ValueError(
            "the chat template writes no special token at the end of an assistant's turn, so that only the last one"
            ' can be trained: set sft.turns = "last"'
        )
    texts: list[tuple[str, bool]] = []
    done = ""
    for i in answers:
        opened = _rendered(tokenizer, messages[:i], shown, add_generation_prompt=True)
        whole = _rendered(tokenizer, messages[: i + 1], shown)
        if not opened.startswith(done):
            raise ValueError(
                f"the chat template renders what came before message {i + 1} otherwise when it follows (it may leave"
                ' out earlier reasoning): set sft.turns = "last"'
            )
        if not (whole.startswith(opened) and whole.endswith(tail)):
            raise ValueError(f"the chat template does not write message {i + 1} between its prompt and the end of turn")
        answer = whole[len(opened) : len(whole) - len(tail)] + closing
        texts += [(opened[len(done) :], False), (answer, True)]
        done = opened + answer
    if shown is None:
        return _tokens(tokenizer, texts, _tokens_of_text(tokenizer), eos=not closing)
    return _tokens(tokenizer, texts, lambda text: shown.tokens(text, sources), eos=not closing)


# Private


def _as_messages(completion: Any) -> list[dict[str, Any]]:
    if completion is None:
        return []
    if isinstance(completion, str):
        return [{"role": _ASSISTANT, "content": completion}]
    if isinstance(completion, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in completion):
        return completion
    raise ValueError(f"the completion {completion!r:.60} is neither a text nor a list of messages")


def _end_of_turn(tokenizer: Any) -> tuple[str, str]:
    """Return the template's text after a final answer, and that text up to its first special token."""
    rendered = _rendered(tokenizer, [_OPENING, {"role": _ASSISTANT, "content": _ANSWER}])
    _, found, tail = rendered.rpartition(_ANSWER)
    if not found:
        raise ValueError("the chat template leaves out what the assistant says: choose a chat model")
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    ends = [tail.find(text) + len(text) for text in special | set(tokenizer.all_special_tokens) if text in tail]
    return tail, tail[: min(ends, default=0)]


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], processor: Processor | None = None, **options: bool
) -> str:
    """Render messages. `processor`: for messages with images."""
    try:
        if processor is not None:
            return processor.rendered(messages, **options)
        return tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options)
    except _TEMPLATE_ERRORS as error:
        raise ValueError(f"the model's chat template refuses its messages: {error}") from error


def _tokens_of_text(tokenizer: Any) -> Callable[[str], Prompt]:
    def tokens(text: str) -> Prompt:
        try:
            return Prompt.of(tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, ValueError) as error:  # half a surrogate pair is no text
            raise ValueError(f"it is no text: {error}") from error

    return tokens


def _tokens(
    tokenizer: Any, texts: Sequence[tuple[str, bool]], tokens_of: Callable[[str], Prompt], *, eos: bool
) -> tuple[Prompt, tuple[TokenSpan, ...]]:
    """Tokenise texts, each with whether it is trained, together by `tokens_of`. `eos`: append EOS."""
    parts: list[tuple[list[int], bool]] = []
    text, before = "", 0
    ids: list[int] = []
    media: tuple[Media, ...] = ()
    for piece, trained in texts:
        known, text = ids, text + piece
        whole = tokens_of(text)
        ids, media = list(whole.ids), whole.media
        if ids[: len(known)] != known:
            start = text[-len(piece) :][:20]
            raise ValueError(
                f"the tokens before {start!r} are other ones where that follows: it begins in the middle of a token."
                " Remove white space at its beginning, or let what comes before it end with some"
            )
        parts.append((ids[before:], trained))
        before = len(ids)
    prompt, rest = _with_eos(parts, tokenizer, eos=eos)
    if any(image.offset >= len(prompt) for image in media):
        raise ValueError('an image comes after the first trained answer: set sft.turns = "last"')
    return replace(prompt, media=media), rest


def _plain(tokenizer: Any, prompt: str, completion: str) -> tuple[Prompt, tuple[TokenSpan, ...]]:
    """Tokenise plain text into a prompt, as the policy gets it, and the rest. Without a prompt, the first token is the
    prompt, since nothing predicts it."""
    if not completion.strip():
        raise ValueError("the text to train is empty")
    try:
        opened = list(tokenizer(prompt)["input_ids"]) if prompt else []
        whole = list(tokenizer(prompt + completion)["input_ids"])
    except (TypeError, ValueError) as error:  # half a surrogate pair is no text
        raise ValueError(f"it is no text: {error}") from error
    if whole[: len(opened)] != opened:
        raise ValueError(
            f"the tokens of the prompt are other ones where {completion[:20]!r} follows: the completion begins in the"
            " middle of a token. Move white space from the end of the prompt to the beginning of the completion"
        )
    opened = opened or whole[:1]
    return _with_eos([(opened, False), (whole[len(opened) :], True)], tokenizer, eos=True)


def _with_eos(
    parts: Sequence[tuple[list[int], bool]], tokenizer: Any, *, eos: bool
) -> tuple[Prompt, tuple[TokenSpan, ...]]:
    (prompt_ids, _), *rest = parts
    if eos and tokenizer.eos_token_id is not None and rest[-1][0][-1:] != [tokenizer.eos_token_id]:
        rest[-1] = [*rest[-1][0], tokenizer.eos_token_id], True
    if not prompt_ids:
        raise ValueError("nothing comes before the answer: its first token needs one before it")
    return Prompt.of(prompt_ids), tuple(TokenSpan(np.array(ids, np.int32), trained) for ids, trained in rest if ids)
