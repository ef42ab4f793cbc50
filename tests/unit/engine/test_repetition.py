from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.repetition import MIN_REPEATS, repeats_itself, smallest_period

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(TOKENS)
def test_the_period_is_the_smallest_that_fits(tokens: list[int]) -> None:
    def fits(p: int) -> bool:
        return all(tokens[i] == tokens[i - p] for i in range(p, len(tokens)))

    period = smallest_period(tokens)
    assert fits(period) and not any(fits(p) for p in range(1, period))


@given(TOKENS, st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_a_pattern_that_comes_four_times_stops(before: list[int], pattern: list[int]) -> None:
    circles = [*before, *pattern * 100]
    stopped = next((n for n in range(len(circles) + 1) if repeats_itself(circles[:n], 32)), None)
    assert stopped is not None and stopped % 16 == 0
    assert stopped <= len(before) + 32 + 16, "later than the window and the interval of the checks"


def test_three_times_is_not_enough_and_sound_text_goes_on() -> None:
    assert not repeats_itself([*range(11)] * 3, 33)
    assert not repeats_itself(list(range(200)), 64)
    assert not repeats_itself([1] * 64, 0), "0 switches it off"
    assert repeats_itself([1] * 64, 64) and MIN_REPEATS == 4
