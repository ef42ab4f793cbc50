"""How many failures in a row end a run: what comes in between begins the count anew."""

from __future__ import annotations

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.patience import Patience

TOO_MANY = 12  # four steps of three groups


def patience() -> Patience:
    return Patience(Lifecycle(RolloutConfig(groups_per_step=3)))


def test_so_many_stalled_groups_in_a_row_end_the_run() -> None:
    told = patience()
    for _ in range(TOO_MANY - 1):
        told.on_given_up()
    with pytest.raises(ValueError, match=f"watchdog: the last {TOO_MANY} groups .* the engine seems to hang"):
        told.on_given_up()


def test_a_group_that_is_complete_begins_the_count_of_stalled_ones_anew() -> None:
    told = patience()
    for _ in range(3):
        for _ in range(TOO_MANY - 1):
            told.on_given_up()
        told.on_complete()
