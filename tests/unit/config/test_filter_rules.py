"""[filters]: options without effect, refused combinations, and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.config.load import ConfigError, load_config
from unit.config.written import SOURCE, load

RECORDED = '[run]\ntrain_on_recorded = "x"\n'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[filters]\ngive_up_after_steps = 3", "filters.give_up_after_steps"),
        ('[filters]\nmetric = "acc"\nmax_truncated_share = 0.5', "filters.metric"),
        ("[filters]\nzero_variance = true\npass_threshold = 0.5", "filters.pass_threshold"),
        ("[filters]\noverlong_tokens = 64\nmax_truncated_share = 0.0", "filters.overlong_tokens"),
        ("[filters]\nmask_in_baseline = false\nzero_variance = true", "filters.mask_in_baseline"),
        (f"{RECORDED}[filters]\nzero_variance = true", "filters.zero_variance"),
        (f"{RECORDED}[filters]\npass_rate_above = 0.0", "filters.pass_rate_above"),
        (f"{RECORDED}[filters]\npass_rate_below = 1.0", "filters.pass_rate_below"),
        (f"{RECORDED}[filters]\nmax_truncated_share = 0.0", "filters.max_truncated_share"),
        (f"{RECORDED}[filters]\nmax_error_share = 0.0", "filters.max_error_share"),
        (f"{RECORDED}[filters]\nmax_overlong_share = 0.0\noverlong_tokens = 9", "filters.max_overlong_share"),
        (f'{RECORDED}[filters]\ncustom = "a:b"', "filters.custom"),
    ],
)
def test_an_option_without_effect_is_an_error(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} has no effect"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("mask_overlong = true", "filters.overlong_tokens = 0 with filters.max_overlong_share or"),
        ("max_overlong_share = 0.5\noverlong_tokens = 128", "below rollout.max_new_tokens = 128"),
        ("pass_rate_above = 0.5\npass_rate_below = 0.5", "every group would be dropped"),
        ("pass_rate_above = 1.0", "below 1"),
        ("pass_rate_below = 0.0", "above 0"),
        ("max_error_share = 1.5", "at most 1"),
        ("give_up_after_steps = -1", "at least 0"),
        ("zero_varianse = true", "Did you mean filters.zero_variance"),
    ],
)
def test_refused(tmp_path: Path, text: str, part: str) -> None:
    head = "" if "[rollout]" in text else "[rollout]\nmax_new_tokens = 128\n"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f"{head}[filters]\n{text}")
    assert part in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "zero_variance = true\ngive_up_after_steps = 3",
        'pass_rate_above = 0.0\npass_rate_below = 1.0\npass_threshold = 0.5\nmetric = "acc"',
        "pass_rate_above = -1.0\npass_rate_below = 2.0\nmax_error_share = 1.0",
        "max_overlong_share = 0.5\noverlong_tokens = 100\nmask_overlong = true\nmask_in_baseline = false",
        "mask_truncated = true\nmask_in_baseline = false\n[run]\ntrain_on_recorded = 'x'",
        "zero_variance = true\n[reroll]\nmax_groups = 1\n[replay]\nsize = 4",
        'zero_variance = true\n[rollout]\noverlap = true\ninterrupt = "never"\nmax_staleness = 1',
    ],
)
def test_allowed(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"[filters]\n{text}").notices == []


def test_a_later_layer_may_switch_the_only_filter_off(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[filters]\nzero_variance = true\ngive_up_after_steps = 3\n" + SOURCE)
    second.write_text("[filters]\nzero_variance = false\n")
    resolved = load_config([first, second])
    assert resolved.config.filters.give_up_after_steps == 10
    (notice,) = resolved.notices
    assert notice.startswith("filters.give_up_after_steps = 3")
