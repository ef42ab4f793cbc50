from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.config.tasks import AnswerRule
from rollover.rewards.answers import RULES, can_read, extract_answer, last_boxed, reference_answer, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 42.", "42"),
        ("5 - 9 = -4", "-4"),
        ("so 5-9", "9"),
        ("(3)-4", "4"),
        ("about 1,234.5 in all", "1234.5"),
        ("1,234,567.", "1234567"),
        ("of 1,2 and 3,4", "4"),
        ("first 7, then 8, done", "8"),
        ("x = .5", ".5"),
        ("\N{MINUS SIGN}17", "-17"),
        ("costs $-3.50.", "-3.50"),
        ("1.5e3 metres", "1.5e3"),
        ("**12**", "12"),
        ("no digits", None),
        ("It is 3/4.", "3/4"),
        ("5-3/4", "3/4"),
        ("= -3/4", "-3/4"),
        ("6/4", "6/4"),
        ("48/12", "12"),
        ("3/0", "0"),
        ("9" * 5000 + "/3", "3"),
        ("1/2/2024", "2024"),
        ("0.5/2 km", "2"),
        ("1/4.5", "4.5"),
        ("at 7:30 or 16:05.", "16:05"),
        ("12:05:59", "12:05:59"),
        ("a ratio of 3:4", "4"),
        ("verse 117:30", "30"),
        ("20% of it", "20"),
        ("", None),
    ],
)
def test_last_number(text, answer):
    assert extract_answer(text, "last_number") == answer


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{}.", "= {}", "It is {}!", "\\boxed{{{}}}"]))
def test_last_number_reads_integers_with_and_without_separators(number, sentence):
    for shown in (str(number), f"{number:,}"):
        assert extract_answer("7 and then " + sentence.format(shown), "last_number") == str(number)


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("last_line", "work\n 3 + 4 \n\n", "3 + 4"),
        ("last_line", " \n", None),
        ("answer_tag", "<answer>1</answer> no, <answer> 2\n</answer>", "2"),
        ("answer_tag", "<answer>1 <answer>3</answer>", "3"),
        ("answer_tag", "<answer>1", None),
        ("answer_tag", "<answer></answer>", None),
        ("boxed", r"\boxed{1} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{5} and \boxed{6", "5"),
        ("boxed", "5", None),
        ("full_text", " all of\nit ", "all of\nit"),
    ],
)
def test_other_rules(rule, text, answer):
    assert extract_answer(text, rule) == answer


def test_an_unknown_rule_names_the_rules():
    with pytest.raises(ValueError, match="tasks.answer_rule.*last_number"):
        extract_answer("1", "last_numbr")


@given(st.text(), st.sampled_from(RULES))
def test_an_answer_is_stripped_and_never_empty(text, rule):
    answer = extract_answer(text, rule)
    assert answer is None or (answer and answer == answer.strip())


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("1,000.00", "1000", True),
        ("+5", "5", True),
        ("0.5", "1/2", True),
        ("Paris.", " paris", True),
        ("$12$", "12", True),
        ("12", "13", False),
        ("1e9999999999", "1", False),
        ("3/4", "0.75", True),
        ("5%", "5", True),
        ("5\\%", "5.0%", True),
        ("5%", "0.05", False),
        ("7:30", "7.5", False),
        ("1/0", "1", False),
        ("New  York", "new york", True),
    ],
)
def test_same_answer(answer, reference, same):
    assert same_answer(answer, reference) is same
    assert same_answer(reference, answer) is same


def test_the_reference_is_the_final_part_of_a_worked_solution():
    assert reference_answer("3 + 4 = 7\n#### 7") == "7"
    assert reference_answer(r"Hence \boxed{x^{2}}.") == "x^{2}"
    assert reference_answer(12) == "12"


def test_the_rules_are_those_of_the_configuration() -> None:
    assert RULES == get_args(AnswerRule)


@given(st.lists(st.sampled_from(["{", "}", "a", "\\boxed{"]), max_size=12).map("".join))
def test_the_last_box_is_the_last_whose_braces_are_balanced(text: str) -> None:
    expected = newest = None
    for start in range(len(text)):
        depth = 0
        newest = None if text.startswith("\\boxed{", start) else newest
        for end in range(start + 6, len(text)) if text.startswith("\\boxed{", start) else ():
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                expected = newest = text[start + 7 : end]
                break
    assert extract_answer(text, "boxed") == ((expected or "").strip() or None)
    assert last_boxed(text) == expected and last_boxed(text, must_end=True) == newest


@pytest.mark.parametrize(
    ("reference", "rules"),
    [
        ("1,234", RULES),
        ("3/4", RULES),
        ("5%", RULES),
        ("7:30", RULES),
        ("yes", RULES[1:]),
        ("a\nb", ("answer_tag", "boxed", "full_text")),
        ("}", ("last_line", "answer_tag", "full_text")),
        ("", ()),
    ],
)
def test_rules_that_can_read_a_reference(reference: str, rules: tuple[str, ...]) -> None:
    assert tuple(rule for rule in RULES if can_read(reference, rule)) == rules
