"""How a conversation becomes a prompt: an answer is opened behind it, or the one at its end is continued. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def prompt_arguments(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """(the messages, the arguments of apply_chat_template) for a prompt that the policy goes on with.

    An assistant's message at the end is an answer that was begun ("Let me think. <think>"): the template does not close
    it. An empty one begins nothing.
    """
    found = [dict(message) for message in messages]
    if not found or found[-1].get("role") != "assistant" or found[-1].get("tool_calls"):
        return found, {"add_generation_prompt": True}
    content = found[-1].get("content")
    if not content or (isinstance(content, str) and not content.strip()):
        return found[:-1], {"add_generation_prompt": True}
    return found, {"add_generation_prompt": False, "continue_final_message": True}
