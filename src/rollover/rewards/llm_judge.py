"""The reward `llm_judge`: a model behind an OpenAI-compatible endpoint is asked for a score of the completion.

What it answered is kept in a SQLite file (judge_cache.py): a run that goes on, or another with the same judge, pays for
nothing twice. The file counts what was spent, too, over all workers of a run. Where there is no score (the endpoint
fails, the budget is spent, the answer holds none) the reward is missing, never 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rollover.rewards.answers import answer_of
from rollover.rewards.judge_cache import Ask, JudgeCache
from rollover.rewards.service import Again, Service
from rollover.text import encodable
from rollover.types import content_text

_PROMPT = """Judge the answer to the question below.

[Question]
{prompt}

[Reference answer]
{answer}

[Answer to judge]
{completion}

How good is the answer, from {lowest} (useless or wrong) to {highest} (right and complete)? Say in a sentence why, then
end with a line "Score: " and the number."""
_PATTERN = r"[Ss]core\**\s*:[\s*]*(-?\d+(?:\.\d+)?)"
_MOST_TOKENS = 2**40  # of one answer: what an endpoint says beyond is no count


def llm_judge(  # noqa: PLR0913 - the parameters of the reward
    url: str,
    model: str,
    prompt: str = "",
    pattern: str = _PATTERN,
    lowest: float = 0.0,
    highest: float = 1.0,
    api_key_env: str = "OPENAI_API_KEY",
    options: dict[str, Any] | None = None,
    cache: str = "",
    max_tokens_spent: int = 0,
    timeout_s: float = 20.0,
    concurrency: int = 16,
    retries: int = 4,
    base_dir: str = ".",
) -> Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, float]]]:
    """The function of an item. ValueError for a parameter that is wrong.

    url: of the API (https://api.openai.com/v1). prompt: a file, or the text itself, with {prompt}, {completion},
    {answer}, {lowest}, {highest} in it; other braces stay. pattern: a regular expression whose last match has the score
    as its first group. lowest, highest: the scale, which becomes 0 to 1; a score beyond it is none. options: further
    fields of the request (temperature is 0 unless given). api_key_env: the variable of the environment that has the
    key. cache: the file. max_tokens_spent: of prompts and answers as the endpoint counts them, over the file's life;
    0 = no limit. timeout_s: of one request, within rewards.timeout_s of the group's.
    """
    what = "the reward llm_judge"
    if not lowest < highest:
        raise ValueError(f"{what}: lowest = {lowest:g} is not below highest = {highest:g}")
    if max_tokens_spent < 0 or (max_tokens_spent and not cache):
        raise ValueError(f"{what}: max_tokens_spent needs cache, the file in which it is counted, and is not below 0")
    try:
        scored = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{what}: pattern = {pattern!r} is no regular expression ({error})") from None
    if not scored.groups:
        raise ValueError(f"{what}: pattern = {pattern!r} has no group: put the score in parentheses")
    template = _template(prompt, Path(base_dir))
    service = Service(
        what,
        url.rstrip("/") + "/chat/completions",
        timeout_s=timeout_s,
        concurrency=concurrency,
        retries=retries,
        token=os.environ.get(api_key_env, ""),
    )
    kept = JudgeCache(Path(base_dir) / cache, max_tokens_spent) if cache else None

    asked = _asker(service)

    async def score(item: dict[str, Any]) -> dict[str, float]:
        values = {
            "prompt": _text(item["prompt"]),
            "completion": item["completion"],
            "answer": "" if (answer := answer_of(item["columns"])) is None else str(answer),
            "lowest": f"{lowest:g}",
            "highest": f"{highest:g}",
        }
        text = re.sub(r"\{(prompt|completion|answer|lowest|highest)\}", lambda m: values[m[1]], template)
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "temperature": 0, **(options or {})}
        said = await (asked(body, lambda _: None) if kept is None else kept.said(body, asked))
        return {"score": (_score_in(said, scored, lowest, highest) - lowest) / (highest - lowest)}

    return score


def _asker(service: Service) -> Ask:
    """Asks the judge by this service for a text."""

    async def asked(body: dict[str, Any], paid: Callable[[int], None]) -> str:
        def read(answer: bytes) -> str:
            said, num_tokens = _said(answer)
            paid(num_tokens)  # also where it says nothing
            if not said:
                raise Again("an answer without a text")
            return said

        return await service.post(body, read)

    return asked


def _template(prompt: str, base_dir: Path) -> str:
    """The text itself, or that of the file it names. ValueError where the completion is not in it."""
    text = prompt or _PROMPT
    if prompt and "{" not in prompt and "\n" not in prompt:
        try:
            text = (base_dir / prompt).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the reward llm_judge: prompt = {prompt} cannot be read ({error})") from None
    if "{completion}" not in text:
        raise ValueError("the reward llm_judge: the prompt has no {completion}, so every answer would have one score")
    return text


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as the judge reads it: its messages one after the other, images by their names."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return content_text(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


def _said(answer: bytes) -> tuple[str, int]:
    """Its text, empty where it has none, and how many tokens the request took."""
    try:
        parsed = json.loads(answer)
        said = parsed["choices"][0]["message"]["content"]
        num_tokens = int((parsed.get("usage") or {}).get("total_tokens") or 0)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise Again("an answer that is none") from None
    return encodable(said) if isinstance(said, str) else "", min(max(num_tokens, 0), _MOST_TOKENS)


def _score_in(said: str, pattern: re.Pattern[str], lowest: float, highest: float) -> float:
    """ValueError where there is none within the scale."""
    found = [match.group(1) for match in pattern.finditer(said)]
    try:
        score = float(found[-1])
    except (IndexError, ValueError, TypeError):
        raise ValueError(f"the judge's answer holds no score: {said[-200:]!r}") from None
    if not lowest <= score <= highest:
        raise ValueError(f"the judge's score {score:g} is not between {lowest:g} and {highest:g}")
    return score
