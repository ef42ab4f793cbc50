"""A model call of a workflow and what answers it, by Python or over HTTP. No asyncio inside.

Owns the words for it: `Call`, `Reply`, `Caller`, and the reasons for which a call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rollover.openai_wire import Refusal
from rollover.tasks.image_parts import shows_images
from rollover.types import SamplingParams, StopReason

MODEL = "policy"
"""The name by which the run's model is asked for, and the role of whoever names none."""


@dataclass(frozen=True)
class Call:
    """What an agent asks of the policy. Exactly one of `messages` and `prompt` is set; sampling is the run's.

    Images of `messages` are parts as in types.Task once `with_stored_images` has been called.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    """A text, or token ids, that no chat template is laid over."""
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = True
    """Whether calls of `tools` are read out of the answer; else they stay in its text."""
    max_tokens: int | None = None
    """Of this turn; None: what is left of the Rollout's budget."""
    stop: tuple[str, ...] = ()
    """Besides rollout.stop; not in the text that is returned, as the protocol of such calls wants it."""

    @property
    def shows_images(self) -> bool:
        return any(shows_images(message.get("content")) for message in self.messages or ())


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer. `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, eq=False)
class Reply:
    """One turn: its text, and exactly what was sampled.

    prompt_ids: all token ids before the turn. token_ids int32 [n], logprobs float32 [n], versions int32 [n] of the
    sampled tokens. `text`: without the end-of-turn token and without `tool_calls`.
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
        """As an assistant's message, to be given back in the next call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": of.call_id, "type": "function", "function": {"name": of.name, "arguments": of.arguments}}
                for of in self.tool_calls
            ]
        return message


class CallRefused(Refusal):
    """A call that is not answered."""


class NotSupported(CallRefused):
    """It asks for what this run cannot do."""

    code = "unsupported_parameter"


class BudgetUsedUp(CallRefused):
    """The Rollout, or the Episode, may get no more tokens or turns, or the prompt is too long for the model."""

    code = "context_length_exceeded"


class UnknownKey(CallRefused):
    """No open trajectory has this key."""

    status, code = 401, "invalid_api_key"


class UnknownModel(CallRefused):
    """The model is not the run's."""

    status, code = 404, "model_not_found"


class Caller(Protocol):
    """Answers the calls of open trajectories, each named by its key."""

    @property
    def sampling(self) -> SamplingParams:
        """The run's, which every call gets."""
        ...

    def models(self) -> Sequence[str]:
        """The names by which the policy can be asked for, the usual one first."""
        ...

    def find(self, key: str, model: str) -> None:
        """UnknownKey, or UnknownModel, where a call could not be made."""
        ...

    async def call(self, key: str, model: str, call: Call) -> Reply:
        """One turn. CallRefused where it is not answered. Cancelled: the agent has given the call up."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        ...
