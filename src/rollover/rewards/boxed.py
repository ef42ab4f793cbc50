"""The rule of the MATH benchmark: the last box, compared with the reference as a normalised LaTeX text.

Normalisation is that of Hendrycks et al. 2021 (arXiv 2103.03874) as verl uses it (verl/utils/reward_score/
math_reward.py, 0.9.1); tests/parity holds it to that.
"""

from __future__ import annotations

import re
from typing import Any

from rollover.rewards.answers import last_boxed, reference_answer
from rollover.rewards.rules import Score, reference_of

_BOXED = "\\boxed"
# In this order: what is dropped or written otherwise before anything is parsed.
_REPLACED = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_UNIT = "\\text{ "
_FRACTION = re.compile(r"(-?\d{1,4000})/(-?\d{1,4000})")  # what Python's int reads


class _Unreadable(Exception):
    """A text that the normalisation cannot take."""


def boxed() -> Score:
    """1 where the last box of the completion equals the reference as normalised LaTeX, else 0."""

    def score(item: dict[str, Any]) -> float:
        reference = reference_answer(reference_of(item, "boxed"))
        answer = _last_box(item["completion"])
        return float(answer is not None and _equal(answer, reference))

    return score


def _last_box(text: str) -> str | None:
    r"""What the last \boxed holds: up to the brace that closes it, or behind `\boxed ` up to a $. None where it is not
    complete, and where neither follows."""
    if f"{_BOXED} " in text:
        return text.rpartition(f"{_BOXED} ")[2].partition("$")[0]
    if text.rfind(_BOXED) > text.rfind(f"{_BOXED}{{"):
        return None
    return last_boxed(text, must_end=True)


def _equal(answer: str, reference: str) -> bool:
    try:
        return _normalised(answer) == _normalised(reference)
    except _Unreadable:
        return answer == reference


def _normalised(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    if _UNIT in text:
        text, *units = text.split(_UNIT)
        if len(units) > 1:
            raise _Unreadable
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    name, *values = text.split("=")
    if len(values) == 1 and len(name) <= 2:  # x = 5
        text = values[0]
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    whole = _FRACTION.fullmatch(text)
    if whole and text == f"{int(whole[1])}/{int(whole[2])}":
        return f"\\frac{{{whole[1]}}}{{{whole[2]}}}"
    return text


def _with_roots(text: str) -> str:
    r"""\sqrt3 as \sqrt{3}."""
    first, *others = text.split("\\sqrt")
    if not all(others):
        raise _Unreadable
    return first + "".join("\\sqrt" + (o if o[0] == "{" else f"{{{o[0]}}}{o[1:]}") for o in others)


def _with_fractions(text: str) -> str:
    r"""\frac12 as \frac{1}{2}. A \frac without two arguments leaves the whole text as it is."""
    first, *others = text.split("\\frac")
    out = first
    for other in others:
        if not other:
            raise _Unreadable
        if other[0] == "{":
            out += "\\frac" + other
        elif len(other) < 2:
            return text
        else:
            second = other[1:] if other[1] == "{" else f"{{{other[1]}}}{other[2:]}"
            out += f"\\frac{{{other[0]}}}{second}"
    return out
