from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.tasks.split import Split, key_of

WHERE = ["hash", "train file", "eval file", "generator"]
PROBLEM = st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from(WHERE))


@settings(max_examples=40)
@given(st.floats(0.1, 0.9), st.lists(PROBLEM, max_size=12))
def test_problems_of_both_sides_share_neither_key_nor_text(fraction, drawn):
    """As the stream makes the rule, from the rows alone. The key of a generator's problem follows from its text."""
    first = [f"sum {text // 2}" if where == "generator" else f"key {key}" for key, text, where in drawn]
    problems = [((key_of(k), key_of(f"text {text}")), where) for k, (_, text, where) in zip(first, drawn, strict=True)]

    def keys(rule, side, *wanted):
        return frozenset(key for keys, where in problems for key in keys
                         if where in wanted and rule.accepts(keys, side, where.endswith("file")))  # fmt: skip

    rule = Split(fraction, keys(Split(fraction), "eval", "eval file"))
    rule = replace(rule, held_out_keys=keys(rule, "eval", "hash"))
    rule = replace(rule, trained_keys=keys(rule, "train", "hash", "train file"))
    trained = keys(rule, "train", "hash", "train file", "generator")
    assert not trained & keys(rule, "eval", "hash", "eval file", "generator")


def test_the_share_held_out_is_the_fraction():
    split = Split(0.2)
    held = sum(split.accepts([key_of(f"problem {i}")], "eval", False) for i in range(5000))
    assert abs(held / 5000 - 0.2) < 0.02
