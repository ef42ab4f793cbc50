"""A verifiers harness that runs in this process: a chat with the task's tools.

Other harnesses start a program per rollout; this one calls the same endpoint without that. package.py registers the
module, and verifiers finds the class by `__all__`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

vf: Any = importlib.import_module("verifiers.v1")
_mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
_wire: Any = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
_aiohttp: Any = importlib.import_module("aiohttp")

__all__ = ["ChatHarness"]

_NO_ROOM = "context_length_exceeded"


class ChatHarness(vf.Harness):
    """A chat until an answer has no tool call, or the context has no room for another turn."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(_wire, prompt or ())
        async with AsyncExitStack() as stack:
            timeout = _aiohttp.ClientTimeout(
                total=None
            )  # the policy may pause, which workflow.timeout_s does not count
            headers = {"Authorization": f"Bearer {secret}"}
            client = await stack.enter_async_context(_aiohttp.ClientSession(timeout=timeout, headers=headers))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, places, connections = await _mcp.connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                async with client.post(f"{endpoint}/chat/completions", json=body) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    is_full = answer.status == 400 and _NO_ROOM in text
                    return vf.ProgramResult(exit_code=0 if is_full else 1, stdout="", stderr="" if is_full else text)
                message = json.loads(text)["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    name, said = call["function"]["name"], call["function"]["arguments"]
                    content = await _called(name, said, places, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


async def _called(name: str, said: str, places: Mapping[str, Any], connections: Mapping[str, Any]) -> Any:
    """Return the tool's answer, or an error for the policy about an invalid call."""
    try:
        arguments = json.loads(said or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    if name not in places:
        return f"error: there is no tool {name!r}"
    return await _mcp.call_mcp(connections, places, name, arguments)
