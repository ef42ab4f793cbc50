"""Messages and tokens of the open Rollouts of one trajectory: what a call continues, with which tokens.

    call ──▶ place_of ──▶ Continues(rollout, tokens of the new messages) ─┐
                   └────▶ Opens(prompt, why) ─────────────────────────────┴──▶ turn ──▶ reply

A call with so much text that to tokenise it takes long is placed in a thread, beside the event loop, and images of
calls are stored in threads, too. `LargeCalls` owns that thread and a tokenizer for it, as one may not be used by two
threads at once. How much text can be refused without a look is here, too.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rollover.engine.stop import before_stop
from rollover.envs.answer_text import answer_decoder
from rollover.envs.chat import Chat, sampled_turns
from rollover.envs.tools import Call as WrittenCall
from rollover.envs.tools import read_calls
from rollover.images import MOST_PIXELS, BadImage, num_pixels
from rollover.tasks.image_parts import Store, shows_images, with_images
from rollover.text import whole_characters
from rollover.types import Prompt, Rollout, images_in
from rollover.workflows.calls import BudgetUsedUp, Call, CallRefused, NotSupported, Reply, ToolCall
from rollover.workflows.matching import Break, Conversation, canonical_tools, match, text_of

if TYPE_CHECKING:
    from rollover.models.processor import Processor


LARGE = 50_000
"""Characters, which take some hundredths of a second."""


@dataclass(frozen=True)
class Continues:
    """The call goes on with a Rollout: these tokens are appended to it, as an environment's. `num_tokens`: that it has
    before them. The offsets of images count from the first of `tokens`."""

    rollout_id: str
    tokens: Prompt
    num_tokens: int


@dataclass(frozen=True)
class Opens:
    """The call begins a Rollout with this prompt. `reason`: why it is no continuation; None for a first call."""

    prompt: Prompt
    reason: Break | None


@dataclass(eq=False)
class _Open:
    """An open Rollout. `call`: the last one; `rollout`: a copy with the tokens of its last turn, None while that is
    under way."""

    call: Call
    said: Conversation | None
    rollout: Rollout | None = None
    assistant: Mapping[str, Any] = field(default_factory=dict)
    num_turns: int = 0


class Chats:
    """The chat template with each set of tools that calls offer. `tool_format`: how calls of tools are written; every
    token id of the model is below `vocab_size`. `keep_special_tokens`: see answer_decoder; it concerns replies to
    prompts, as replies to messages always have them. `processor`: of a vision-language model."""

    def __init__(
        self,
        tokenizer: Any,
        tool_format: str = "hermes",
        vocab_size: int = 2**31 - 1,
        keep_special_tokens: bool = False,
        processor: Processor | None = None,
    ) -> None:
        self.tokenizer, self.tool_format, self.vocab_size = tokenizer, tool_format, vocab_size
        self.processor = processor
        self.decode = answer_decoder(tokenizer, keep_special_tokens)
        self._of_tools: dict[str, Chat] = {}

    def of(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        """ValueError where the model has no chat template, or it cannot tell of the tools."""
        key = canonical_tools(tools)
        if key not in self._of_tools:
            self._of_tools[key] = Chat(self.tokenizer, tools, self.tool_format, self.processor)
        return self._of_tools[key]

    def check_text(self, tokens: Prompt) -> None:
        """CallRefused for a placeholder of an image among tokens of text."""
        if self.processor is not None and self.processor.placeholder_id in tokens.ids:
            raise CallRefused("the prompt has the model's token for an image: show images in messages", "prompt")


class Conversations:
    """Of one trajectory."""

    def __init__(self, chats: Chats) -> None:
        self.chats = chats
        self._open: dict[str, _Open] = {}

    @property
    def rollout_ids(self) -> list[str]:
        """In the order in which they were opened."""
        return list(self._open)

    @property
    def num_turns(self) -> dict[str, int]:
        """How many turns of each have ended, by id and in that order."""
        return {rollout_id: of.num_turns for rollout_id, of in self._open.items()}

    def place_of(self, call: Call, chats: Chats | None = None) -> Continues | Opens:
        """Where the call belongs. CallRefused where its messages cannot be made tokens. `chats`: for another thread."""
        chats = chats or self.chats
        with _refusing(call):
            if call.messages is not None:
                return self._place_of_messages(call, chats)
            return self._place_of_prompt(call, chats)

    def branch(self, call: Call) -> Opens:
        """The call begins a Rollout, as what it could continue has grown beyond it."""
        with _refusing(call):
            return Opens(_prompt(call, self.chats), Break.BRANCH)

    def on_open(self, rollout_id: str, call: Call) -> None:
        """A Rollout was opened for this call."""
        said = None
        if call.messages is not None:
            said = Conversation.opened(rollout_id, call.messages, call.tools)
        self._open[rollout_id] = _Open(call, said)

    def on_continue(self, rollout_id: str, call: Call) -> None:
        """The Rollout goes on by this call."""
        of = self._open[rollout_id]
        of.call, of.rollout = call, None
        of.said = None if of.said is None else of.said.asked(call.messages or ())

    def on_turn(self, rollout: Rollout) -> Reply:
        """Its turn has ended; `rollout` has the tokens of it. The answer to its call."""
        of = self._open[rollout.rollout_id]
        reply = self._reply(of, rollout)
        of.rollout, of.assistant = rollout, reply.message
        of.num_turns += 1
        of.said = None if of.said is None else of.said.answered(reply.message)
        return reply

    # Private

    def _place_of_messages(self, call: Call, chats: Chats) -> Continues | Opens:
        assert call.messages is not None
        chat = chats.of(call.tools)
        said = [of.said for of in self._open.values() if of.said is not None]
        found = match(call.messages, call.tools, said, lambda role: role in _FOLLOWERS and chat.fit(role).exact)
        if found.key is not None:
            of = self._open[found.key]
            assert of.rollout is not None
            turn_ids = sampled_turns(of.rollout)[-1]
            try:
                new = chat.continuation(turn_ids, _known(found.new), of.assistant)
                return Continues(found.key, new, of.rollout.num_tokens)
            except ValueError:
                return Opens(_prompt(call, chats), Break.TEMPLATE)
        return Opens(_prompt(call, chats), found.reason)

    def _place_of_prompt(self, call: Call, chats: Chats) -> Continues | Opens:
        """Token ids, or a text, that begin with all tokens of a Rollout and go on, continue it."""
        prompt = _prompt(call, chats)
        ids = prompt.ids
        if not ids:
            raise CallRefused("the prompt has no token", "prompt")
        if (wrong := next((i for i in ids if not 0 <= i < chats.vocab_size), None)) is not None:
            raise CallRefused(f"{wrong} is no token id: those of the model are 0 to {chats.vocab_size - 1}", "prompt")
        for rollout_id, of in self._open.items():
            if of.rollout is None:
                continue
            so_far = (*of.rollout.prompt.ids, *of.rollout.token_ids())
            if len(ids) > len(so_far) and ids[: len(so_far)] == so_far:
                new = Prompt(ids[len(so_far) :])
                chats.check_text(new)
                return Continues(rollout_id, new, of.rollout.num_tokens)
        chats.check_text(prompt)
        return Opens(prompt, Break.HISTORY if self._open else None)

    def _reply(self, of: _Open, rollout: Rollout) -> Reply:
        assert rollout.stop_reason is not None
        num = len(sampled_turns(rollout)[-1]) if rollout.segments and rollout.segments[-1].trainable else 0
        ids, logprobs, versions = _last_tokens(rollout, num)
        if of.call.messages is not None:
            text = self.chats.of(of.call.tools).text(ids.tolist())
        else:
            text = self.chats.decode(ids.tolist())
        text = before_stop(text, of.call.stop)
        reply_id = f"{rollout.rollout_id}/{of.num_turns}"
        calls: tuple[ToolCall, ...] = ()
        if of.call.tools and of.call.reads_calls:
            text, calls = _split_calls(text, self.chats.tool_format, reply_id)
        before = (*rollout.prompt.ids, *rollout.token_ids()[: rollout.num_tokens - num])
        return Reply(reply_id, text, calls, rollout.stop_reason, before, ids, logprobs, versions)


class LargeCalls:
    """Of one run, whose calls are tokenised by `chats`. `most_tokens`: a Rollout has no more, prompt included."""

    def __init__(self, chats: Chats, most_tokens: int) -> None:
        self.chats, self.most_tokens = chats, most_tokens

    async def place_of(self, call: Call, conversations: Conversations) -> Continues | Opens:
        """As Conversations.place_of; nobody else may ask for a place meanwhile. A call that is not large is placed
        before anything else happens. BudgetUsedUp for one that has more text than tokens could hold."""
        try:
            num = num_characters(call)
        except RecursionError:
            raise CallRefused("the call is nested too deeply", "messages") from None
        longest = 1 if isinstance(call.prompt, tuple) else self._longest_token
        if max(num / longest, len(call.messages or ())) > self.most_tokens:
            raise BudgetUsedUp(
                f"the call has {num:,} {'tokens' if isinstance(call.prompt, tuple) else 'characters'} in"
                f" {len(call.messages or ())} messages, which do not fit into the {self.most_tokens:,} tokens of"
                " prompt and answers"
            )
        if num <= LARGE or call.shows_images:  # the model's processor is not made for several threads
            return conversations.place_of(call)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: conversations.place_of(call, self._chats_there))

    # Private

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: no text of N tokens has more than N times as many."""
        return max(map(len, self.chats.tokenizer.get_vocab()))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "large calls")

    @cached_property
    def _chats_there(self) -> Chats:
        """Made in the thread, and used there alone."""
        chats = self.chats
        return Chats(copy.deepcopy(chats.tokenizer), chats.tool_format, chats.vocab_size, processor=chats.processor)


async def with_stored_images(call: Call, store: Store) -> Call:
    """Return the call with each image stored by `store`. NotSupported for an image that cannot be used, and for more
    than MOST_PIXELS in all: a small file may hold a large image, and all are decoded at once."""
    if not call.shows_images:
        return call

    def stored() -> tuple[dict[str, Any], ...]:
        messages = with_images(call.messages or (), None, "", store)
        if (num := sum(map(num_pixels, images_in(messages)))) > MOST_PIXELS:
            raise BadImage(f"the images of the call have {num:,} pixels in all, and {MOST_PIXELS:,} are the most")
        return messages

    try:
        return replace(call, messages=await asyncio.to_thread(stored))
    except BadImage as error:
        raise NotSupported(str(error), "messages") from error


def num_characters(call: Call) -> int:
    """Of all that a call says; of a prompt of token ids their number."""
    return len(call.prompt or ()) + _num_in(call.messages or ()) + _num_in(call.tools)


def _num_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_in(key) + _num_in(inner) for key, inner in value.items())
    return sum(map(_num_in, value)) if isinstance(value, list | tuple) else 0


# Private

_FOLLOWERS = ("tool", "user", "system")


def _prompt(call: Call, chats: Chats) -> Prompt:
    """All that the call says, as tokens."""
    if call.messages is not None:
        return chats.of(call.tools).prompt(_known(call.messages))
    prompt = call.prompt
    if isinstance(prompt, str):
        return Prompt.of(chats.tokenizer(whole_characters(prompt))["input_ids"])
    return Prompt.of(prompt or ())


@contextmanager
def _refusing(call: Call) -> Iterator[None]:
    """What cannot be made tokens is refused."""
    try:
        yield
    except CallRefused:
        raise
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CallRefused(why, "messages" if call.messages is not None else "prompt") from error


def _known(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as `Chat` takes them: a text, or parts with images, for contents; values for arguments of calls."""
    return [_known_message(message) for message in messages]


def _known_message(message: Mapping[str, Any]) -> dict[str, Any]:
    out = {name: value for name, value in message.items() if value is not None}
    content = out.get("content")
    out["content"] = content if shows_images(content) else text_of(content)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [dict(call) | {"function": _known_function(call["function"])} for call in calls]
    return out


def _known_function(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(function) | {"arguments": json.loads(function["arguments"])}
    except (TypeError, ValueError, KeyError):
        return dict(function)


def _last_tokens(rollout: Rollout, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probs and versions of the last `num` tokens, which were sampled."""
    ids, logprobs, versions = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
    for segment in rollout.segments:
        ids.append(segment.token_ids)
        logprobs.append(segment.logprobs)
        versions.append(np.full(len(segment), segment.policy_version, np.int32))
    first = rollout.num_tokens - num
    return tuple(np.concatenate(parts)[first:] for parts in (ids, logprobs, versions))  # type: ignore[return-value]


def _split_calls(text: str, tool_format: str, reply_id: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls, and these; all of the text where one of them cannot be read."""
    found = read_calls(text, tool_format)
    if not found or not all(isinstance(call, WrittenCall) for call in found):
        return text, ()
    calls = tuple(
        ToolCall(f"call-{reply_id}-{i}", call.name, json.dumps(call.arguments, ensure_ascii=False))
        for i, call in enumerate(found)
        if isinstance(call, WrittenCall)
    )
    opening = text.find("<tool_call>") if tool_format == "hermes" else 0
    return text[:opening].strip(), calls
