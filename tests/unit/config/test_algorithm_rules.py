"""What is refused about [algorithm], by whichever door a configuration comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from written import load

from rollover.config import AlgorithmConfig, Config, ReplayConfig, RolloutConfig, RunConfig, TasksConfig, TrainConfig
from rollover.config.load import ConfigError, load_config
from rollover.config.presets import PRESETS
from rollover.config.traits import LOSSES

STALE = "[rollout]\nin_flight_groups = 16\nmax_staleness = 1\n"
OWN = 'loss = "mine.py:loss"'


def message(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder, text)
    return str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        ('proximal = "behavior"\npreset = "rloo"', "algorithm.proximal has no effect"),
        ('proximal = "behavior"\npreset = "max_rl"', "its importance weight is current/behavior"),
        ('proximal = "snapshot"\nloss = "reinforce"', "algorithm.proximal has no effect"),
        (f'proximal = "behavior"\n{OWN}', 'a custom loss and algorithm.proximal = "behavior"'),
        (f'proximal = "snapshot"\n{OWN}', "if your loss multiplies by the ratio of current and old log-probs"),
        (f'correction = "none"\n{OWN}', 'with algorithm.correction = "none"'),
        ('correction = "none"\nloss = "reinforce"', "or (if you mean it) algorithm.allow_uncorrected"),
        ('proximal = "behavior"\ncorrection = "token_truncate"', "algorithm.correction has no effect"),
        ('proximal = "behavior"\ncorrection_cap = 3.0', "algorithm.correction_cap has no effect"),
        ('proximal = "behavior"\ncorrection_floor = 0.5', "algorithm.correction_floor has no effect"),
        ('proximal = "behavior"\ness_step_scaling = true', "algorithm.ess_step_scaling has no effect"),
        ('loss = "decoupled"\ncorrection = "none"', "algorithm.correction has no effect"),
        ('proximal = "interpolated"', "is the behavior policy itself"),
        ('proximal = "behavior"\nallow_uncorrected = true', "algorithm.allow_uncorrected has no effect"),
    ],
)
def test_stale_rollouts_need_a_ratio_to_the_policy_that_sampled(tmp_path: Path, algorithm: str, part: str) -> None:
    assert part in message(tmp_path, f"{STALE}[algorithm]\n{algorithm}")


@pytest.mark.parametrize(
    "off_policy",
    ["[rollout]\ntop_p = 0.9\n", "[replay]\nsize = 4\n", '[run]\ntrain_on_recorded = "x"\n', STALE],
)
def test_whatever_makes_rollouts_off_policy(tmp_path: Path, off_policy: str) -> None:
    own = f'{off_policy}[algorithm]\nproximal = "behavior"\n{OWN}\n'
    assert "algorithm.allow_uncorrected = true" in message(tmp_path, own)
    assert load(tmp_path, own + "allow_uncorrected = true").config.algorithm.proximal == "behavior"
    assert "algorithm.allow_uncorrected = true" in message(tmp_path, f'{off_policy}[algorithm]\ncorrection = "none"')


def test_a_preset_s_correction_is_reset_with_a_notice_where_it_has_no_effect(tmp_path: Path) -> None:
    resolved = load(tmp_path, f'{STALE}[algorithm]\nproximal = "behavior"')
    assert resolved.config.algorithm.correction == "none"
    (notice,) = resolved.notices
    assert 'algorithm.correction = "token_truncate" (preset grpo) was reset to "none"' in notice
    resolved = load(tmp_path, f'{STALE}[algorithm]\npreset = "async_decoupled"')
    assert resolved.config.algorithm.correction == "token_truncate" and resolved.notices == []


IN_REWARD = 'kl_coef = 0.1\nkl_in = "reward"\n'
LORA = "\n[model.lora]\nrank = 4"


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        ('kl_coef = 0.1\nkl_kind = "k1"', 'Set algorithm.kl_kind = "k3", "k2" or "k1+"'),
        ('kl_coef = 0.1\nkl_kind = "k1"', 'or algorithm.kl_in = "reward"'),
        ('kl_coef = 0.1\nkl_max = 10\nkl_kind = "k2"', "algorithm.kl_max has no effect unless algorithm.kl_kind is k3"),
        (
            'kl_coef = 0.1\nkl_max = 10\nkl_in = "reward"',
            "algorithm.kl_max has no effect unless algorithm.kl_kind is k3",
        ),
        ('kl_coef = 0.1\nkl_in = "both"', "algorithm.kl_reward_coef = 0: there is no KL in the reward"),
        ('kl_coef = 0.1\nkl_in = "both"\nkl_reward_coef = 0.1\n[replay]\nsize = 4', 'algorithm.kl_in = "both"'),
        (f'{IN_REWARD}kl_kind = "k3+"', 'Set algorithm.kl_kind = "k3"'),
        (f'{IN_REWARD}advantage = "max_rl"', "which the KL may make negative"),
        (f'{IN_REWARD}advantage = "gdpo"', "of which the KL is none"),
        (f'{IN_REWARD}[workflow.roles.a]\nadvantage = "precomputed"', "come with the trajectories"),
        (f'{IN_REWARD}[distill]\nteacher = "policy"\nprivileged = "a:b"', "rewards have no part in them"),
        (f"{IN_REWARD}[replay]\nsize = 4", "replay.size with algorithm.kl_in"),
        (f"{IN_REWARD}[train]\nstreaming_min_groups = 4", "train.streaming_min_groups with algorithm.kl_in"),
        (f'kl_coef = 0.1\nreference_path = "a"{LORA}', "Set it to model.path, which is the model without them"),
        (
            f'kl_coef = 0.1\nreference_refresh_steps = 2\nreference_path = "smollm2-135m"{LORA}',
            "Remove algorithm.reference_path",
        ),
        (
            f"kl_coef = 0.1\nreference_refresh_steps = 2\nreference_mixup = 0.6{LORA}",
            "Set algorithm.reference_mixup = 1",
        ),
        (
            'kl_coef = 0.1\nreference_refresh_steps = 2\n[distill]\nteacher = "initial"\nmix = "add"',
            "one copy of weights is kept for both",
        ),
        ("dual_clip = 0.5", "algorithm.dual_clip = 0.5"),
        ("clip_low = 1.5", "Set it to 1 (no bound) or less"),
        ('loss = "dppo_tv"\nclip_high = 1.5', "Set it to 1 (no bound) or less"),
        ("loss_options = { staleness_BT = 3 }", "algorithm.loss_options.staleness_BT: names that end in _BT"),
        ("loss_options = { clip_low = 0.1 }", "algorithm.loss_options.clip_low is set by algorithm.clip_low"),
        ('loss = "decoupled"\nloss_options = { weight_cap = 3.0 }', "is set by algorithm.correction_cap"),
        ('advantage = "grpo_passk"\nclip_low = 0.1', "algorithm.clip_low has no effect"),
        ('advantage = "grpo_passk"\noff_policy_mask_above = 0.1', "off_policy_mask_above has no effect"),
        ('advantage = "grop"', 'Did you mean "grpo"'),
        ("reward_weights = { score = 'a' }\nadvantage = 'gdpo'", "every weight must be a number"),
    ],
)
def test_what_would_do_nothing(tmp_path: Path, algorithm: str, part: str) -> None:
    assert part in message(tmp_path, f"[algorithm]\n{algorithm}")


def test_a_mask_outside_the_baseline_needs_a_baseline_over_siblings(tmp_path: Path) -> None:
    text = '[filters]\nmask_truncated = true\nmask_in_baseline = false\n[algorithm]\nadvantage = "remax"'
    assert "filters.mask_in_baseline has no effect" in message(tmp_path, text)


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("kl_coef = 0.1", "k3"), (IN_REWARD, "k1"), (f'{IN_REWARD}kl_kind = "k3"\nkl_max = 10.0', "k3")],
)
def test_the_estimator_of_the_kl_follows_where_it_enters(tmp_path: Path, algorithm: str, kind: str) -> None:
    of = load(tmp_path, f"[algorithm]\n{algorithm}").config.algorithm
    assert of.kl_kind == of.kl_estimator == kind and of.needs_reference and of.kl_in_loss == ("reward" not in algorithm)
    assert AlgorithmConfig(kl_coef=0.1, kl_in=of.kl_in).kl_kind == ("k3" if of.kl_in_loss else "k1")
    assert of.needs_every_token == of.kl_in_loss, "in the reward it is in the advantages"


@pytest.mark.parametrize(
    ("algorithm", "compares"),
    [({}, False), ({"correction": "sequence_mask"}, False), ({"correction": "segment_mask"}, True),
     ({"proximal": "snapshot"}, True), ({"loss": "decoupled", "proximal": "snapshot"}, True)],
)  # fmt: skip
def test_losses_that_compare_the_policies_of_a_rollout_s_tokens(algorithm: dict[str, Any], compares: bool) -> None:
    """After lost steps, --resume drops groups whose versions are not known exactly."""
    assert AlgorithmConfig(**algorithm).compares_versions == compares


# Several minibatches a step: from the second on, the policy is no longer the one that the step began with

MINIBATCHES = TrainConfig(minibatches_per_step=4)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "reinforce", "correction": "none"}, 'algorithm.loss = "reinforce" and algorithm.correction = "none"'),
        ({"preset": "rloo", "correction": "none"}, "Set train.minibatches_per_step = 1, algorithm.correction = "),
        ({"loss": "mine.py:loss"}, "with a custom loss: it is not known whether it holds the ratio"),
        ({"loss": "mine.py:loss", "correction": "none"}, "with a custom loss"),
    ],
)
def test_a_loss_that_forgets_the_earlier_minibatches_of_a_step_is_refused(algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Config(train=MINIBATCHES, algorithm=AlgorithmConfig(**algorithm))
    assert str(error.value).count("train.minibatches_per_step = 4") == 1 and message in str(error.value)
    permitted = AlgorithmConfig(**algorithm, allow_uncorrected=True)
    assert Config(train=MINIBATCHES, algorithm=permitted).algorithm.allow_uncorrected
    Config(algorithm=AlgorithmConfig(**algorithm))  # one minibatch: nothing to forget


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"correction": "none"}, {"loss": "reinforce"}, {"loss": "reinforce", "correction": "sequence_mask"},
     {"proximal": "behavior"}, *({"loss": name} for name, traits in LOSSES.items() if traits.ratio)],
    ids=str,
)  # fmt: skip
def test_a_loss_that_holds_the_ratio_may_have_several_minibatches(algorithm: Any) -> None:
    Config(train=MINIBATCHES, algorithm=AlgorithmConfig(**algorithm))
    given = {"train.minibatches_per_step": "4", **{f"algorithm.{key}": value for key, value in algorithm.items()}}
    load_config([], list(given.items()), require_sources=False)
    with pytest.raises(ConfigError, match="algorithm.allow_uncorrected has no effect"):
        load_config([], [*given.items(), ("algorithm.allow_uncorrected", "true")], require_sources=False)


# The same by the doors of Python

ALONE: list[dict[str, Any]] = [
    {"advantage": "grop"},
    {"loss": "cipso"},
    {"kl_coef": 0.1, "kl_kind": "k1"},
    {"kl_coef": 0.1, "kl_kind": "k2", "kl_bias_correction": True},
    {"reward_weights": {"score": "a"}},
    {"dual_clip": 0.5},
    {"loss": "decoupled", "loss_options": {"weight_cap": 3.0}},
    {"loss": "reinforce", "clip_low": 0.1},
    {"proximal": "behavior", "correction": "token_truncate"},
    {"loss": "reinforce", "proximal": "snapshot"},
    {"kl_kind": "k2"},
]


@pytest.mark.parametrize("values", ALONE, ids=str)
def test_an_algorithm_table_is_checked_wherever_it_is_made(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="algorithm."):
        AlgorithmConfig(**values)
    with pytest.raises(ValueError, match="algorithm."):
        Config.model_validate({"algorithm": values})


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": RolloutConfig(max_staleness=1, in_flight_groups=16)},
        {"rollout": RolloutConfig(top_k=5)},
        {"replay": ReplayConfig(size=4)},
        {"run": RunConfig(train_on_recorded="x")},
        {"tasks": TasksConfig(producer="a:B"), "rollout": RolloutConfig(max_staleness=1)},
    ],
    ids=lambda tables: next(iter(tables)),
)
def test_a_whole_configuration_is_checked_wherever_it_is_made(tables: dict[str, Any]) -> None:
    algorithms: list[dict[str, Any]] = [{"correction": "none"}, {"loss": "mine.py:loss", "proximal": "behavior"}]
    for uncorrected in algorithms:
        with pytest.raises(ValueError, match="allow_uncorrected = true"):
            Config(**tables, algorithm=AlgorithmConfig(**uncorrected))
        Config(**tables, algorithm=AlgorithmConfig(**uncorrected, allow_uncorrected=True))
    Config(**tables)
    Config(**tables, algorithm=AlgorithmConfig(loss="decoupled"))
    Config(**tables, algorithm=AlgorithmConfig(proximal="behavior"))


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "sft"])
def test_what_a_preset_sets_is_not_refused_as_the_users(preset: str) -> None:
    """`reinforce` has no bounds, which most presets set; "behavior" has no correction, which all set."""
    for values in ({"loss": "reinforce"}, {"proximal": "behavior", "loss": "clip"}):
        algorithm = AlgorithmConfig(preset=preset, **values)  # type: ignore[arg-type]
        assert algorithm.model_fields_set == {"preset", *values}
        assert Config(algorithm=algorithm, rollout=RolloutConfig(greedy_baseline=preset == "remax"))


def test_remax_without_its_greedy_rollout_is_refused() -> None:
    with pytest.raises(ValueError, match="all advantages would be 0"):
        Config(algorithm=AlgorithmConfig(advantage="remax"))
    Config(algorithm=AlgorithmConfig(advantage="remax"), rollout=RolloutConfig(greedy_baseline=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_same_however_the_configuration_is_made(preset: str) -> None:
    greedy = preset == "remax"
    examples = {"path": "examples.jsonl"} if preset == "sft" else {}
    overrides = [("algorithm.preset", preset), ("rollout.greedy_baseline", str(greedy).lower())]
    overrides += [(f"sft.{name}", value) for name, value in examples.items()]
    loaded = load_config([], overrides, require_sources=False).config.algorithm
    assert AlgorithmConfig(preset=preset) == loaded  # type: ignore[arg-type]
    tables = {"algorithm": {"preset": preset}, "rollout": {"greedy_baseline": greedy}, "sft": examples}
    assert Config.model_validate(tables).algorithm == loaded
    assert AlgorithmConfig(preset=preset, entropy_coef=0.125).entropy_coef == 0.125  # type: ignore[arg-type]


def test_a_key_that_was_reset_is_not_refused_as_the_users() -> None:
    """Without a correction of theirs nothing is to be said of it: here the loss is `clip`."""
    overrides = [("algorithm.loss", "decoupled"), ("algorithm.proximal", "behavior")]
    algorithm = load_config([], overrides, require_sources=False).config.algorithm
    assert algorithm.weight == "none" and algorithm.corrects
