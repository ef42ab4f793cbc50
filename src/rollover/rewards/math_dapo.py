"""DAPO's rule for mathematics: what follows the last "Answer:", normalised as in Minerva, equals the reference.

As verl has it (verl/utils/reward_score/math_dapo.py, 0.9.1), which DAPO's recipe trains with; the normalisation is that
of Lewkowycz et al. 2022 (arXiv 2206.14858, appendix D.1). tests/parity holds it to verl.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rollover.rewards.answers import last_boxed
from rollover.rewards.rules import reference_of

_TAIL_CHARS, _BOX_CHARS = 300, 100
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_NONE = "[INVALID]"
# Written otherwise, in this order.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
# Dropped, in this order: units, and what sets a text.
_DROPPED = (
    *"square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm"
    " pounds meters meals edges students childrentickets multiples \\text{s} \\text{.}".split(),
    "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;",
    ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITTEN = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def math_dapo(
    strict_box: bool = False, correct: float = 1.0, wrong: float = -1.0
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`correct` or `wrong`, `acc`, which is 1 or 0, and `pred`, the answer that was read.

    The answer is what follows the last "Answer:" of the last 300 characters; where there is none, the last box of the
    last 100, which has to equal the reference as it is written. `strict_box`: only that.
    """

    def score(item: dict[str, Any]) -> dict[str, Any]:
        tail, reference = item["completion"][-_TAIL_CHARS:], str(reference_of(item, "math_dapo"))
        said = [] if strict_box else _ANSWER.findall(tail)
        answer = _normalised(said[-1]) if said else _NONE
        if answer != _NONE:
            is_right = answer == _normalised(reference)
        else:
            answer = last_boxed(tail[-_BOX_CHARS:], must_end=True)
            is_right = answer == reference
        return {"score": correct if is_right else wrong, "acc": float(is_right), "pred": answer}

    return score


def _normalised(text: str) -> str:
    text = text.split("=")[-1]
    for old, new in (*_REPLACED, *((unit, "") for unit in _DROPPED)):
        text = text.replace(old, new)
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()
