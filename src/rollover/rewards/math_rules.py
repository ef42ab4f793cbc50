"""Built-in rewards for mathematics: `boxed`, `math_dapo` and `math`.

    boxed      the rule of the MATH benchmark: the last box, compared with the reference as normalised LaTeX.
               Normalisation of Hendrycks et al. 2021 (arXiv 2103.03874), as in verl (verl/utils/reward_score/
               math_reward.py, 0.9.1)
    math_dapo  the rule of DAPO's recipe: the answer after the last "Answer:", as in verl (math_dapo.py, 0.9.1).
               Normalisation of Lewkowycz et al. 2022 (arXiv 2206.14858, appendix D.1)
    math       math-verify (Hugging Face) compares the expressions in a completion with the reference

tests/parity compares the first two with verl.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rollover.rewards.answers import last_boxed, reference_answer
from rollover.rewards.rules import Score, reference_of

_BOXED = "\\boxed"
# Applied in this order, before anything is parsed.
_REPLACED = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_UNIT = "\\text{ "
_FRACTION = re.compile(r"(-?\d{1,4000})/(-?\d{1,4000})")  # the digits that Python's int accepts


class _Unreadable(Exception):
    """The text cannot be normalised."""


def boxed() -> Score:
    """Score 1 if the last box of the completion equals the reference as normalised LaTeX, else 0."""

    def score(item: dict[str, Any]) -> float:
        reference = reference_answer(reference_of(item, "boxed"))
        answer = _last_box(item["completion"])
        return float(answer is not None and _equal(answer, reference))

    return score


def _last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed: up to the closing brace, or, after `\boxed `, up to a $. None if it is
    incomplete."""
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
    r"""Rewrite \sqrt3 as \sqrt{3}."""
    first, *others = text.split("\\sqrt")
    if not all(others):
        raise _Unreadable
    return first + "".join("\\sqrt" + (o if o[0] == "{" else f"{{{o[0]}}}{o[1:]}") for o in others)


def _with_fractions(text: str) -> str:
    r"""Rewrite \frac12 as \frac{1}{2}. Return the text unchanged if a \frac lacks arguments."""
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


_TAIL_CHARS, _BOX_CHARS = 300, 100
_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_NONE = "[INVALID]"
# Replaced, in this order.
_DAPO_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
# Dropped, in this order: units and formatting.
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
    """Score `correct` or `wrong`, with `acc` (1 or 0) and `pred`, the answer that was read.

    The answer follows the last "Answer:" in the last 300 characters; without one, it is the last box in the last 100,
    which must equal the reference as written. `strict_box`: only the box counts.
    """

    def score(item: dict[str, Any]) -> dict[str, Any]:
        tail, reference = item["completion"][-_TAIL_CHARS:], str(reference_of(item, "math_dapo"))
        found = [] if strict_box else _DAPO_ANSWER.findall(tail)
        answer = _normalised_as_minerva(found[-1]) if found else _NONE
        if answer != _NONE:
            is_right = answer == _normalised_as_minerva(reference)
        else:
            answer = last_boxed(tail[-_BOX_CHARS:], must_end=True)
            is_right = answer == reference
        return {"score": correct if is_right else wrong, "acc": float(is_right), "pred": answer}

    return score


def _normalised_as_minerva(text: str) -> str:
    text = text.split("=")[-1]
    for old, new in (*_DAPO_REPLACED, *((unit, "") for unit in _DROPPED)):
        text = text.replace(old, new)
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


def math(float_rounding: int = 6, strict: bool = True) -> Score:
    """Score 1 if any expression or LaTeX of the completion equals the reference, else 0. An unreadable answer is wrong;
    an unreadable reference is an error.

    `float_rounding`, `strict`: of math_verify.verify. math-verify's own time limits are off: they set an alarm in the
    process and count as wrong. rewards.timeout_s kills the worker instead, and the reward is missing.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ValueError("the reward math needs the package math-verify: pip install 'rollover[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns in each process that its limits are off
    of_reference, of_answer = [LatexExtractionConfig()], [ExprExtractionConfig(), LatexExtractionConfig()]

    def score(item: dict[str, Any]) -> float:
        text = reference_answer(reference_of(item, "math"))
        no_limit: Any = None
        reference = parse(f"\\boxed{{{text}}}", of_reference, parsing_timeout=no_limit)
        if not reference:
            raise ValueError(f"math-verify cannot read the answer {text!r:.100}")
        answer = parse(item["completion"], of_answer, parsing_timeout=no_limit)
        return float(any(equal(one, other) for one in reference for other in answer))

    def equal(reference: Any, answer: Any) -> bool:
        try:
            return verify(reference, answer, float_rounding, strict=strict, timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise  # no statement about the answer
        except Exception:  # as in math-verify: incomparable is not equal
            return False

    return score
