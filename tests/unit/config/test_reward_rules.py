"""Rules over the options of [rewards]."""

import sys

import pytest

from rollover.config.load import ConfigError
from unit.config.written import load


@pytest.mark.parametrize("option", ["num_workers = 2", "memory_gb = 2.0", "retries = 1", "quarantine_after = 1"])
def test_the_pool_has_nothing_to_do_for_recorded_rollouts(tmp_path, option):
    name = f"rewards.{option.split()[0]}"
    with pytest.raises(ConfigError, match=f"{name} has no effect with run.train_on_recorded"):
        load(tmp_path, f'[run]\ntrain_on_recorded = "x"\n[rewards]\n{option}')
    load(tmp_path, f"[rewards]\n{option}")


@pytest.mark.parametrize(("platform", "memory_gb", "part"), [("darwin", 2.0, "only Linux"), ("linux", 0.01, "0.1 or")])
def test_a_memory_limit_that_cannot_work_is_refused(tmp_path, monkeypatch, platform, memory_gb, part):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(ConfigError, match=f"rewards.memory_gb = {memory_gb:g}: .*{part}"):
        load(tmp_path, f"[rewards]\nmemory_gb = {memory_gb}")
    monkeypatch.setattr(sys, "platform", "linux")
    for allowed in (0.0, 0.1):
        assert load(tmp_path, f"[rewards]\nmemory_gb = {allowed}").config.rewards.memory_gb == allowed
