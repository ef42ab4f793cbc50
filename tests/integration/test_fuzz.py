"""Driver, engine process and reward pool together, while processes are killed, hang and fork: scripts/fuzz.py."""

from __future__ import annotations

import pytest
from fuzz import fuzz

QUARTER_OF_A_MINUTE = pytest.param(15, 1, id="quarter of a minute")
THREE_MINUTES = pytest.param(180, 2, id="three minutes", marks=pytest.mark.slow)


@pytest.mark.parametrize(("seconds", "seed"), [QUARTER_OF_A_MINUTE, THREE_MINUTES])
def test_no_token_twice_and_no_reward_under_anothers_name(seconds: float, seed: int) -> None:
    """How much happens is up to the machine; what must hold is checked by the script, after each step."""
    counts = fuzz(seconds, seed)
    assert counts["steps"] >= 3 and counts["trained rollouts"] >= 18, counts
