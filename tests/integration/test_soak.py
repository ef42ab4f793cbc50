"""A run on servers goes on whichever of its processes is killed or frozen: scripts/soak.py, for a short while."""

from __future__ import annotations

import pytest
from soak import soak

pytest.importorskip("aiohttp")


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_while_servers_ranks_and_reward_workers_die() -> None:
    found = soak(100, seed=3, every_s=10)
    assert found["steps"] >= 3 and sum(found["troubles"].values()) >= 5, found
