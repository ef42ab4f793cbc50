from hypothesis import given
from hypothesis import strategies as st

from rollover.rewards.worker import Quarantine


@given(st.lists(st.sampled_from("abc")), st.integers(1, 4))
def test_a_task_is_in_quarantine_from_its_last_allowed_death_on(deaths, limit):
    quarantine = Quarantine(limit)
    for task_id in deaths:
        quarantine.blame(task_id)
    assert [t in quarantine for t in "abc"] == [deaths.count(t) >= limit for t in "abc"]


def test_what_was_quiet_for_longest_is_forgotten():
    quarantine = Quarantine(1, max_tasks=2)
    for task_id in ("a", "b", "a", "c"):
        quarantine.blame(task_id)
    assert [t in quarantine for t in "abc"] == [True, False, True]
