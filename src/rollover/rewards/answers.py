"""Final answers: read from a completion by a rule (`tasks.answer_rule`), or from a task's columns, and compared."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

# A sign after an operand is not part of the number: in "5-3" the last number is 3, in "= -3" it is -3.
# Before plain numbers: times (7:30, 12:05:59); fractions (3/4) that are no part of a date, ratio or decimal.
_NUMBER = re.compile(
    r"(?<![\d:.,/])\d{1,2}:[0-5]\d(?::[0-5]\d)?(?![\d:]|\.\d)"
    r"|(?:(?<![\w).,])-)?(?:(?<![\d/.,])\d+/\d+(?![\d/]|\.\d)|(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
    r"(?:[eE][+-]?\d+)?)|(?<![\w.])-?\.\d+"
)
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = "\\boxed{"
_BRACE = re.compile(r"[{}]")

_WRITTEN = {"answer_tag": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}"}
RULES = ("last_number", "last_line", "answer_tag", "boxed", "full_text")


def extract_answer(text: str, rule: str) -> str | None:
    """Return the final answer in `text` (a completion), or None.

    last_number: the last number, with its sign, without separators ("-3", "1,234.5" -> "1234.5", "7." -> "7").
    Fractions (3/4) and times (7:30) are one number; of a division with a whole result (12/4), the divisor is read.
    last_line: the last line that is not blank. answer_tag: inside the last <answer>...</answer>. boxed: inside the last
    \\boxed{...}, braces balanced. full_text: the whole text. Answers are stripped; an empty one is None. ValueError for
    an unknown rule.
    """
    if rule == "last_number":
        answer = _last_number(text)
    elif rule == "last_line":
        answer = next((line for line in reversed(text.splitlines()) if line.strip()), None)
    elif rule == "answer_tag":
        answer = next(iter(reversed(_ANSWER_TAG.findall(text))), None)
    elif rule == "boxed":
        answer = last_boxed(text)
    elif rule == "full_text":
        answer = text
    else:
        raise ValueError(f"tasks.answer_rule: unknown rule {rule!r}; the rules are {', '.join(RULES)}")
    return (answer or "").strip() or None


def _last_number(text: str) -> str | None:
    matches = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not matches:
        return None
    number = matches[-1].replace(",", "")
    value = _as_number(number)
    return number.rpartition("/")[2] if value is None or value.denominator == 1 else number


def last_boxed(text: str, *, must_end: bool = False) -> str | None:
    """Return the content of the last complete \\boxed{...}, with balanced braces, or None.

    `must_end`: None also if a later one is incomplete, as in verl.
    """
    opened: list[int] = []  # positions after the open braces
    last, begin = -1, -1
    for found in _BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.end())
        elif opened and text.endswith(_BOXED, 0, start := opened.pop()) and start > begin:
            begin, last = start, found.start()
    if begin < 0 or must_end and begin != text.rfind(_BOXED) + len(_BOXED):
        return None
    return text[begin:last]


def answer_of(columns: dict[str, Any]) -> Any:
    """Return a task's reference answer: verl's reward_model.ground_truth, else answer, solution or ground_truth."""
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    names = ("answer", "solution", "ground_truth")
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def reference_answer(answer: object) -> str:
    """Return the final answer in an answer column: after the last "####" (GSM8K), else inside the last \\boxed{...}
    (MATH), else the whole text."""
    text = str(answer)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed.strip()


def same_answer(answer: str, reference: str) -> bool:
    """Return whether two answers are equal as numbers (signs, separators, decimals, simple fractions; 5% is 5), else as
    text, without regard to case, runs of white space, surrounding $ and a final period."""
    left, right = _normalise(answer), _normalise(reference)
    if left == right:
        return True
    number = _as_number(left)
    return number is not None and number == _as_number(right)


def can_read(reference: str, rule: str) -> bool:
    """Return whether `rule` can read `reference` from a completion that states it as the rule expects."""
    answer = extract_answer(_WRITTEN.get(rule, "{}").format(reference), rule)
    return answer is not None and same_answer(answer, reference)


def answer_key(answer: str) -> str:
    """Return a text that is equal for equal answers (`same_answer`)."""
    text = _normalise(answer)
    number = _as_number(text)
    return text if number is None else str(number)


def _normalise(text: str) -> str:
    return " ".join(text.replace("\N{MINUS SIGN}", "-").casefold().strip().strip("$").rstrip(".").split())


def _as_number(text: str) -> Fraction | None:
    text = text.replace(",", "").removeprefix("$").removesuffix("%").removesuffix("\\").rstrip()
    if len(text) > 100 or re.search(r"e[+-]?\d{4,}", text):  # 1e999999999 is legal, and would use up the memory
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
