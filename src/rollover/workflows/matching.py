"""Which open Rollout a model call continues, by its messages; and the key by which a call's randomness is found. Pure.

A call continues a Rollout if its messages begin with those that the Rollout has, the assistant's as they were returned,
and its tools are the same: what is new is then appended as an environment's tokens. Nothing that was sampled is
rendered or tokenised again. Every other call opens a Rollout of its own, whose prompt is the whole conversation.

    messages of the call:  [ opening | assistant, as returned | ... | assistant, as returned ][ new ones ]
                           [---------------- those of an open Rollout ---------------------- ][ appended ]
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollover.tasks.image_parts import shows_images
from rollover.types import Prompt

Message = Mapping[str, Any]


class Break(enum.Enum):
    """Why a call that is not the first of its trajectory opens a Rollout."""

    HISTORY = "history"
    """What went before is not in the call as it was: the agent cut, summarised or rewrote it, or began anew."""
    BRANCH = "branch"
    """It goes on from a point that the Rollout has grown beyond, or from a turn that is under way."""
    TOOLS = "tools"
    """The messages go on, and other tools are offered."""
    TEMPLATE = "template"
    """The chat template cannot write the new messages behind the tokens that were sampled."""


@dataclass(frozen=True)
class Conversation:
    """What the calls of one open Rollout have said so far.

    `messages`: all of them, in canonical form (`canonical`), the last one the assistant's as it was returned; or, while
    the turn is `under_way`, those of its call. `tools`: as `canonical_tools`.
    """

    key: str
    """The Rollout's id."""
    messages: tuple[str, ...]
    tools: str
    under_way: bool = False

    @classmethod
    def opened(cls, key: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Conversation:
        """A Rollout whose first turn is under way."""
        return cls(key, canonical(messages), canonical_tools(tools), under_way=True)

    def asked(self, messages: Sequence[Message]) -> Conversation:
        """It goes on by a call with these messages."""
        return Conversation(self.key, canonical(messages), self.tools, under_way=True)

    def answered(self, assistant: Message) -> Conversation:
        """Its turn has ended with this message."""
        return Conversation(self.key, (*self.messages, *canonical([assistant])), self.tools)


@dataclass(frozen=True)
class Match:
    """What becomes of a call: it continues the Rollout `key` with `new` messages, or opens one as `reason` says.

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
    """What becomes of a call with these messages and tools, in a trajectory that has these open Rollouts.

    Of several that it continues (equal ones, sampled with equal text) the oldest takes it. `can_follow`: whether the
    chat template can write a message of the role behind a sampled turn, token by token as in the whole conversation.
    """
    asked, offered = canonical(messages), canonical_tools(tools)
    reason: Break | None = None
    for conversation in conversations:
        num = len(conversation.messages)
        if _continues(asked, conversation):
            new = tuple(messages[num:])
            if conversation.tools != offered:
                why = Break.TOOLS
            elif not all(can_follow(str(message.get("role"))) for message in new):
                why = Break.TEMPLATE
            else:
                return Match(conversation.key, new)
        else:
            why = Break.BRANCH if _branches(asked, conversation) else Break.HISTORY
        reason = why if reason is None or _NEARNESS[why] > _NEARNESS[reason] else reason
    return Match(reason=reason)


def canonical(messages: Iterable[Message]) -> tuple[str, ...]:
    """Each message as a text that is equal for equal messages, however the client writes them.

    Compared are the role, the text (parts of text are joined; none and an empty one are the same), the bytes of images
    (`Call.messages` have them stored), and of an assistant
    the reasoning and the calls of tools: their names, and their arguments as JSON values. Of other messages the name
    counts, too. Ids of calls do not: clients rename them; nor do keys that are not known here.
    """
    return tuple(json.dumps(_parts(message), sort_keys=True, ensure_ascii=False) for message in messages)


def canonical_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """The definitions of the tools as one text, equal for equal definitions in the same order."""
    return json.dumps([dict(tool) for tool in tools], sort_keys=True, ensure_ascii=False, default=str)


def text_of(content: Any) -> str:
    """The text of a message's content: a text, none, or parts of the type text. ValueError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise ValueError("the content of a message must be a text, or a list of parts of the types text and image_url")


def turn_key(role: str, prompt: Prompt, max_tokens: int | None, stop: Sequence[str], occurrence: int) -> int:
    """64-bit key of a turn within its Episode: equal for the same question asked again by another run of the workflow.

    `prompt`: all that was before the turn. `occurrence`: how many turns of the Episode had the same question before;
    which of them is which does not matter, as equal prompts are exchangeable.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps([role, max_tokens, list(stop), occurrence]).encode())
    digest.update(np.asarray(prompt.ids, "<i4").tobytes())
    for media in prompt.media:
        digest.update(media.digest.encode())
    return int.from_bytes(digest.digest(), "little")


# Private

# Of several reasons, the one of the Rollout that the call came nearest to continuing.
_NEARNESS = {Break.HISTORY: 0, Break.BRANCH: 1, Break.TOOLS: 2, Break.TEMPLATE: 3}


def _continues(asked: tuple[str, ...], conversation: Conversation) -> bool:
    """Whether the call has all messages of the Rollout, and new ones none of which is the assistant's."""
    num = len(conversation.messages)
    if conversation.under_way or len(asked) <= num or asked[:num] != conversation.messages:
        return False
    return not any(_is_assistant(message) for message in asked[num:])


def _branches(asked: tuple[str, ...], conversation: Conversation) -> bool:
    """Whether the call goes on from an earlier point of the Rollout: its opening, or one of its turns."""
    shared = 0
    for ours, theirs in zip(conversation.messages, asked, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared == len(asked):
        return True
    if shared == len(conversation.messages):
        return conversation.under_way
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
    """The text of a content, or its texts and the hashes of its images."""
    if not shows_images(content):
        return text_of(content)
    return [part["text"] if part["type"] == "text" else [part["sha256"]] for part in content]


def _call(call: Mapping[str, Any]) -> list[Any]:
    """A call's name, and its arguments as a JSON value: clients write the text of it anew."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # compared as it stands
    return [function.get("name"), arguments]
