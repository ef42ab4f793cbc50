from hypothesis import given
from hypothesis import strategies as st

from rollover.envs.tasks.split import Split, key_of

KEYS = st.integers(0, 2**64 - 1)
FILES = st.frozensets(st.integers(0, 20))


@given(st.floats(0.01, 0.99), FILES, FILES, KEYS | st.integers(0, 20), st.booleans(), st.booleans())
def test_no_key_is_accepted_on_both_sides_whatever_sources_it_comes_from(fraction, held, trained, key, one, other):
    split = Split(fraction, held, trained)
    in_train = split.accepts(key, "train", one) and (not one or key in trained)
    in_eval = split.accepts(key, "eval", other) and (not other or key in held)
    assert not (in_train and in_eval)


@given(KEYS, st.floats(0.01, 0.99))
def test_every_problem_of_a_hash_split_source_is_on_one_side(key, fraction):
    split = Split(fraction)
    assert split.accepts(key, "train", False) != split.accepts(key, "eval", False)


def test_the_share_held_out_is_the_fraction():
    split = Split(0.2)
    held = sum(split.accepts(key_of(f"problem {i}"), "eval", False) for i in range(5000))
    assert abs(held / 5000 - 0.2) < 0.02
