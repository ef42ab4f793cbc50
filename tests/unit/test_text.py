"""What becomes of a text that a model wrote, before a terminal, a file or a page shows it."""

from __future__ import annotations

import re

import pytest

from recorded_run import HOSTILE, is_harmless
from rollover.text import encodable, named, one_line, printable, printable_lines

EVERY_CHARACTER = "".join(map(chr, range(0x3200))) + "\ud83d\udfff\ufeff\uffa0\U000e0001"


@pytest.mark.parametrize("text", [*HOSTILE.values(), EVERY_CHARACTER], ids=[*HOSTILE, "every character"])
def test_no_form_of_a_hostile_text_commands_a_terminal(text: str) -> None:
    for form in (printable(text), printable_lines(text), one_line(text)):
        assert is_harmless(form) and form == encodable(form)
    assert "\n" not in printable(text) + one_line(text)
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", named(text, 1 << 21))


def test_question_marks_stand_for_what_is_not_shown() -> None:
    assert printable("a\x1b[2J\u2800\ud800b c") == "a?[2J??b c"
    assert printable_lines("a\r\n\tb\x07\n") == f"a\n{' ' * 8}b?\n"
    assert one_line(" a\n\tb \x00") == "a b ?"
    assert encodable("\u00e9 \ud800 \u4e2d") == "\u00e9 ? \u4e2d"
    assert encodable("\u00e9 \u4e2d", "latin-1") == "\u00e9 ?"


def test_named_characters_keep_what_they_were() -> None:
    assert named("\x1b[2J\x00\n\ta\u202eb\x9b\x7f") == "\u241b[2J\u2400\n\ta[U+202E]b[U+009B]\u2421"
    assert named("\ud800 half") == "\ufffd half"


def test_a_cut_in_a_pair_of_halves_is_no_half() -> None:
    assert named("ab\U0001f600", most=3) == "ab\U0001f600" and named("abcd", most=3) == "abc [cut here: 4 characters]"
