"""What is started again and again waits ever longer, and says what is news."""

from __future__ import annotations

from rollover.back_off import BackOff


def test_it_waits_ever_longer_and_as_at_first_after_a_long_life() -> None:
    now = 0.0
    back_off = BackOff(lambda: now)
    found = []
    for lived_s in (1, 1, 1, 30, 1, 1, 1, 1, 31, 1):
        back_off.begin()
        now += lived_s
        found.append(back_off.pause_s())
        now += found[-1]
    assert found == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1]


def test_what_ends_it_in_the_same_way_is_told_once_unless_it_worked_in_between() -> None:
    back_off = BackOff()
    assert [back_off.is_news(why) for why in ("a", "a", "b", "a")] == [True, False, True, True]
    back_off.works()
    assert back_off.is_news("a") and not back_off.is_news("a")
