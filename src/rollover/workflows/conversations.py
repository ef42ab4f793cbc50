"""Model calls of a workflow, from Python or over HTTP: which open Rollout a call continues, and with which tokens.

    call ──▶ place_of ──▶ Continues(rollout, tokens of the new messages) ─┐
                   └────▶ Opens(prompt, reason) ──────────────────────────┴──▶ turn ──▶ reply

A call continues a Rollout if its messages begin with the Rollout's, the assistant's as they were returned, and its
tools are the same. Its new messages are then appended as an environment's tokens; sampled tokens are never rendered or
tokenised again. Every other call opens a Rollout, whose prompt is the whole conversation.

    messages of the call:  [ opening | assistant, as returned | ... | assistant, as returned ][ new ones ]
                           [---------------- those of an open Rollout ---------------------- ][ appended ]
"""

from __future__ import annotations

import asyncio
import copy
import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rollover.engine.protocol import before_stop
from rollover.envs.chat import ROLES, Chat, answer_decoder, sampled_turns
from rollover.envs.tools import Call as WrittenCall
from rollover.envs.tools import read_calls
from rollover.images import MOST_PIXELS, BadImage, num_pixels
from rollover.openai_wire import Refusal
from rollover.tasks.image_parts import Store, shows_images, with_images
from rollover.text import whole_characters
from rollover.types import Prompt, Rollout, StopReason, images_in

if TYPE_CHECKING:
    from rollover.models.processor import Processor


Message = Mapping[str, Any]
LARGE_CHARACTERS = 50_000
"""Characters that the tokenizer takes some 10 ms for."""
MODEL = "policy"
"""The model's name in calls, and the default role."""


@dataclass(frozen=True)
class Call:
    """A call to the policy. Exactly one of `messages` and `prompt` is set; sampling parameters are the run's.

    After `with_stored_images`, images in `messages` are parts as in types.Task.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    """A text, or token ids; no chat template is applied."""
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = True
    """Whether tool calls are parsed out of the answer; else they stay in its text."""
    max_tokens: int | None = None
    """Of this turn; None: what is left of the Rollout's budget."""
    stop: tuple[str, ...] = ()
    """Stop strings besides rollout.stop; the reply's text excludes them, as in the OpenAI API."""

    @property
    def shows_images(self) -> bool:
        return any(shows_images(message.get("content")) for message in self.messages or ())


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer. `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, eq=False)
class Reply:
    """One turn: its text, and the sampled tokens.

    prompt_ids: all token ids before the turn. token_ids int32 [n], logprobs float32 [n], versions int32 [n]: of the
    sampled tokens. `text`: without the end-of-turn token and `tool_calls`.
    """

    reply_id: str
    text: str
    tool_calls: tuple[ToolCall, ...]
    stop_reason: StopReason
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray

    @property
    def message(self) -> dict[str, Any]:
        """The turn as an assistant's message, for the next call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class CallRefused(Refusal):
    """A call that cannot be answered."""


class NotSupported(CallRefused):
    """The call requests something that this run cannot do."""

    code = "unsupported_parameter"


class BudgetUsedUp(CallRefused):
    """The Rollout or the Episode has no token or turn left, or the prompt is too long for the model."""

    code = "context_length_exceeded"


class UnknownKey(CallRefused):
    """No open trajectory has this API key."""

    status, code = 401, "invalid_api_key"


class UnknownModel(CallRefused):
    """The model is not the run's."""

    status, code = 404, "model_not_found"


class Break(enum.Enum):
    """Why a later call of a trajectory opens a Rollout instead of continuing one."""

    HISTORY = "history"
    """The earlier messages differ: the agent shortened, summarised or rewrote them, or started over."""
    BRANCH = "branch"
    """The Rollout has grown beyond the point that the call continues, or has a turn in flight."""
    TOOLS = "tools"
    """The call offers other tools."""
    TEMPLATE = "template"
    """The chat template cannot render the new messages after the sampled tokens."""


@dataclass(frozen=True)
class Conversation:
    """Messages of one open Rollout.

    `key`: the Rollout's id. `messages`: all of them (`canonical`), the last one the assistant's as it was returned; or,
    while a turn is `in_flight`, those of its call. `tools`: `canonical_tools`.
    """

    key: str
    messages: tuple[str, ...]
    tools: str
    in_flight: bool = False

    @classmethod
    def opened(cls, key: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Conversation:
        """Create it for a Rollout whose first turn is in flight."""
        return cls(key, canonical(messages), canonical_tools(tools), in_flight=True)

    def with_call(self, messages: Sequence[Message]) -> Conversation:
        """Return it with the messages of a call that continues it."""
        return Conversation(self.key, canonical(messages), self.tools, in_flight=True)

    def with_answer(self, assistant: Message) -> Conversation:
        """Return it with the message of the finished turn."""
        return Conversation(self.key, (*self.messages, *canonical([assistant])), self.tools)


@dataclass(frozen=True)
class Match:
    """Result of `match`: the call continues the Rollout `key` with `new` messages, or opens one for `reason`.

    `reason` is None for the first call of a trajectory, and for a continuation.
    """

    key: str | None = None
    new: tuple[Message, ...] = ()
    reason: Break | None = None


def match(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    conversations: Iterable[Conversation],
    can_follow: Callable[[str], bool] = lambda role: True,
) -> Match:
    """Find the open Rollout that a call with these messages and tools continues.

    Of several (equal ones, sampled with equal text) the oldest is taken. `can_follow`: whether the chat template
    renders a message of the role after a sampled turn exactly, token by token, as in the whole conversation.
    """
    ours, offered = canonical(messages), canonical_tools(tools)
    reason: Break | None = None
    for conversation in conversations:
        num = len(conversation.messages)
        if _continues(ours, conversation):
            new = tuple(messages[num:])
            if conversation.tools != offered:
                why = Break.TOOLS
            elif not all(can_follow(str(message.get("role"))) for message in new):
                why = Break.TEMPLATE
            else:
                return Match(conversation.key, new)
        else:
            why = Break.BRANCH if _branches(ours, conversation) else Break.HISTORY
        reason = why if reason is None or _NEARNESS[why] > _NEARNESS[reason] else reason
    return Match(reason=reason)


def canonical(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return for each message a text that is equal for equal messages, in whatever form the client writes them.

    Compared are the role, the text (joined parts; none equals an empty one), the digests of images, an assistant's
    reasoning and tool calls (names, and arguments as JSON values), and the name of other messages. Ids of calls, which
    clients change, and unknown keys are not compared.
    """
    return tuple(json.dumps(_parts(message), sort_keys=True, ensure_ascii=False) for message in messages)


def canonical_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """Return the tool definitions as one text, equal for equal definitions in the same order."""
    return json.dumps([dict(tool) for tool in tools], sort_keys=True, ensure_ascii=False, default=str)


def text_of(content: Any) -> str:
    """Return the text of a content: a text, None, or parts of type text. ValueError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise ValueError("the content of a message must be a text, or a list of parts of the types text and image_url")


@dataclass(frozen=True)
class Continues:
    """The call continues a Rollout of `num_tokens` tokens: `tokens` are appended, as an environment's. The offsets of
    images count from the first of `tokens`."""

    rollout_id: str
    tokens: Prompt
    num_tokens: int


@dataclass(frozen=True)
class Opens:
    """The call opens a Rollout with this prompt. `reason`: why it continues none; None for a first call."""

    prompt: Prompt
    reason: Break | None


@dataclass(eq=False)
class _Open:
    """An open Rollout. `call`: the last one; `rollout`: a copy that includes its last turn, None while that is in
    flight."""

    call: Call
    conversation: Conversation | None
    rollout: Rollout | None = None
    assistant: Mapping[str, Any] = field(default_factory=dict)
    num_turns: int = 0


class Chats:
    """The chat template, for each set of tools that calls offer.

    `tool_format`: as of `tools.read_calls`. `vocab_size`: exclusive bound of the model's token ids.
    `keep_special_tokens`: see `answer_decoder`; for replies to prompts, since replies to messages always have them.
    `processor`: of a vision-language model.
    """

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

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        """Return the Chat for these tools. ValueError if there is no chat template, or it takes no tools."""
        key = canonical_tools(tools)
        if key not in self._of_tools:
            self._of_tools[key] = Chat(self.tokenizer, tools, self.tool_format, self.processor)
        return self._of_tools[key]

    def check_text(self, tokens: Prompt) -> None:
        """Raise CallRefused for an image placeholder among tokens of text."""
        if self.processor is not None and self.processor.placeholder_id in tokens.ids:
            raise CallRefused("the prompt has the model's token for an image: show images in messages", "prompt")


class Conversations:
    """The open Rollouts of one trajectory."""

    def __init__(self, chats: Chats) -> None:
        self.chats = chats
        self._open: dict[str, _Open] = {}

    @property
    def num_turns(self) -> dict[str, int]:
        """Number of finished turns by rollout id, in order of opening."""
        return {rollout_id: entry.num_turns for rollout_id, entry in self._open.items()}

    def place_of(self, call: Call, chats: Chats | None = None) -> Continues | Opens:
        """Return what the call continues or opens. CallRefused if its messages cannot be encoded. `chats`: for use in
        another thread."""
        chats = chats or self.chats
        with _refusing(call):
            if call.messages is not None:
                return self._place_of_messages(call, chats)
            return self._place_of_prompt(call, chats)

    def branch(self, call: Call) -> Opens:
        """Open a Rollout for a call whose Rollout was continued by another call."""
        with _refusing(call):
            return Opens(_prompt(call, self.chats), Break.BRANCH)

    def on_open(self, rollout_id: str, call: Call) -> None:
        """Add the Rollout that was opened for this call."""
        conversation = None
        if call.messages is not None:
            conversation = Conversation.opened(rollout_id, call.messages, call.tools)
        self._open[rollout_id] = _Open(call, conversation)

    def on_continue(self, rollout_id: str, call: Call) -> None:
        """Note that this call continues the Rollout."""
        entry = self._open[rollout_id]
        entry.call, entry.rollout = call, None
        if entry.conversation is not None:
            entry.conversation = entry.conversation.with_call(call.messages or ())

    def on_turn(self, rollout: Rollout) -> Reply:
        """Add a finished turn, whose tokens `rollout` includes. Return the reply to its call."""
        entry = self._open[rollout.rollout_id]
        reply = self._reply(entry, rollout)
        entry.rollout, entry.assistant = rollout, reply.message
        entry.num_turns += 1
        if entry.conversation is not None:
            entry.conversation = entry.conversation.with_answer(reply.message)
        return reply

    # Private

    def _place_of_messages(self, call: Call, chats: Chats) -> Continues | Opens:
        assert call.messages is not None
        chat = chats.for_tools(call.tools)
        known = [entry.conversation for entry in self._open.values() if entry.conversation is not None]
        found = match(call.messages, call.tools, known, lambda role: role in ROLES and chat.fit(role).exact)
        if found.key is not None:
            entry = self._open[found.key]
            assert entry.rollout is not None
            turn_ids = sampled_turns(entry.rollout)[-1]
            try:
                new = chat.continuation(turn_ids, _for_template(found.new), entry.assistant)
                return Continues(found.key, new, entry.rollout.num_tokens)
            except ValueError:
                return Opens(_prompt(call, chats), Break.TEMPLATE)
        return Opens(_prompt(call, chats), found.reason)

    def _place_of_prompt(self, call: Call, chats: Chats) -> Continues | Opens:
        """Continue the Rollout with whose tokens the prompt begins."""
        prompt = _prompt(call, chats)
        ids = prompt.ids
        if not ids:
            raise CallRefused("the prompt has no token", "prompt")
        if (wrong := next((i for i in ids if not 0 <= i < chats.vocab_size), None)) is not None:
            raise CallRefused(f"{wrong} is no token id: those of the model are 0 to {chats.vocab_size - 1}", "prompt")
        for rollout_id, entry in self._open.items():
            if entry.rollout is None:
                continue
            so_far = (*entry.rollout.prompt.ids, *entry.rollout.token_ids())
            if len(ids) > len(so_far) and ids[: len(so_far)] == so_far:
                new = Prompt(ids[len(so_far) :])
                chats.check_text(new)
                return Continues(rollout_id, new, entry.rollout.num_tokens)
        chats.check_text(prompt)
        return Opens(prompt, Break.HISTORY if self._open else None)

    def _reply(self, entry: _Open, rollout: Rollout) -> Reply:
        assert rollout.stop_reason is not None
        num = len(sampled_turns(rollout)[-1]) if rollout.segments and rollout.segments[-1].trainable else 0
        ids, logprobs, versions = _last_tokens(rollout, num)
        call = entry.call
        if call.messages is not None:
            text = self.chats.for_tools(call.tools).text(ids.tolist())
        else:
            text = self.chats.decode(ids.tolist())
        text = before_stop(text, call.stop)
        reply_id = f"{rollout.rollout_id}/{entry.num_turns}"
        calls: tuple[ToolCall, ...] = ()
        if call.tools and call.reads_calls:
            text, calls = _split_calls(text, self.chats.tool_format, reply_id)
        before = (*rollout.prompt.ids, *rollout.token_ids()[: rollout.num_tokens - num])
        return Reply(reply_id, text, calls, rollout.stop_reason, before, ids, logprobs, versions)


class LargeCalls:
    """Limits for calls with much text, of one run: tokenised in a thread, with a tokenizer of its own because two
    threads may not share one. `most_tokens`: maximum of a Rollout, prompt included."""

    def __init__(self, chats: Chats, most_tokens: int) -> None:
        self.chats, self.most_tokens = chats, most_tokens

    async def place_of(self, call: Call, conversations: Conversations) -> Continues | Opens:
        """Return `conversations.place_of(call)`; the caller holds a lock on `conversations`. A small call is placed
        without yielding to the event loop. BudgetUsedUp for more text than `most_tokens` tokens can hold."""
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
        if num <= LARGE_CHARACTERS or call.shows_images:  # the model's processor is not thread-safe
            return conversations.place_of(call)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: conversations.place_of(call, self._chats_of_thread))

    # Private

    @cached_property
    def _longest_token(self) -> int:
        """In characters: a text of N tokens has at most N times as many."""
        return max(map(len, self.chats.tokenizer.get_vocab()))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "large calls")

    @cached_property
    def _chats_of_thread(self) -> Chats:
        """Created and used in the thread only."""
        chats = self.chats
        return Chats(copy.deepcopy(chats.tokenizer), chats.tool_format, chats.vocab_size, processor=chats.processor)


async def with_stored_images(call: Call, store: Store) -> Call:
    """Return the call with each image stored by `store`, in a thread. NotSupported for an invalid image, and for more
    than MOST_PIXELS in total: a small file may hold a large image, and all are decoded at once."""
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
    """Return the number of characters of a call's text; of token ids for a prompt of these."""
    return len(call.prompt or ()) + _num_in(call.messages or ()) + _num_in(call.tools)


def _num_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_in(key) + _num_in(inner) for key, inner in value.items())
    return sum(map(_num_in, value)) if isinstance(value, list | tuple) else 0


def _prompt(call: Call, chats: Chats) -> Prompt:
    """Encode the whole call."""
    if call.messages is not None:
        return chats.for_tools(call.tools).prompt(_for_template(call.messages))
    prompt = call.prompt
    if isinstance(prompt, str):
        return Prompt.of(chats.tokenizer(whole_characters(prompt))["input_ids"])
    return Prompt.of(prompt or ())


@contextmanager
def _refusing(call: Call) -> Iterator[None]:
    """Raise CallRefused for a call that cannot be encoded."""
    try:
        yield
    except CallRefused:
        raise
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CallRefused(why, "messages" if call.messages is not None else "prompt") from error


def _for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as `Chat` takes them: contents are texts or parts with images, arguments of calls JSON values."""
    return [_message_for_template(message) for message in messages]


def _message_for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    out = {name: value for name, value in message.items() if value is not None}
    content = out.get("content")
    out["content"] = content if shows_images(content) else text_of(content)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [dict(call) | {"function": _parsed_function(call["function"])} for call in calls]
    return out


def _parsed_function(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(function) | {"arguments": json.loads(function["arguments"])}
    except (TypeError, ValueError, KeyError):
        return dict(function)


def _last_tokens(rollout: Rollout, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, log-probs and versions of the last `num` tokens, all sampled."""
    ids, logprobs, versions = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
    for segment in rollout.segments:
        ids.append(segment.token_ids)
        logprobs.append(segment.logprobs)
        versions.append(np.full(len(segment), segment.policy_version, np.int32))
    first = rollout.num_tokens - num
    return tuple(np.concatenate(parts)[first:] for parts in (ids, logprobs, versions))  # type: ignore[return-value]


def _split_calls(text: str, tool_format: str, reply_id: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text without its calls, and the calls; the whole text if one of them is malformed."""
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


# Of several reasons, `match` reports the one of the Rollout that the call came closest to continuing.
_NEARNESS = {Break.HISTORY: 0, Break.BRANCH: 1, Break.TOOLS: 2, Break.TEMPLATE: 3}


def _continues(messages: tuple[str, ...], conversation: Conversation) -> bool:
    """Whether the messages are those of the Rollout and new ones, none of them the assistant's."""
    num = len(conversation.messages)
    if conversation.in_flight or len(messages) <= num or messages[:num] != conversation.messages:
        return False
    return not any(_is_assistant(message) for message in messages[num:])


def _branches(messages: tuple[str, ...], conversation: Conversation) -> bool:
    """Whether the messages continue an earlier point of the Rollout: its opening, or one of its turns."""
    shared = 0
    for known, message in zip(conversation.messages, messages, strict=False):
        if known != message:
            break
        shared += 1
    if shared == len(messages):
        return True
    if shared == len(conversation.messages):
        return conversation.in_flight
    return shared > 0 and _is_assistant(conversation.messages[shared - 1])


def _is_assistant(message: str) -> bool:
    return json.loads(message)["role"] == "assistant"


def _parts(message: Message) -> dict[str, Any]:
    role = message.get("role")
    parts: dict[str, Any] = {"role": role, "text": _shown(message.get("content"))}
    if role != "assistant":
        return parts | ({"name": message["name"]} if message.get("name") else {})
    if message.get("reasoning_content"):
        parts["reasoning"] = text_of(message["reasoning_content"])
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return parts | ({"calls": calls} if calls else {})


def _shown(content: Any) -> str | list[Any]:
    """Return the text of a content, or its texts and the digests of its images."""
    if not shows_images(content):
        return text_of(content)
    return [part["text"] if part["type"] == "text" else [part["sha256"]] for part in content]


def _call(call: Mapping[str, Any]) -> list[Any]:
    """Return a call's name, and its arguments as a JSON value, since clients format the text differently."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # compared as it stands
    return [function.get("name"), arguments]
