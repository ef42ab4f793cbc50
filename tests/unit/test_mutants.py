"""The mutants of scripts/mutation.py: one small change each, that compiles, at the place that it names."""

from __future__ import annotations

from collections import Counter

import mutants

SOURCE = '''
"""A text with 3 < 4 stays."""

import math


def first(values: list[int], *, most: int = 5) -> int | None:
    """So does this."""
    assert len(values) < 9
    kept = sorted(v for v in values if v > 0 and not v == 7)
    if not kept:
        raise ValueError(f"{len(values)} < {most}")
    log.add(len(kept), level=2)
    return max(kept[0], most) + 1
'''


def test_every_change_is_made_once_and_compiles() -> None:
    found = mutants.mutants(SOURCE, "file.py")
    texts = [mutant.apply(SOURCE) for mutant in found]
    assert SOURCE not in texts
    for mutant, text in zip(found, texts, strict=True):
        before, after = SOURCE.splitlines(), text.splitlines()
        assert [i for i, (a, b) in enumerate(zip(before, after, strict=True), start=1) if a != b] == [mutant.line]
    assert Counter(mutant.kind for mutant in found) == {
        "comparison": 3, "constant": 6, "and, or": 1, "condition": 3, "sign left out": 2, "function": 1,
        "function left out": 1, "keyword left out": 1, "statement left out": 1, "arithmetic": 1,
    }  # fmt: skip


def test_what_no_test_need_notice_is_left_alone() -> None:
    lines = {mutant.line for mutant in mutants.mutants(SOURCE, "file.py")}
    text = SOURCE.splitlines()
    assert not [text[line - 1] for line in lines if '"""' in text[line - 1] or "assert" in text[line - 1]]
    assert not [text[line - 1] for line in lines if "raise" in text[line - 1] or "import" in text[line - 1]]


def test_some_changes_in_words() -> None:
    said = {(m.old, m.new) for m in mutants.mutants(SOURCE, "file.py")}
    assert {(">", ">="), (">", "<="), ("and", "or"), ("==", "!="), ("max", "min"), ("+", "-"), ("not kept", "True"),
            ("not kept", "(kept)"), (", level=2", ""), ("log.add(len(kept), level=2)", "pass")} <= said  # fmt: skip
