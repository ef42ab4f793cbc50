"""An agent as a separate program: standard library only, a client of any OpenAI-compatible server.

`rollover train calculator_agent` runs it (workflow.command, docs/agents.md). It reads its task from stdin, calls a
calculator over some turns, and prints its answer as the last line.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.request
from typing import Any

from rollover.recipes.arithmetic import value_of

MAX_TURNS = 3
INSTRUCTION = "To have an expression computed write it in double brackets: [[12*34]]"
# Examples before the question: without them small models never call a tool, so there is nothing to reinforce.
OPENING = (
    {"role": "system", "content": INSTRUCTION},
    {"role": "user", "content": "What is 12*34?"},
    {"role": "assistant", "content": "[[12*34]]"},
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "The answer is 408"},
    {"role": "user", "content": "What is 65*87?"},
    {"role": "assistant", "content": "[[65*87]]"},
    {"role": "tool", "content": "5655"},
    {"role": "assistant", "content": "The answer is 5655"},
)


def main() -> None:
    task = json.load(sys.stdin)
    messages, text = [*OPENING, {"role": "user", "content": task["prompt"]}], ""
    for _ in range(MAX_TURNS):
        if (reply := complete(messages)) is None:
            break
        text = reply["content"]
        if not (calls := re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)):
            break
        messages += [reply, *({"role": "tool", "content": computed(expression)} for expression in calls)]
    print(json.dumps({"answer": text}))


def complete(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the model's next message, None without tokens left for one."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if json.load(error)["error"]["code"] == "context_length_exceeded":
            return None
        raise


def computed(expression: str) -> str:
    try:
        return value_of(expression)
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"


if __name__ == "__main__":
    main()
