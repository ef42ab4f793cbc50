"""Reads the final answer out of a completion by one documented rule (`tasks.answer_rule`), and out of a task's columns.

Owns the rules and the comparison of two answers. Never scores anything.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

# A sign belongs to the number unless it stands behind an operand: in "5-3" the last number is 3, in "= -3" it is -3.
# Before numbers: times (7:30, 12:05:59), then fractions (3/4), which are no part of a date, a ratio or a decimal.
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
    """The final answer in `text` (a completion), or None if there is none.

    last_number: the last number, with its sign; no separators ("-3", "1,234.5" -> "1234.5", "7." -> "7"). Fractions
    (3/4) and times (7:30) are one number; a division with a whole result (12/4) is not carried out: it reads 4.
    last_line: the last line that is not blank. answer_tag: inside the last <answer>...</answer>. boxed: inside the last
    \\boxed{...}, braces balanced. full_text: all of it. All are stripped; an empty one is None.
    Raises ValueError for an unknown rule.
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
    """What stands inside the last complete \\boxed{...}; nested braces are balanced. None without one.

    `must_end`: None also where a later one is not complete, as verl has it.
    """
    opened: list[int] = []  # where the braces that are open begin, and what is in them
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
    """The reference answer of a task: verl's reward_model.ground_truth, else answer, solution or ground_truth."""
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    names = ("answer", "solution", "ground_truth")
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def reference_answer(answer: object) -> str:
    """The final answer in a dataset's answer column: after the last "####" (GSM8K), else inside the last \\boxed{...}
    (MATH), else all of it."""
    text = str(answer)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed.strip()


def same_answer(answer: str, reference: str) -> bool:
    """Equal as numbers if both are numbers (signs, separators, decimals and simple fractions understood; 5% is 5), else
    equal as text, without regard to case, runs of white space, surrounding $ and a final period."""
    left, right = _normalise(answer), _normalise(reference)
    if left == right:
        return True
    number = _as_number(left)
    return number is not None and number == _as_number(right)


def can_read(reference: str, rule: str) -> bool:
    """Whether a completion that states `reference` as `rule` expects it is right."""
    answer = extract_answer(_WRITTEN.get(rule, "{}").format(reference), rule)
    return answer is not None and same_answer(answer, reference)


def answer_key(answer: str) -> str:
    """A text that two answers share where they are the `same_answer`."""
    text = _normalise(answer)
    number = _as_number(text)
    return text if number is None else str(number)


def _normalise(text: str) -> str:
    return " ".join(text.replace("\N{MINUS SIGN}", "-").casefold().strip().strip("$").rstrip(".").split())


def _as_number(text: str) -> Fraction | None:
    text = text.replace(",", "").removeprefix("$").removesuffix("%").removesuffix("\\").rstrip()
    if len(text) > 100 or re.search(r"e[+-]?\d{4,}", text):  # 1e999999999 is legal, and would take all memory
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
