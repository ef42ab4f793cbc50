"""A run on Ray goes on whichever of its roles is killed or frozen: scripts/soak.py, for a short while."""

from __future__ import annotations

import pytest
from soak import soak

pytestmark = pytest.mark.ray


def test_nothing_is_lost_or_doubled_while_the_roles_of_a_ray_die() -> None:
    found = soak(120, seed=7, every_s=15, ray=True)
    assert found["steps"] >= 3 and sum(found["troubles"].values()) >= 3, found
