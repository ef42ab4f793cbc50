"""[eval] and [[eval.settings]]: what is refused, and with what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.config import ConfigError
from rollover.config.load import load_config

START = '[eval]\nnum_tasks = 4\n{more}\n[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'


def load(tmp_path: Path, more: str = "", settings: str = "", rest: str = ""):
    file = tmp_path / "recipe.toml"
    file.write_text(START.format(more=more) + settings + rest)
    return load_config([file], []).config


SAMPLED = '[[eval.settings]]\nname = "sampled"\nsamples_per_task = 8\ntemperature = 0.8\nmax_new_tokens = 99\n'


def test_settings_come_after_that_of_the_table_itself(tmp_path: Path) -> None:
    cfg = load(tmp_path, "temperature = 0.0\nmax_new_tokens = 64", SAMPLED + '[[eval.settings]]\nname = "b"\n').eval
    assert [(s.name, s.temperature, cfg.tokens_of(s, 256)) for s in cfg.every_setting] == [
        ("", 0.0, 64), ("sampled", 0.8, 99), ("b", 1.0, 64)
    ]  # fmt: skip
    sampled = cfg.every_setting[1]
    assert (sampled.pass_ks, sampled.majority_ks) == ([1, 2, 4, 8], [4, 8])
    assert load(tmp_path).eval.tokens_of(load(tmp_path).eval.every_setting[0], 256) == 256


@pytest.mark.parametrize("metric", ["mean", "sources/a/b/mean", "settings/sampled/pass@4", "settings/sampled/maj@8",
                                    "settings/sampled/data_sources/openai/gsm8k/maj@4"])  # fmt: skip
def test_a_figure_that_an_evaluation_may_have_is_taken(tmp_path: Path, metric: str) -> None:
    more = f'majority = true\nmetric = "{metric}"'
    assert load(tmp_path, more, SAMPLED, "[checkpoint]\nkeep_best = true\n").eval.metric == metric


@pytest.mark.parametrize(
    ("more", "settings", "rest", "why"),
    [
        ('metric = "pass@4"', "", "[checkpoint]\nkeep_best = true\n", "the figures are mean, pass@1. Change it"),
        ('metric = "settings/x/mean"', SAMPLED, "[checkpoint]\nkeep_best = true\n", "there is sampled"),
        ('metric = "settings/sampled/maj@8"', SAMPLED, "[checkpoint]\nkeep_best = true\n", "maj@k needs eval.majority"),
        ('metric = "pass@1"', "", "", "eval.metric has no effect without checkpoint.keep_best"),
        ("patience = 2", "", "", "eval.patience has no effect"),
        ("every_steps = 2\nmin_improvement = 0.1", "", "", "eval.min_improvement has no effect"),
        ("majority = true", "", "", "eval.majority has no effect as no setting has 3 samples"),
        ("", '[[eval.settings]]\nname = "a/b"\n', "", "eval.settings.0.name = 'a/b': expected a name of letters"),
        ("", SAMPLED + SAMPLED, "", "eval.settings.1.name = 'sampled': another of the settings has this name"),
        ("", '[[eval.settings]]\nname = "g"\ntemperature = 0.0\ntop_p = 0.9\n', "", "eval.settings.0.top_p has no eff"),
        ("", SAMPLED, '[workflow]\nfunction = "a.py:b"\n', "eval.settings.0.max_new_tokens has no effect with workf"),
        ("max_new_tokens = 9", "", '[workflow]\nfunction = "a.py:b"\n', "eval.max_new_tokens has no effect with workf"),
        ("", "", '[checkpoint]\nsave_best_model = true\n[backend]\ntype = "tinker"\n', "save_best_model with backend"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, more: str, settings: str, rest: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, more, settings, rest)
    assert why in str(error.value), error.value


def test_without_evaluation_nothing_of_it_has_an_effect(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[checkpoint]\nkeep_best = true\n[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best has no effect with eval.num_tasks = 0"):
        load_config([file], [])
