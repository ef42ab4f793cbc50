"""An agent that Rollover trains as it is: a program of its own, of the standard library alone, which asks any server of
the OpenAI API. `rollover train calculator_agent` runs it (workflow.command, docs/agents.md).

It reads its task from its input, calls a calculator over some turns, and prints its answer as its last line.
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
# Worked examples, before the question: without one small models never call a tool, and nothing can be learned.
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
        if (reply := asked(messages)) is None:
            break
        text = reply["content"]
        if not (calls := re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)):
            break
        messages += [reply, *({"role": "tool", "content": computed(expression)} for expression in calls)]
    print(json.dumps({"answer": text}))


def asked(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The model's next message; None where it has no token left for one."""
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
