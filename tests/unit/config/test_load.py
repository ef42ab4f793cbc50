"""Layers, types and messages of the configuration."""

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.config import Config, describe
from rollover.config.load import ConfigError, load_config
from rollover.config.presets import PRESETS
from rollover.config.resume import changes
from rollover.config.rollout import RolloutConfig
from rollover.config.schema import default_of, expected, field_at, leaves, names
from rollover.config.table import Table, value_of

SOURCE = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\nparams = {min_terms = 2, max_digits = 1}\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "a.toml", *, source: bool = True) -> Path:
        path = tmp_path / name
        path.write_text(text + ("\n" + SOURCE if source else ""), encoding="utf-8")
        return path

    return write


def message(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(*args, **kwargs)
    return str(error.value)


# Layers


def test_defaults_are_resolved(write):
    resolved = load_config([write("")])
    assert resolved.config.rollout.in_flight_groups == Config().rollout.groups_per_step
    assert resolved.config.rollout.on_stale == "finish_first"
    assert resolved.origin["rollout.in_flight_groups"] == "derived from rollout.groups_per_step"
    assert resolved.notices == []


def test_later_layers_win_and_tables_merge(write):
    a = write("[train]\nnum_steps = 1\nlearning_rate = 0.1\n[run]\nname = 'a'\nseed = 1", "a.toml")
    b = write("[train]\nnum_steps = 2\n[run]\nname = 'b'", "b.toml", source=False)
    resolved = load_config([a, b], [("run.name", "c")])
    assert (resolved.config.train.num_steps, resolved.config.train.learning_rate) == (2, 0.1)
    assert (resolved.config.run.name, resolved.config.run.seed) == ("c", 1)
    assert resolved.origin["train.learning_rate"] == str(a)
    assert resolved.origin["train.num_steps"] == str(b)
    assert resolved.origin["run.name"] == "command line"
    assert "train.weight_decay" not in resolved.origin


def test_dotted_keys_of_one_free_table_are_all_taken():
    bounds = {"algorithm.loss_options.tau_positive": 9.0, "algorithm.loss_options.tau_negative": 2.0}
    config = load_config([{"algorithm.loss": "sapo", **bounds}], require_sources=False).config
    assert config.algorithm.loss_options == {"tau_positive": 9.0, "tau_negative": 2.0}


def test_arrays_are_replaced(write):
    a = write("", "a.toml")
    b = write('[[tasks.sources]]\nkind = "dataset"\npath = "x.jsonl"', "b.toml", source=False)
    resolved = load_config([a, b])
    (source,) = resolved.config.tasks.sources
    assert (source.kind, source.params) == ("dataset", {})
    assert resolved.origin["tasks.sources.0.path"] == str(b)
    assert "tasks.sources.0.params" not in resolved.origin


def test_one_value_of_an_array_element(write):
    resolved = load_config(
        [write("")], [("tasks.sources.0.params.max_digits", "2"), ("tasks.sources.0.weight", "3"), ("run.seed", "4")]
    )
    (source,) = resolved.config.tasks.sources
    assert source.params == {"min_terms": 2, "max_digits": 2}
    assert source.weight == 3
    assert resolved.origin["tasks.sources.0.weight"] == "command line"


@pytest.mark.parametrize(
    "key", ["tasks.sources.1.weight", "tasks.sources.x.weight", "tasks.sources.0", "tasks.sources.-1.a"]
)
def test_array_element_that_is_not_there(write, key):
    assert "tasks.sources.INDEX.FIELD" in message([write("")], [(key, "1")])


def test_unknown_field_of_an_array_element(write):
    assert "Did you mean tasks.sources.0.weight?" in message([write("")], [("tasks.sources.0.wight", "1")])
    assert "unknown key tasks.sources.0.weight.x" in message([write("")], [("tasks.sources.0.weight.x", "1")])


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_lies_below_files(write, name):
    examples = [("sft.path", "examples.jsonl")] if name == "sft" else []
    overrides = [("algorithm.preset", name), *examples]
    resolved = load_config([write('[algorithm]\naggregation = "token-sum"')], overrides)
    algorithm = resolved.config.algorithm
    assert {k: getattr(algorithm, k) for k in PRESETS[name]} == PRESETS[name] | {"aggregation": "token-sum"}
    assert resolved.origin["algorithm.loss"] == f"preset {name}"


def test_presets_are_the_choices_of_the_option():
    assert expected(field_at("algorithm.preset")) == "one of " + ", ".join(f'"{name}"' for name in PRESETS)
    for values in PRESETS.values():
        assert all(field_at(f"algorithm.{key}") for key in values)


def test_the_topmost_layer_names_the_preset(write):
    a = write('[algorithm]\npreset = "dr_grpo"', "a.toml")
    b = write('[algorithm]\npreset = "dapo"', "b.toml", source=False)
    assert load_config([a, b]).config.algorithm.clip_high == 0.28
    assert load_config([b, a]).config.algorithm.advantage == "dr_grpo"
    assert load_config([a, b], [("algorithm.preset", "grpo")]).config.algorithm.clip_high == 0.2


def test_unknown_preset(write):
    text = message([write('[algorithm]\npreset = "dappo"')])
    assert 'expected one of "grpo", "dapo", "dr_grpo", "gspo"' in text
    assert 'Did you mean "dapo"?' in text


# Overrides


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.num_steps", "5", 5),
        ("train.learning_rate", "1e-5", 1e-5),
        ("train.learning_rate", "1", 1.0),
        ("rollout.stop", '["a", "b"]', ["a", "b"]),
        ("rollout.stop_token_ids", "[1, 2]", [1, 2]),
        ("track.rollouts", "false", False),
        ("run.name", "plain text", "plain text"),
        ("run.name", "5", "5"),
        ("run.name", "true", "true"),
        ("run.name", '"quoted"', "quoted"),
        ("run.name", "", ""),
        ("run.name", "a\nb = 1", "a\nb = 1"),
        ("model.path", "/data/model #2", "/data/model #2"),
        ("model.dtype", "float32", "float32"),
        ("eval.pass_threshold", "-0.5", -0.5),
    ],
)
def test_override_values(write, key, text, value):
    config = load_config([write("[eval]\nnum_tasks = 1")], [(key, text)]).config
    table, name = key.split(".")
    found = getattr(getattr(config, table), name)
    assert found == value
    assert type(found) is type(value)


def test_a_whole_table_as_override(write):
    assert load_config([write("")], [("model.lora", "{rank = 8, alpha = 4.0}")]).config.model.lora.alpha == 4


def test_threads_are_chosen_or_a_number(write):
    assert load_config([write("")]).config.run.threads == "auto"
    assert load_config([write("[run]\nthreads = 0")]).config.run.threads == 0
    recipe = write("[run]\nthreads = 2")
    assert load_config([recipe], [("run.threads", "auto")]).config.run.threads == "auto"
    assert load_config([recipe], [("run.threads", "3")]).config.run.threads == 3


# Messages


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[rollout]\ngrup_size = 4", ["unknown key rollout.grup_size", "rollout.group_size?"]),
        ("[rolout]\ngroup_size = 4", ["unknown table [rolout]", "[rollout]?"]),
        ("group_size = 4", ["unknown key group_size", "rollout.group_size?"]),
        ("[train]\ngroup_size = 4", ["unknown key train.group_size", "rollout.group_size?"]),
        ("[model.lora]\nrnk = 4", ["model.lora.rank?"]),
        ('[rollout]\ngroup_size = "5"', ['rollout.group_size = "5"', "expected an integer, at least 1"]),
        ("[rollout]\ngroup_size = 5.0", ["rollout.group_size = 5.0", "expected an integer"]),
        ("[rollout]\ngroup_size = true", ["rollout.group_size = true", "expected an integer"]),
        ("[train]\nlearning_rate = true", ["train.learning_rate = true", "expected a number, at least 0"]),
        ('[track]\nrollouts = "yes"', ["expected true or false"]),
        ("[run]\nname = 5", ["run.name = 5", "expected a string"]),
        ("[rollout]\ngroup_size = 0", ["rollout.group_size = 0", "at least 1"]),
        ("[rollout]\ntop_p = 1.5", ["rollout.top_p = 1.5", "expected a number, above 0, at most 1"]),
        ('[rollout]\nstop = "x"', ["rollout.stop", "expected a list of strings"]),
        ("[rollout]\nstop = [1]", ["rollout.stop = [1]", "expected a list of strings"]),
        ('[rollout]\norder = "oldest"', ['"oldest"', '"oldest_first"', 'Did you mean "oldest_first"?']),
        ("rollout = 5", ["rollout is a table, write [rollout]"]),
        ("[eval]\nnum_tasks = 1\npass_threshold = nan", ["eval.pass_threshold", "nan"]),
        ("[run]\nthreads = -1", ["run.threads = -1", 'expected an integer, at least 0, or "auto"']),
        ('[run]\nthreads = "atuo"', ['run.threads = "atuo"', 'Did you mean "auto"?']),
        ("[run]\nname = 2020-01-01", ["run.name = 2020-01-01", "dates"]),
    ],
)
def test_wrong_values_name_file_key_and_fix(write, text, parts):
    path = write(text)
    found = message([path])
    assert found.startswith(f"{path}: ")
    for part in parts:
        assert part in found


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            '[[tasks.sources]]\nname = "x"',
            'tasks.sources.0.kind is missing: expected one of "reasoning_gym", "arithmetic"',
        ),
        ('[[tasks.sources]]\nkind = "dataset"', "tasks.sources.0.path is missing"),
        ('[[tasks.sources]]\nkind = "reasoning_gym"', "tasks.sources.0.name is missing"),
        ('[[tasks.sources]]\nkind = "gym"', 'tasks.sources.0.kind = "gym" is none of reasoning_gym,'),
        ('[[tasks.sources]]\nkind = "dataset"\npth = "x"', "Did you mean tasks.sources.0.path?"),
        ('[[tasks.sources]]\nkind = "dataset"\npath = "x"\nanswer_rule = "box"', "tasks.sources.0.answer_rule"),
        (
            '[[tasks.sources]]\nkind = "dataset"\npath = "x"\nweight = -1',
            "tasks.sources.0.weight = -1: expected a number, at least 0",
        ),
        ('[tasks]\nsources = "x"', "write [[tasks.sources]]"),
        (
            '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "x"\nparams = {day = 2020-01-01}',
            "tasks.sources.0.params.day",
        ),
        ("[run]", "tasks.sources is empty"),
    ],
)
def test_wrong_sources(write, text, part):
    assert part in message([write(text, source=False)])


def test_sources_are_not_always_needed(write):
    assert load_config([write("", source=False)], require_sources=False).config.tasks.sources == []


def test_several_problems_are_told_at_once(write):
    found = message([write("[rollout]\ngroup_size = 0\n[train]\nnum_steps = -1")])
    assert "rollout.group_size" in found
    assert "train.num_steps" in found


def test_syntax_error_names_the_line(write):
    path = write("[run]\nname = unquoted", source=False)
    assert message([path]).startswith(f"{path}, line 2: not valid TOML")
    assert "not valid TOML" in message([write("[run", source=False)])


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in message([path])


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000])
def test_value_that_no_parser_takes_names_the_file(write, value):
    path = write(f"[run]\nseed = {value}", source=False)
    assert message([path]).startswith(f"{path}: cannot be read as TOML: ")


def test_missing_file_suggests_a_near_one(write, tmp_path):
    path = write("", "quickstart.toml")
    assert f"Did you mean {path}?" in message([tmp_path / "quikstart.toml"])
    assert "no such file" in message([tmp_path / "nowhere" / "x.toml"])
    assert f"is a folder: give a TOML file in it. Did you mean {path}?" in message([tmp_path])


def test_missing_file_suggests_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart.toml", "quikstart.toml", "configs/quickstart.toml"):
        assert message([name]) == f"{name}: no such file. Did you mean the recipe quickstart?"
    assert message(["aprl"]) == "aprl: no such file, and no recipe. Did you mean the recipe april?"
    assert message(["kimi"]).endswith("no recipe. Did you mean the recipe kimi_k15?")
    assert message(["nothing"]).startswith("nothing: no such file, and no recipe. The recipes are quickstart, apr, ")
    assert message(["nothing.toml"]) == "nothing.toml: no such file. Check the path"


# Numbers that are not finite


def infinite(annotation: Any) -> Iterator[Any]:
    """Values of this annotation that hold inf; a table of a list or a dict has inf in each of its numbers."""
    parts = get_args(annotation)
    if annotation is float:
        yield from (math.inf, -math.inf)
    elif get_origin(annotation) is list:
        yield from ([value] for value in infinite(parts[0]))
    elif get_origin(annotation) is dict:
        yield from ({"1": value} for value in infinite(parts[1]))
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        yield from (value for part in parts for value in infinite(part))
    elif isinstance(annotation, type) and issubclass(annotation, Table):
        for name, info in annotation.model_fields.items():
            yield from ({name: value} for value in infinite(info.annotation))


NUMBERS = {key: [*infinite(info.annotation)] for key, info in leaves()}
UNLIMITED = [key for key, info in leaves() if any(getattr(of, "allow_inf_nan", False) for of in info.metadata)]


@pytest.mark.parametrize("key", [key for key, values in NUMBERS.items() if values])
def test_infinite_number_is_refused(key):
    for value in NUMBERS[key]:
        if value != math.inf or key not in UNLIMITED:
            found = message([{key: value}], require_sources=False)
            assert key in found
            assert "Numbers must be finite" in found or key in UNLIMITED


@pytest.mark.parametrize("key", UNLIMITED)
def test_unlimited_number_may_be_infinite(key):
    config = load_config([{"workflow.function": "a.py:f", key: math.inf}], require_sources=False).config
    assert value_of(config, key) == math.inf


def test_infinite_number_on_the_command_line_is_refused(write):
    found = message([write("")], [("rollout.temperature", "inf")])
    assert (
        found == "command line: rollout.temperature = Infinity: expected a number, at least 0. Numbers must be finite"
    )
    with pytest.raises(ValueError, match="finite"):
        RolloutConfig(temperature=-math.inf)


@pytest.mark.parametrize("key", ["engine.kv_memory_gb", "rewards.memory_gb", "workflow.memory_gb"])
def test_memory_of_more_than_64_bits_is_refused(key):
    assert f"{key} = 1e+308: expected a number" in message([{key: 1e308}], require_sources=False)


def test_no_limit_is_read_back(write):
    first = load_config([write("[rewards]\ntimeout_s = inf")])
    assert math.isinf(json.loads(first.config.model_dump_json())["rewards"]["timeout_s"])
    assert changes(json.loads(describe.as_json(first)), first.config) == []


# The tree of fields, and printing


def test_every_field_has_a_doc():
    assert [name for name in names((0,)) if not (field_at(name) and field_at(name).description)] == []


def test_every_default_takes_itself(write):
    """No default is refused: each one, given in a file, loads."""
    for key, _ in leaves():
        if key == "tasks.sources":
            continue
        table, _, name = key.rpartition(".")
        path = write(f"[{table}]\n{name} = {describe.toml_value(default_of(key))}")
        assert load_config([path]).config == load_config([write("")]).config


plain = st.recursive(
    st.text(st.characters(codec="utf-8"), max_size=8)
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_printed_values_parse_to_themselves(value):
    assert tomllib.loads(f"value = {describe.toml_value(value)}")["value"] == value


@given(
    seed=st.integers(-(2**60), 2**60),
    rate=st.floats(0, 1e9),
    stop=st.lists(st.text(st.characters(codec="utf-8")), max_size=3),
    params=st.dictionaries(st.text(st.characters(codec="utf-8")), plain, max_size=3),
    prompt=st.text(st.characters(codec="utf-8")),
)
def test_printed_configuration_loads_to_itself(tmp_path_factory, seed, rate, stop, params, prompt):
    folder = tmp_path_factory.mktemp("config")
    path = folder / "a.toml"
    value = describe.toml_value
    path.write_text(
        f"[run]\nseed = {seed}\n[train]\nlearning_rate = {value(rate)}\n[rollout]\nstop = {value(stop)}\n"
        f"[tasks]\nsystem_prompt = {value(prompt)}\n"
        f'[[tasks.sources]]\nkind = "reasoning_gym"\nname = "x"\nparams = {value(params)}\n',
        encoding="utf-8",
    )
    first = load_config([path])
    again = folder / "b.toml"
    again.write_text(describe.as_toml(first), encoding="utf-8")
    second = load_config([again])
    assert second.config == first.config
    assert second.config.tasks.sources[0].params == params
    assert json.loads(describe.as_json(first)) == json.loads(describe.as_json(second))


def test_description_tells_doc_and_origin(write):
    path = write("[train]\nnum_steps = 3")
    text = describe.as_toml(load_config([path], [("run.seed", "9")]))
    assert f"num_steps = 3  # {path}" in text
    assert "seed = 9  # command line" in text
    assert "clip_low = 0.2  # preset grpo" in text
    assert "weight_decay = 0.0  # default" in text
    assert f'kind = "reasoning_gym"  # {path}' in text
    assert "# Decoupled weight decay (matrices only); sgd adds it to the gradient. (a number, at least 0)" in text
