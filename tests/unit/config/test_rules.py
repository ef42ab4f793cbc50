"""Options without effect and refused combinations."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.config import Config, describe
from rollover.config.load import ConfigError, load_config
from rollover.config.schema import INERT, REFUSED, choices_of, default_of, field_at, leaves
from rollover.config.table import Needs, needs_of

SOURCE = '\n[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'
PARTIAL = '[rollout]\ninterrupt = "when_enough"\nin_flight_groups = 12\nmax_staleness = 1\norder = "fifo"\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "a.toml", *, source: bool = True) -> Path:
        path = tmp_path / name
        path.write_text(text + (SOURCE if source else ""))
        return path

    return write


def message(*args) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(*args)
    return str(error.value)


def test_rules_name_real_options():
    keys = [key for rule in INERT for key in rule.options + rule.because] + [
        key for rule in REFUSED for key in rule.keys
    ]
    assert [key for key in keys if field_at(key) is None] == []


# (the file, the option that it sets without effect); of declared conditions see CONDITIONS below
CASES = [
    ('[rollout]\norder = "fifo"', "rollout.order"),
    ('[rollout]\nkv_on_resume = "keep"', "rollout.kv_on_resume"),
    ("[rollout]\nmax_staleness = 2", "rollout.max_staleness"),
    ('[rollout]\non_stale = "drop"', "rollout.on_stale"),
    ('[rollout]\ninterrupt = "when_enough"\nmax_staleness = 1', "rollout.interrupt"),
    ('[rollout]\nin_flight_groups = "auto"', "rollout.in_flight_groups"),
    (
        '[rollout]\ninterrupt = "when_enough"\nin_flight_groups = "auto"\nsupplement = true\nmax_staleness = 1',
        "rollout.in_flight_groups",
    ),
    ('[algorithm]\nproximal = "behavior"\ncorrection = "token_mask"', "algorithm.correction"),
    ('[algorithm]\ncorrection = "none"\ness_step_scaling = true', "algorithm.ess_step_scaling"),
    ('[algorithm]\ncorrection = "none"\ncorrection_cap = 3.0', "algorithm.correction_cap"),
    ("[algorithm]\nallow_uncorrected = true", "algorithm.allow_uncorrected"),
    ('[algorithm]\ncorrection = "none"\nallow_uncorrected = true', "algorithm.allow_uncorrected"),
    ('[model]\nrevision = "main"', "model.revision"),
    ('[model]\npath = "./local"\nrevision = "main"', "model.revision"),
    ("[tasks]\nepochs = 2", "tasks.epochs"),
    ("[tasks]\nshuffle = false", "tasks.shuffle"),
    ('[run]\ntrain_on_recorded = "x"\n[rollout]\ntemperature = 0.5', "rollout.temperature"),
    ('[run]\ntrain_on_recorded = "x"\n[rollout]\nin_flight_groups = 9', "rollout.in_flight_groups"),
    ('[run]\ntrain_on_recorded = "x"\n[watchdog]\nweights_timeout_s = 9', "watchdog.weights_timeout_s"),
]


@pytest.mark.parametrize(("text", "key"), CASES, ids=[f"{key}-{i}" for i, (_, key) in enumerate(CASES)])
def test_an_option_without_effect_is_an_error(write, text, key):
    path = write(text)
    found = message([path])
    assert f"{path}: {key} has no effect" in found
    # The same by the doors of Python, where all that was set is one layer.
    with pytest.raises(ValueError) as error:
        Config.model_validate(tomllib.loads(text + SOURCE))
    (line,) = [line for line in found.splitlines() if f" {key} has no effect" in line]
    assert line.removeprefix(f"{path}: ") in str(error.value)


# Conditions that stand on an option (only_if, unless)

CONDITIONS = [(key, condition) for key, info in leaves() for condition in needs_of(info)]
VALUES = (
    "reinforce",
    "decoupled",
    "rloo",
    "gae",
    "json",
    "x",
    "module:function",
    "",
    2,
    3,
    0,
    0.25,
    0.75,
    0.0,
    True,
    False,
    {"score": 2.0},
    ["wandb"],
    ["q_proj"],
    ["model"],
    [{"name": "greedy"}],
)
BESIDE = {  # what else an option needs
    "filters.mask_in_baseline": {"filters.mask_truncated": True},
    "eval.metric": {"checkpoint.keep_best": True},
    "eval.majority": {"eval.samples_per_task": 3},
    "sft.eval_every_steps": {"sft.eval_fraction": 0.25},
    "eval.shaped": {"rewards.overlong_buffer_tokens": 8},
}


def tables(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        place = nested
        for table in path:
            place = place.setdefault(table, {})
        place[name] = value
    return nested


def said_of(values: dict[str, Any]) -> str:
    try:
        Config.model_validate(tables(values))
    except ValueError as error:
        return str(error)
    return ""


def taken(key: str) -> list[Any]:
    """Values that the option takes, of those that there are here."""
    values = (*choices_of(field_at(key).annotation), *VALUES)
    fitting = [v for v in values if type(v) is type(default_of(key))]
    return [v for v in fitting if not re.search("Input should|is none of", said_of({key: v}))]


def other(key: str) -> Any:
    return next(v for v in taken(key) if v != default_of(key))


def is_met(condition: Needs, value: Any) -> bool:
    met = value in condition.values if condition.values else value not in (0, "", "none", [])
    return met != condition.unless


@pytest.mark.parametrize(("key", "condition"), CONDITIONS, ids=[f"{key}: {c}" for key, c in CONDITIONS])
def test_an_option_has_an_effect_where_its_conditions_hold_and_nowhere_else(key, condition):
    values = BESIDE.get(key, {}) | {key: other(key)}
    for each in needs_of(field_at(key)):
        values[each.key] = next(v for v in (*each.values, *taken(each.key)) if is_met(each, v))
    assert f"{key} has no effect" not in said_of(values)
    candidates = (*condition.values, *taken(condition.key), default_of(condition.key))
    off = next(v for v in candidates if not is_met(condition, v))
    (line,) = [x for x in said_of(values | {condition.key: off}).splitlines() if f"{key} has no effect" in x]
    assert condition.key in line and json.dumps(off) in line  # key and value; the fix:
    assert re.search(rf"(Set|Change) {re.escape(condition.key)}.*, or remove {key}|Remove {key}", line)


def test_the_condition_of_an_option_is_printed_with_it_and_in_the_schema(write):
    text = " ".join(describe.as_toml(load_config([write("")])).replace("\n#  ", "").split())
    for part in (
        'Discount per token. (a number, above 0, at most 1; only if algorithm.advantage = "gae" or "reinforce_plus',
        "(an integer, at least 1; only if eval.num_tasks is set; only if eval.temperature is set)",
        '"decoupled", a custom function) clip_high',
        'not with algorithm.advantage is one of "remax", "gae", "reinforce_plus_plus_tokens", "optimal_token_baseline"',
    ):
        assert part in text
    schema = json.loads(describe.schema())["$defs"]["AlgorithmConfig"]["properties"]
    assert schema["gamma"]["only_if"] == {"algorithm.advantage": ["gae", "reinforce_plus_plus_tokens"]}
    assert schema["kl_kind"]["only_if"] == {"algorithm.kl_coef": "set"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('kind = "reasoning_gym"\nname = "x"\npath = "y"', "tasks.sources.0.path"),
        ('kind = "reasoning_gym"\nname = "x"\nanswer_column = "y"', "tasks.sources.0.answer_column"),
        ('kind = "dataset"\npath = "x"\nparams = {a = 1}', "tasks.sources.0.params"),
    ],
)
def test_fields_of_the_other_kind(write, text, key):
    text = f"[[tasks.sources]]\n{text}"
    assert f"{key} has no effect in a source of kind" in message([write(text, source=False)])
    with pytest.raises(ValueError, match=f"{key} has no effect in a source of kind"):
        Config.model_validate(tomllib.loads(text))


def test_options_that_every_source_overrides(write):
    source = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "x"\nreward = "a:b"\nanswer_rule = "boxed"\n'
    found = message([write(f'[rewards]\nfunction = "c:d"\n[tasks]\nanswer_rule = "last_line"\n{source}', source=False)])
    assert "rewards.function has no effect" in found
    assert "tasks.answer_rule has no effect" in found


@pytest.mark.parametrize(
    "text",
    [
        '[rollout]\norder = "oldest_first"\nkv_on_resume = "recompute"\nmax_staleness = 0\non_stale = "finish_first"',
        "[model.lora]\nrank = 0\nalpha = 32.0",
        "[eval]\nnum_tasks = 0\nevery_steps = 0\ntemperature = 1",
        '[algorithm]\nadvantage = "rloo"\nadvantage_std = "sample"',
    ],
)
def test_the_default_value_is_harmless(write, text):
    assert load_config([write(text)]).notices == []
    Config.model_validate(tomllib.loads(text))


def test_an_earlier_layer_is_reset_with_a_notice(write):
    recipe = write("[eval]\nnum_tasks = 8\nevery_steps = 5\nsamples_per_task = 4", "recipe.toml")
    over = write("[eval]\nnum_tasks = 0", "over.toml", source=False)
    resolved = load_config([recipe, over])
    assert (resolved.config.eval.every_steps, resolved.config.eval.samples_per_task) == (0, 1)
    assert len(resolved.notices) == 2
    assert f"eval.every_steps = 5 ({recipe}) was reset to 0 ({over})" in resolved.notices[1]
    assert resolved.origin["eval.every_steps"] == str(over)


def test_a_later_layer_without_effect_is_an_error(write):
    recipe = write("[eval]\nnum_tasks = 0", "recipe.toml")
    over = write("[eval]\nevery_steps = 5", "over.toml", source=False)
    assert f"{over}: eval.every_steps has no effect" in message([recipe, over])


def test_two_overrides_are_one_layer(write):
    args = [write("")], [("eval.every_steps", "5"), ("eval.num_tasks", "0")]
    assert "command line: eval.every_steps has no effect" in message(*args)


def test_partial_recipe_made_synchronous_by_one_override(write):
    recipe = write(PARTIAL)
    resolved = load_config([recipe], [("rollout.in_flight_groups", "8")])
    rollout = resolved.config.rollout
    assert (rollout.interrupt, rollout.max_staleness, rollout.order) == ("never", 0, "oldest_first")
    assert len(resolved.notices) == 3
    assert load_config([recipe]).notices == []


def test_preset_values_without_effect_are_reset(write):
    resolved = load_config([write('[algorithm]\npreset = "dapo"\nloss = "reinforce"')])
    assert resolved.config.algorithm.clip_high == 0.2
    assert "preset dapo" in resolved.notices[0]


def test_replay_switches_generation_off(write):
    resolved = load_config([write(PARTIAL)], [("run.train_on_recorded", "runs/x/rollouts")])
    rollout = resolved.config.rollout
    assert (rollout.interrupt, rollout.in_flight_groups, rollout.max_staleness) == ("never", 8, 0)
    assert len(resolved.notices) == 4


# Refused combinations

REFUSALS = [
    (
        'interrupt = "when_enough"\nin_flight_groups = 12',
        "",
        "max_staleness = 0: an interrupted rollout is always stale",
    ),
    (
        "in_flight_groups = 16\nmax_staleness = 1",
        'correction = "none"',
        "or (if you mean it) algorithm.allow_uncorrected",
    ),
    ("top_p = 0.9", 'correction = "none"', "truncated sampling"),
    ("top_k = 5", 'correction = "none"', "truncated sampling"),
    ("min_p = 0.1", 'correction = "none"', "truncated sampling"),
    ("in_flight_groups = 7", "", "below rollout.groups_per_step = 8"),
    ("in_flight_groups = 17\nmax_staleness = 1", "", "(1 + rollout.max_staleness) * rollout.groups_per_step = 16"),
    ('in_flight_groups = 17\nmax_staleness = 1\non_stale = "finish_first"', "", "the bound could not be held"),
    ("temperature = 0", "", "rollout.temperature = 0: greedy"),
    ("group_size = 1", "", "a baseline needs at least 2 sibling rollouts"),
    ("group_size = 1", 'advantage = "rloo"', "a baseline needs at least 2 sibling rollouts"),
]


@pytest.mark.parametrize(("rollout", "algorithm", "part"), REFUSALS)
def test_refused(write, rollout, algorithm, part):
    path = write(f"[rollout]\n{rollout}\n[algorithm]\n{algorithm}")
    found = message([path])
    assert part in found
    assert str(path) in found


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[rewards]\nmin_valid = 9", "rewards.min_valid = 9 is above rollout.group_size = 8"),
        ("[train]\nminibatches_per_step = 3", "does not divide rollout.groups_per_step = 8"),
        ("[train]\nminibatches_per_step = 16", "does not divide rollout.groups_per_step = 8"),
        ("[train]\npublish_every = 3", "Set rollout.max_staleness = 2 or more"),
        (
            '[rollout]\nin_flight_groups = 16\non_stale = "mask"\n[train]\npublish_every = 2',
            "max_staleness = 1 or more",
        ),
        ('[rollout]\noverlap = true\ninterrupt = "when_enough"', "generation continues when there is enough"),
        ('[rollout]\ninterrupt = "on_weight_update"', "without rollout.overlap"),
        ('[rollout]\noverlap = true\nmax_staleness = 1\non_stale = "drop"', "rather than that anything gets too old"),
        ('[algorithm]\nadvantage = "grop"', 'Did you mean "grpo"'),
        ('[algorithm]\nloss = "cipso"', 'Did you mean "cispo"'),
        ('[algorithm]\nadvantage = "grpo_passk"\npassk = 9', "algorithm.passk = 9 is above rollout.group_size = 8"),
        ('[algorithm]\nadvantage = "gdpo"\nreward_weights = { score = "a" }', "every weight must be a number"),
        ("[rewards]\nmin_valid = 1", "one reward has no sibling to be compared with"),
        ('[run]\ntrain_on_recorded = "x"\n[algorithm]\nproximal = "snapshot"', "are not kept"),
        ('[algorithm]\nkl_coef = 0.1\nkl_kind = "k2"\nkl_bias_correction = true', "only k1 and k3"),
        ("[workflow]\ntimeout_s = 9", "workflow.timeout_s has no effect as nothing answers the policy"),
        ('[rollout]\nenvironment = "a:B"\n[workflow]\ntimeout_score = 1', 'unless workflow.on_timeout = "score"'),
        ("[tasks]\neval_fraction = 0\n[eval]\nnum_tasks = 5", "nothing is held out of tasks.sources.0"),
    ],
)
def test_refused_in_other_tables(write, text, part):
    assert part in message([write(text)])


@pytest.mark.parametrize(
    "text",
    [
        PARTIAL,
        PARTIAL + '[algorithm]\ncorrection = "none"\nallow_uncorrected = true',
        '[rollout]\ntop_p = 0.9\n[algorithm]\ncorrection = "none"\nallow_uncorrected = true',
        "[rollout]\ntop_p = 0.9",
        '[rollout]\nin_flight_groups = 17\nmax_staleness = 1\non_stale = "drop"',
        "[rollout]\nin_flight_groups = 16\nmax_staleness = 1",
        "[train]\nminibatches_per_step = 4",
        "[rollout]\nmax_staleness = 2\n[train]\npublish_every = 3",
        '[run]\ntrain_on_recorded = "x"\n[watchdog]\ntrain_timeout_s = 9',
        '[tasks]\nproducer = "a:B"\n[watchdog]\nweights_timeout_s = 9',
        '[rollout]\nenvironment = "a:B"\n[workflow]\ntimeout_s = 9\non_timeout = "score"\ntimeout_score = 1',
        '[workflow]\nenvironment = "a:B"\ntimeout_s = 9',
    ],
)
def test_allowed(write, text):
    assert load_config([write(text)]).notices == []
    Config.model_validate(tomllib.loads(text))


@given(
    groups=st.integers(1, 6),
    in_flight=st.integers(0, 20),
    staleness=st.integers(0, 3),
    interrupt=st.sampled_from(["never", "when_enough"]),
    on_stale=st.sampled_from(["", "drop", "finish_first"]),
    correction=st.sampled_from(["none", "token_truncate"]),
    allow=st.booleans(),
)
def test_whatever_loads_can_hold_its_staleness_bound(
    tmp_path_factory, groups, in_flight, staleness, interrupt, on_stale, correction, allow
):
    path = tmp_path_factory.mktemp("rules") / "a.toml"
    path.write_text(
        f"[rollout]\ngroups_per_step = {groups}\nin_flight_groups = {in_flight}\nmax_staleness = {staleness}\n"
        f'interrupt = "{interrupt}"\non_stale = "{on_stale}"\n'
        f'[algorithm]\ncorrection = "{correction}"\nallow_uncorrected = {str(allow).lower()}\n{SOURCE}'
    )
    try:
        config = load_config([path]).config
    except ConfigError:
        return
    rollout = config.rollout
    assert rollout.in_flight_groups >= groups
    assert rollout.on_stale == "drop" or rollout.in_flight_groups <= (1 + rollout.max_staleness) * groups
    assert rollout.max_staleness == 0 or correction != "none" or allow
    assert rollout.interrupt == "never" or (rollout.max_staleness > 0 and rollout.in_flight_groups > groups)
