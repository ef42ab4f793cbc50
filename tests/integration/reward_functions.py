"""Reward functions that a program hands over as objects. A worker process imports their module: with that of a test it
would import torch, transformers and pytest, too, which takes four seconds a run."""

from __future__ import annotations

from typing import Any


def digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / 48 for text in completions]


def share_of_letters(completions: list[str], **kwargs: Any) -> list[float]:
    """How many of the characters are lower-case letters."""
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]


def unique_chars(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(set(one[-1]["content"]))) for one in completions]


async def has_letter(completions: list[Any], letter: list[str], log_metric: Any, **kwargs: Any) -> list[float | None]:
    log_metric("asked", 2.0)
    return [None if a == "a" else float(a in one[-1]["content"]) for one, a in zip(completions, letter, strict=True)]
