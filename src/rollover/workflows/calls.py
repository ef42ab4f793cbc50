"""A model call of a workflow, from Python or over HTTP: `Call`, `Reply`, and the errors of refused calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollover.openai_wire import Refusal
from rollover.tasks.image_parts import shows_images
from rollover.types import StopReason

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
