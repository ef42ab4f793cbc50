"""[replay] and [reroll]: refused combinations."""

import pytest

from rollover.config.load import ConfigError
from unit.config.written import load

DEEP = "[rollout]\nin_flight_groups = 24\nmax_staleness = 4\n"  # a bound of 24 / 8 - 1 = 2


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[replay]\nsize = 4\n[algorithm]\ncorrection = "none"', "trained as if they were fresh"),
        (f"{DEEP}[replay]\nsize = 4\nmax_staleness = 2", "Set it to 3 or more"),
        (
            '[rollout]\ninterrupt = "when_enough"\nin_flight_groups = 12\nmax_staleness = 4\n[replay]\nsize = 4',
            "replay.max_staleness = 4 is not above the bound of fresh rollouts, which is 4",
        ),
        ('[replay]\nsize = 4\n[algorithm]\nadvantage = "gae"', "once the step has estimated its tokens"),
        (
            '[replay]\nsize = 4\n[rollout]\ngroup_size = 1\n[rewards]\nmin_valid = 1\n[algorithm]\nadvantage = "remax"',
            "without a spread of its rewards",
        ),
        ("[reroll]\nmax_groups = 9", "nothing but failed tasks would be left"),
        ("[replay]\nsize = 4\nmax_staleness = 0", "at least 1"),
        ("[reroll]\nmax_groups = 1\nstart_fraction = 1.0", "below 1"),
    ],
)
def test_refused(tmp_path, text, part):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert part in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "[replay]\nsize = 4",
        "[replay]\nsize = 4\nmax_staleness = 1\n[reroll]\nmax_groups = 8\nstart_fraction = 0.0",
        f"{DEEP}[replay]\nsize = 4\nmax_staleness = 3",
        '[replay]\nsize = 4\n[algorithm]\ncorrection = "none"\nallow_uncorrected = true',
        '[replay]\nsize = 4\n[algorithm]\nloss = "decoupled"',
        '[replay]\nsize = 4\n[algorithm]\nproximal = "snapshot"',
        '[run]\ntrain_on_recorded = "x"\n[replay]\nsize = 4',
        "[replay]\nsize = 0\nmax_staleness = 4\n[reroll]\nmax_groups = 0\nstart_fraction = 0.5\nsize = 1000",
    ],
)
def test_allowed(tmp_path, text):
    assert [notice for notice in load(tmp_path, text).notices if not notice.startswith("no effect: ")] == []
