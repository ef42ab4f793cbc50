from hypothesis import given
from hypothesis import strategies as st

from rollover.envs.tasks.split import Split, key_of

KEYS = st.integers(0, 2**64 - 1)
FILES = st.frozensets(st.integers(0, 20))


@given(st.floats(0.01, 0.99), FILES, FILES, KEYS | st.integers(0, 20), st.booleans(), st.booleans())
def test_no_key_is_accepted_on_both_sides_whatever_sources_it_comes_from(fraction, held, trained, key, one, other):
    split = Split(fraction, held, trained)
    in_train = split.accepts([key], "train", one) and (not one or key in trained)
    in_eval = split.accepts([key], "eval", other) and (not other or key in held)
    assert not (in_train and in_eval)


@given(KEYS, st.floats(0.01, 0.99))
def test_every_problem_of_a_hash_split_source_is_on_one_side(key, fraction):
    split = Split(fraction)
    assert split.accepts([key], "train", False) != split.accepts([key], "eval", False)


PROBLEM = st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from(["hash", "train file", "eval file"]))


@given(st.floats(0.1, 0.9), st.lists(PROBLEM, max_size=12))
def test_problems_of_both_sides_share_neither_key_nor_text(fraction, drawn):
    problems = [((key_of(f"key {key}"), key_of(f"text {text}")), where) for key, text, where in drawn]

    def keys(*wanted):
        return frozenset(key for keys, where in problems if where in wanted for key in keys)

    split = Split(fraction, keys("eval file"), keys("train file"))
    held_out = [k for k, where in problems if where == "hash" and Split(fraction).accepts(k, "eval", False)]
    training = Split(fraction, keys("eval file"), held_out_keys=frozenset(key for keys in held_out for key in keys))
    trained = {key for keys, where in problems for key in keys
               if where != "eval file" and training.accepts(keys, "train", where != "hash")}  # fmt: skip
    evaluated = {key for keys, where in problems for key in keys
                 if where != "train file" and split.accepts(keys, "eval", where != "hash")}  # fmt: skip
    assert not trained & evaluated


def test_the_share_held_out_is_the_fraction():
    split = Split(0.2)
    held = sum(split.accepts([key_of(f"problem {i}")], "eval", False) for i in range(5000))
    assert abs(held / 5000 - 0.2) < 0.02
