"""Arguments of a chat template: open an answer, or continue the one at the end of the conversation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def prompt_arguments(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Return (the messages, the arguments of apply_chat_template) for a prompt that the policy continues.

    An assistant's message at the end is a started answer ("Let me think. <think>"): the template does not close it. An
    empty one is ignored.
    """
    found = [dict(message) for message in messages]
    if not found or found[-1].get("role") != "assistant" or found[-1].get("tool_calls"):
        return found, {"add_generation_prompt": True}
    content = found[-1].get("content")
    if not content or (isinstance(content, str) and not content.strip()):
        return found[:-1], {"add_generation_prompt": True}
    return found, {"add_generation_prompt": False, "continue_final_message": True}
