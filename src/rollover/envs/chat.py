"""Chat templates for conversations of several turns: tokens of the messages that follow a sampled turn. Pure.

A chat template renders whole conversations. `Chat` renders and tokenises only new messages, as the difference of two
renderings of a short artificial conversation that ends with the last assistant message. Sampled tokens are never
rendered or tokenised again.

    prompt ids | sampled ids [.. end of turn] | continuation(sampled ids, new messages) | sampled ids ..
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rollover.envs.tools import definitions, with_system_text
from rollover.models.chat_template import prompt_arguments
from rollover.text import whole_characters
from rollover.types import Media, Prompt, Rollout, images_in, without_sources

if TYPE_CHECKING:
    from rollover.models.processor import Processor


Message = Mapping[str, Any]
ROLES = ("tool", "user", "system")
"""Roles of messages that can follow an assistant's turn."""

_OPENING = ({"role": "user", "content": "Hello there."},)
_ANSWER, _THOUGHT = "It is four.", "Two and two."
# Plain text, a tool call, an answer after reasoning.
_ANSWERS = (
    _ANSWER,
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
    f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}",
)
_NEWS = ("What nobody has said before.", "Another one,\n\n   of two lines.")
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)  # a template is a program


@dataclass(frozen=True)
class Fit:
    """How well a chat template renders messages of one role after an assistant's turn."""

    possible: bool
    """A continuation can be rendered."""
    exact: bool
    """Prompt, sampled tokens and continuation equal, id by id, the rendering of the whole conversation."""
    why: str = ""
    """If not exact: the reason, a sentence without its full stop."""


class Chat:
    """The chat template of `tokenizer` (one of transformers), for conversations of several turns.

    `tools`: schemas (tools.tool_schemas) for prompts, passed to the template if it takes tools; else the system message
    describes them and how to write a call (`tool_format`, see tools.read_calls).

    The text of a message never becomes a control token: text that equals a special token of the tokenizer
    (`<|im_end|>` in a page that a tool fetched) is tokenised as plain text. Half a surrogate pair becomes U+FFFD.

    `processor`: of a vision-language model; without one, messages with images are refused.

    ValueError without a chat template, if it ends turns without a special token, or if it cannot describe the tools.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_format: str = "hermes",
        processor: Processor | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the model's tokenizer has no chat template: choose a chat model, or set one")
        self.tokenizer, self.tools, self.processor = tokenizer, [dict(tool) for tool in tools], processor
        self.takes_tools = False
        """Whether the template renders `tools`."""
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        if processor is not None:
            special.add(tokenizer.convert_ids_to_tokens(processor.placeholder_id))
        self._special = sorted(special, key=len, reverse=True)  # longest first: one may be a prefix of another
        self._special_pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._closing, self._end_text = self._find_end_of_turn()
        self.end_of_turn: int = tokenizer.convert_tokens_to_ids(self._end_text)
        """The special token that ends an assistant's turn in the template."""
        self._tools_text = ""
        if self.tools:
            self.takes_tools = self._finds_tools_rendered()
            self._tools_text = "" if self.takes_tools else definitions(self.tools, tool_format)
            self.prompt(_OPENING)  # raises if the template refuses a system message

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Encode a first prompt, with the tools' definitions. ValueError if the template refuses it."""
        self._check_images(messages)
        shown_messages = with_system_text(messages, self._tools_text) if self._tools_text else messages
        hidden = _Hidden(shown_messages, self._special_pattern)
        shown, options = prompt_arguments(hidden.messages)
        return self._tokens(hidden, self._rendered(shown, **options), shown_messages)

    def text(self, turn_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn without its end-of-turn token: the assistant message's content."""
        ids = list(turn_ids[:-1] if self._is_closed(turn_ids) else turn_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def continuation(
        self, turn_ids: Sequence[int], messages: Sequence[Message], assistant: Message | None = None
    ) -> Prompt:
        """Return the tokens between a sampled turn and the next one, which are never trained.

        `turn_ids`: the sampled turn. If it does not end with the end-of-turn token (it ended by length or a stop
        string), the closing tokens come first. `messages`: the new ones, with roles in ROLES. `assistant`: the turn as
        a message, by default its text. The last tokens open the next turn. Offsets of images count from the first
        returned token.

        ValueError for other roles, no message, or if the template refuses the messages or does not end the turn.
        """
        if not messages:
            raise ValueError("there is no new message to continue with")
        for message in messages:
            if (role := message.get("role")) not in ROLES:
                raise ValueError(f"a message of the role {role!r} cannot follow a turn: {', '.join(ROLES)} can")
        self._check_images(messages)
        last = assistant or {"role": "assistant", "content": self.text(turn_ids)}
        hidden = _Hidden([last, *messages], self._special_pattern)
        # With the end-of-turn token in front, the rest is tokenised as in the whole conversation.
        found = self._tokens(hidden, self._closing + self._difference(hidden.messages), messages)
        first = found.ids.index(self.end_of_turn) + 1 if self._is_closed(turn_ids) else 0
        return Prompt(found.ids[first:], tuple(media.moved(-first) for media in found.media))

    def fit(self, role: str) -> Fit:
        """Return whether messages of the role can follow a turn, tested on artificial conversations."""
        return self._fits[role]

    def require(self, role: str) -> None:
        """Raise ValueError, with the reason, if no message of the role can follow an assistant's turn."""
        if not (fit := self.fit(role)).possible:
            raise ValueError(f"{fit.why}. Choose another model, or set a chat template that takes the role {role}")

    # Private

    @cached_property
    def _fits(self) -> dict[str, Fit]:
        return {role: self._probe(role) for role in ROLES}

    def _probe(self, role: str) -> Fit:
        try:
            failure = self._failure(role)
        except ValueError as error:
            failure = str(error)
        if failure:
            return Fit(possible=False, exact=False, why=failure)
        for opening in self._openings():
            for answer in _ANSWERS:
                if difference := self._inexactness(role, opening, answer):
                    return Fit(possible=True, exact=False, why=difference)
        return Fit(possible=True, exact=True)

    def _openings(self) -> list[list[Message]]:
        system: list[Message] = [{"role": "system", "content": "Be brief."}, *_OPENING]
        try:
            self.prompt(system)
        except ValueError:  # a template without system messages
            return [[*_OPENING]]
        return [[*_OPENING], system]

    def _failure(self, role: str) -> str:
        """Why no continuation can be rendered; "" if one can."""
        contents = _NEWS if role == "tool" else _NEWS[:1]  # only tools send several messages at once
        text = self._difference([_said(_ANSWER), *_news(role, *contents)])
        places = [text.find(content) for content in contents]
        if min(places) < 0 or places != sorted(places):
            return f"the chat template leaves out messages of the role {role} that follow an assistant's turn"
        if _ANSWER in text or _OPENING[0]["content"] in text:
            return f"the chat template repeats earlier messages when one of the role {role} follows"
        special = {self.tokenizer.convert_tokens_to_ids(text) for text in self._special}
        plain, forged = (
            [i for i in self.continuation([], _news(role, content)).ids if i in special]
            for content in (_NEWS[0], " ".join(self._special))
        )
        return "" if plain == forged else "the tokenizer makes control tokens of the text of messages"

    def _inexactness(self, role: str, opening: list[Message], answer: str) -> str:
        """Why two turns, with messages after each, differ from the whole rendering; "" if every id is equal."""
        messages, ids = opening, list(self.prompt(opening).ids)
        for content in _NEWS:
            opened = self._rendered(messages, add_generation_prompt=True)
            before, sampled = self._encode(opened), self._encode(opened + answer + self._closing)
            sampled = sampled[len(before) :]
            news = _news(role, content)
            messages = [*messages, _said(answer), *news]
            try:
                whole = list(self.prompt(messages).ids)
            except ValueError as error:
                return f"the chat template cannot render the whole conversation, as {error}"
            ids = [*ids, *sampled, *self.continuation(sampled, news).ids]
            if ids != whole:
                return self._difference_cause(
                    role, self._rendered(messages, add_generation_prompt=True), opened, answer
                )
        return ""

    def _difference_cause(self, role: str, rendered: str, opened: str, answer: str) -> str:
        when = f"when a message of the role {role} follows"
        if _THOUGHT in answer and rendered.count(_THOUGHT) < (opened + answer).count(_THOUGHT):
            return f"the chat template drops the reasoning of earlier turns {when}"
        if not rendered.startswith(opened):
            return f"the chat template renders what came before a turn otherwise {when}"
        if not rendered.startswith(opened + answer):
            return f"the chat template renders an assistant's turn otherwise {when}"
        return f"the tokens are other ones than those of the whole conversation {when}"

    def _is_closed(self, turn_ids: Sequence[int]) -> bool:
        return len(turn_ids) > 0 and int(turn_ids[-1]) == self.end_of_turn

    def _find_end_of_turn(self) -> tuple[str, str]:
        """Return the text that closes an assistant's turn, up to its first special token, and this token."""
        _, found, tail = self._rendered([*_OPENING, _said(_ANSWER)]).rpartition(_ANSWER)
        match = self._special_pattern.search(tail) if found else None
        if match is None:
            raise ValueError(
                "the chat template writes no special token at the end of an assistant's turn, so nothing tells where"
                " the next message begins: set one that ends turns with the tokenizer's eos_token"
            )
        return tail[: match.end()], match[0]

    def _finds_tools_rendered(self) -> bool:
        """Whether the template renders tools: templates without support ignore them silently."""
        without = self._rendered(_OPENING)
        self.takes_tools = True
        with_tools = self._rendered(_OPENING)
        return with_tools != without and all(tool["function"]["name"] in with_tools for tool in self.tools)

    def _difference(self, messages: Sequence[Message]) -> str:
        """Return the rendering after the end-of-turn token of messages[0], the assistant's.

        The texts of messages contain no such token. So it is the n-th in the rendering of all messages if it is the
        n-th and last one without the new messages. Counting is needed because a template may render the assistant's
        message differently when it is not the last one (Qwen3's adds an empty thought to the last one).
        """
        num = self._rendered([*_OPENING, messages[0]]).count(self._end_text)
        parts = self._rendered([*_OPENING, *messages], add_generation_prompt=True).split(self._end_text, num)
        if len(parts) <= num:
            raise ValueError(
                f"the chat template does not end an assistant's turn with {self._end_text} when a message follows"
            )
        return parts[num]

    def _rendered(self, messages: Sequence[Message], **options: bool) -> str:
        more: dict[str, Any] = {"tools": self.tools} if self.takes_tools else {}
        try:
            return self.tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options, **more)
        except _TEMPLATE_ERRORS as error:
            roles = ", ".join(dict.fromkeys(str(m.get("role")) for m in messages))
            raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error

    def _check_images(self, messages: Sequence[Message]) -> None:
        """Raise ValueError for an image if the model takes text only: its template may not support parts."""
        if self.processor is None and (sources := images_in(messages)):
            raise ValueError(f"a message shows the image {sources[0]}, and this model takes text alone")

    def _tokens(self, hidden: _Hidden, rendered: str, messages: Sequence[Message]) -> Prompt:
        """Return tokens and images of a rendering of `messages` (as `hidden`). ValueError if an image is missing."""
        sources = images_in(messages)
        ids: list[int] = []
        media: list[Media] = []
        for text, is_special in hidden.parts(rendered):
            if is_special or not sources or self.processor is None:
                part = Prompt.of(self._encode(text, split_special_tokens=is_special))
            else:
                part = self.processor.tokens(text, sources[len(media) :])
            media += [image.moved(len(ids)) for image in part.media]
            ids += part.ids
        if len(media) < len(sources):
            roles = ", ".join(dict.fromkeys(str(m.get("role")) for m in messages if images_in([m])))
            raise ValueError(
                f"the chat template shows {len(media)} of the {len(sources)} images in messages of the roles {roles}:"
                " put them into user messages, or set another chat template"
            )
        return Prompt(tuple(ids), tuple(media))

    def _encode(self, text: str, **options: Any) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, **options)["input_ids"])


def sampled_turns(rollout: Rollout) -> list[list[int]]:
    """Return the token ids of each turn of the policy, in order, without those of the environment."""
    turns: list[list[int]] = [[]]
    for segment in rollout.segments:
        if segment.trainable:
            turns[-1] += segment.token_ids.tolist()
        else:
            turns.append([])
    return turns if turns[-1] else turns[:-1]


Decode = Callable[[Sequence[int]], str]


def answer_decoder(tokenizer: Any, keep_special_tokens: bool) -> Decode:
    """Return the function from an answer's token ids to its text.

    The text has no special tokens; with `keep_special_tokens` (rollout.keep_special_tokens) it has all but EOS, padding
    and the token that ends a turn in the chat template.
    """
    if not keep_special_tokens:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
    dropped = {tokenizer.eos_token_id, tokenizer.pad_token_id, _end_of_turn(tokenizer)}
    return lambda ids: tokenizer.decode([id for id in ids if id not in dropped], skip_special_tokens=False)


# Private


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _news(role: str, *contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for content in contents]


class _Hidden:
    """Messages in which texts that equal special tokens are replaced by marks, until they are tokenised."""

    def __init__(self, messages: Sequence[Message], special: re.Pattern[str]) -> None:
        self._special = special
        self._texts: list[str] = []  # the replaced texts, by number
        used = set("".join(_strings(messages)))
        private_use = (chr(c) for part in ((0xE000, 0xF900), (0xF0000, 0xFFFFE)) for c in range(*part))
        self._mark = next(c for c in private_use if c not in used)
        self.messages: list[dict[str, Any]] = [self._replaced(message) for message in map(without_sources, messages)]

    def parts(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Split a rendering of `messages` into (text, whether it was replaced)."""
        for i, part in enumerate(rendered.split(self._mark)):
            if i % 2:
                yield self._texts[int(part)], True
            elif part:
                yield part, False

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(self._number, whole_characters(value))
        if isinstance(value, Mapping):
            return {self._replaced(key): self._replaced(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._replaced(inner) for inner in value]
        return value

    def _number(self, match: re.Match[str]) -> str:
        self._texts.append(match[0])
        return f"{self._mark}{len(self._texts) - 1}{self._mark}"


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for inner in pair for text in _strings(inner)]
    return [text for inner in value for text in _strings(inner)] if isinstance(value, list | tuple) else []


def _end_of_turn(tokenizer: Any) -> int | None:
    try:
        return Chat(tokenizer).end_of_turn
    except ValueError:  # no chat template, or one without such a token
        return None
