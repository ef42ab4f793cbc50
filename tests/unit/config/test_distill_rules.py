"""[distill]: options without effect, refused combinations, and what a teacher makes of other tables."""

import pytest

from rollover.config.load import ConfigError
from unit.config.written import load

TAUGHT = '[distill]\nteacher = "other"\n'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{TAUGHT}[filters]\nzero_variance = true", "filters.zero_variance"),
        (f'{TAUGHT}mix = "add"\n[filters]\nzero_variance = true', "filters.zero_variance"),
        (f"{TAUGHT}[filters]\npass_rate_above = 0.0", "filters.pass_rate_above"),
        (f'{TAUGHT}[algorithm]\nadvantage = "rloo"', "algorithm.advantage"),
        (f'{TAUGHT}[algorithm]\nafter_scoring = "mine.py:look"', "algorithm.after_scoring"),
        (f"{TAUGHT}[rewards]\nmin_valid = 1", "rewards.min_valid"),
        (f"{TAUGHT}[rollout]\ngreedy_baseline = true", "rollout.greedy_baseline"),
    ],
)
def test_an_option_without_effect_is_an_error(tmp_path, text, key):
    with pytest.raises(ConfigError, match=f"{key} has no effect"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[distill]\nteacher = "policy"', "teaches nothing: it reads what the policy reads, with the same weights"),
        ('[distill]\nteacher = "policy"\nrefresh_steps = 1\nmix = "add"', "with the same weights"),
        ('[distill]\nteacher = "policy"\nrefresh_steps = 9', "nothing else moves the policy"),
        ('[distill]\nteacher = "initial"', "there are no rewards to depart from it for"),
        (f"{TAUGHT}[replay]\nsize = 4", "replay.size with distill.teacher: the teacher has a signal for every group"),
        (f'{TAUGHT}[algorithm]\nloss = "gmpo"', "it has one advantage for all tokens of a rollout"),
        ('[distill]\nteacher = "x"\ncoef = 0.0', "above 0"),
        ('[distill]\nteacher = "x"\ndiscount = 1.5', "at most 1"),
        ('[distill]\nteacher = "x"\nmix = "both"', 'one of "replace", "add"'),
    ],
)
def test_refused(tmp_path, text, part):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert part in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        f"{TAUGHT}[rollout]\ngroup_size = 1",
        f'{TAUGHT}[algorithm]\npreset = "dapo"',
        f'{TAUGHT}mix = "add"\ndiscount = 1.0\n[algorithm]\nadvantage = "gae"',
        '[distill]\nteacher = "initial"\nmix = "add"',
        '[distill]\nteacher = "policy"\nrefresh_steps = 5\nmix = "add"',
        '[distill]\nteacher = "policy"\nprivileged = "mine.py:told"',
        '[distill]\nteacher = "policy"\nrefresh_steps = 8\nprivileged = "mine.py:told"',
        '[distill]\nteacher = "initial"\nprivileged = "mine.py:told"\n[algorithm]\nloss = "gspo"',
    ],
)
def test_allowed(tmp_path, text):
    assert not [notice for notice in load(tmp_path, text).notices if not notice.startswith("no effect: ")]


def test_a_preset_below_gives_way_with_a_notice(tmp_path):
    resolved = load(tmp_path, f'{TAUGHT}[algorithm]\npreset = "ppo"')
    assert resolved.config.algorithm.advantage == "grpo" and not resolved.config.algorithm.needs_critic
    assert any("algorithm.advantage" in notice for notice in resolved.notices)


def test_a_group_without_rewards_is_kept_where_they_have_no_part(tmp_path):
    assert load(tmp_path, "").config.min_valid_rewards == 2
    assert load(tmp_path, TAUGHT).config.min_valid_rewards == 0
    assert load(tmp_path, f'{TAUGHT}mix = "add"').config.min_valid_rewards == 2
    assert load(tmp_path, "").config.equal_scores_teach_nothing
    assert not load(tmp_path, f'{TAUGHT}mix = "add"').config.equal_scores_teach_nothing
