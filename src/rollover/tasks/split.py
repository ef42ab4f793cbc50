"""The split into training and evaluation problems, and the comparison of problems. Pure: no files, no state.

Training and evaluation never share a problem. A hash of the text by which a problem is compared decides its side, not a
seed or a row number, so the sides are equal in all runs. Equal problems have equal texts:

    tasks.sources.problem_key     a column's value, or the result of the user's function
    generators in UNORDERED       the problem's text with its operands sorted: 3 + 4 equals 4 + 3
    every other source            the problem's text, without regard to case and white space
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollover.functions import custom_function, described
from rollover.types import Task, content_text

SplitName = Literal["train", "eval"]


def key_of(text: str) -> int:
    """Return the 64-bit blake2b hash of a text: the key of a problem that the text identifies."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Split:
    """Decides the side of a problem by its keys: that of the text by which it is compared, then, if that is another
    one, that of its own text.

    A source with held-out rows (tasks.sources.eval_path, eval_split) is split by files. In any other source, the hash
    holds a problem out if first key / 2^64 < eval_fraction. `eval_file_keys`: of all problems in held-out files.
    `held_out_keys`: of rows that the hash holds out. `trained_keys`: of trained rows. All three as far as known.
    """

    eval_fraction: float
    eval_file_keys: frozenset[int] = frozenset()
    trained_keys: frozenset[int] = frozenset()
    held_out_keys: frozenset[int] = frozenset()

    def accepts(self, keys: Sequence[int], split: SplitName, by_file: bool) -> bool:
        """Return whether a problem of a source (split by file, or by hash) may be used on this side.

        No key is accepted on both sides, of whatever source. Problems of a held-out file are never trained. In a source
        split by hash, the first key decides; a held-out problem is not trained under another first key either, and not
        evaluated if a trained row has one of its keys.
        """
        if split == "train":
            fresh = by_file or not (self._held_out(keys[0]) or any(key in self.held_out_keys for key in keys))
            return fresh and not any(key in self.eval_file_keys for key in keys)
        if by_file:
            return True  # its rows come from the held-out file
        return self._held_out(keys[0]) and not self._trained(keys)

    def on_neither_side(self, keys: Sequence[int], by_file: bool) -> bool:
        """Return whether the hash holds the problem out, but a trained row has one of its keys."""
        return not by_file and self._held_out(keys[0]) and self._trained(keys)

    def _held_out(self, key: int) -> bool:
        return key < self.eval_fraction * 2**64

    def _trained(self, keys: Sequence[int]) -> bool:
        return any(key in self.trained_keys for key in keys)


Comparison = Callable[[Task], str]

_NUMBER = r"\d+(?:\.\d+)?"
_SUM = re.compile(rf"-?{_NUMBER}(?: [+-] -?{_NUMBER})+")
_TERM = re.compile(rf"([+-]?) ?(-?)({_NUMBER})")
_PRODUCT = re.compile(rf"-?{_NUMBER}(?: \* -?{_NUMBER})+")
_LIST = re.compile(rf"-?{_NUMBER}(?:, -?{_NUMBER})+")
_PREMISE = re.compile(r"(?<=\d\. ).+? (?=\.)")
_FORMULA = re.compile(r"\(([^()]+) ([∧∨→↔]) ([^()]+)\)")


def problem_text(problem: Task) -> str:
    """Return a problem's text without system messages, in lower case, with single spaces.

    Pass the problem before tasks.instruction is added. A plain prompt equals the same text in a user message. Images
    are compared by the digests of their files.
    """
    turns = [m for m in problem.messages or () if m["role"] != "system"]
    if problem.prompt is not None:
        text = problem.prompt
    elif len(turns) == 1:
        text = _said(turns[0])
    else:  # the texts have no line break, so it separates the turns
        return "\n".join(f"{m['role']}: {_normalised(_said(m))}" for m in turns)
    return _normalised(text)


def comparison_by(problem_key: str, otherwise: Comparison = problem_text) -> Comparison:
    """Return the comparison of a source: by tasks.sources.problem_key, or `otherwise`."""
    if ":" in problem_key:
        return _by_function(problem_key)
    if problem_key:
        return lambda problem: _of_column(problem, problem_key)
    return otherwise


def generator_comparison(name: str) -> Comparison:
    """Return the comparison of reasoning-gym's generator of that name."""
    ordered = UNORDERED.get(name)
    return problem_text if ordered is None else lambda problem: ordered(problem_text(problem))


def _said(message: Mapping[str, Any]) -> str:
    return content_text(message["content"], lambda part: f" [image {part.get('sha256', part.get('image'))}] ")


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def _of_column(problem: Task, column: str) -> str:
    """Return the column's value as text; the problem's text if it is empty."""
    value = problem.columns.get(column)
    return problem_text(problem) if value is None else f"{column} = {json.dumps(value, sort_keys=True)}"


def _by_function(spec: str) -> Comparison:
    own = custom_function("tasks.sources.problem_key", spec, "a text, the same for problems that are the same")

    def same(problem: Task) -> str:
        text = own(replace(problem, columns=dict(problem.columns)))  # columns that it may change
        if not isinstance(text, str):
            raise own.refused(f"{described(text)} for {problem.task_id}")
        return text

    return same


def _terms_sorted(text: str) -> str:
    """Rewrite `5 - -9 - 1` as sorted signed terms, `+5 +9 -1`; 0 is always positive."""

    def signed(match: re.Match[str]) -> str:
        outer, inner, number = match.groups()
        return ("-" if (outer == "-") != (inner == "-") and float(number) else "+") + number

    return _SUM.sub(lambda match: " ".join(sorted(map(signed, _TERM.finditer(match[0])))), text)


def _factors_sorted(text: str) -> str:
    return _PRODUCT.sub(lambda match: " * ".join(sorted(match[0].split(" * "))), text)


def _lists_sorted(text: str) -> str:
    return _LIST.sub(lambda match: ", ".join(sorted(match[0].split(", "))), text)


def _words_sorted(text: str) -> str:
    return " ".join(sorted(text.split()))


def _premises_sorted(text: str) -> str:
    """Sort the premises, and the operands of ∧, ∨ and ↔."""
    ordered = iter(sorted(map(_operands_sorted, _PREMISE.findall(text))))
    return _PREMISE.sub(lambda _: next(ordered), text)


def _operands_sorted(formula: str) -> str:
    """Sort from the inside out: an innermost formula becomes a word, `[p∧q]`."""

    def word(match: re.Match[str]) -> str:
        left, operator, right = match.groups()
        return "[" + operator.join((left, right) if operator == "→" else sorted((left, right))) + "]"

    while (formula := _FORMULA.sub(word, before := formula)) != before:
        pass
    return formula


# Generators whose answer does not depend on the order of the operands.
UNORDERED: dict[str, Callable[[str], str]] = {
    "chain_sum": _terms_sorted,
    "decimal_chain_sum": _terms_sorted,
    "products": _factors_sorted,
    "gcd": _lists_sorted,
    "lcm": _lists_sorted,
    "countdown": _lists_sorted,
    "number_sorting": _lists_sorted,
    "sentence_reordering": _words_sorted,  # the same sentence comes shuffled in many ways
    "propositional_logic": _premises_sorted,
}
