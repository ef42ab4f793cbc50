"""What the planner does not simulate."""

from __future__ import annotations

import pytest

from rollover.config import Config
from rollover.sim.plan import make_plan


def test_generation_while_training_is_refused() -> None:
    config = Config.model_validate({"rollout": {"overlap": True, "interrupt": "on_weight_update", "max_staleness": 1}})
    with pytest.raises(ValueError, match="in turns only"):
        make_plan(config)
