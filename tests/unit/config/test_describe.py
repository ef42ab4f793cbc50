"""`rollover config`: every key with its doc, and values that come back as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollover.config import Config, describe
from rollover.config.load import ConfigError, load_config
from rollover.config.schema import leaves

RECIPE = """
[rollout]
in_flight_groups = "auto"
interrupt = "token_budget"
token_budget = 40
max_staleness = 2
order = "my_order.py:first"

[[tasks.sources]]
kind = "reasoning_gym"
name = "chain_sum"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_every_key_is_printed_below_its_doc(recipe: Path) -> None:
    lines = describe.as_toml(load_config([recipe])).splitlines()
    docs: dict[str, str] = {}
    table, doc = "", ""
    for line in lines:
        if header := re.fullmatch(r"\[+([\w.]+)\]+", line):
            table, doc = header[1], ""
        elif line.startswith("#"):
            doc += line.removeprefix("#").strip() + " "
        elif " = " in line:
            docs[f"{table}.{line.partition(' = ')[0]}"], doc = doc, ""
    for key, info in leaves():
        if key == "tasks.sources":
            continue  # its rows are printed
        assert info.description, f"{key} has no doc"
        text = " ".join(docs[key].split())
        assert " ".join(info.description.split()) in text, f"{key} is printed as {text!r}"


def test_auto_comes_back_from_toml_and_json(recipe: Path, tmp_path: Path) -> None:
    resolved = load_config([recipe])
    assert resolved.config.rollout.in_flight_groups == "auto"
    printed = tmp_path / "printed.toml"
    printed.write_text(describe.as_toml(resolved))
    assert load_config([printed]).config == resolved.config
    assert Config.model_validate(json.loads(describe.as_json(resolved)), strict=True) == resolved.config
    schema = json.loads(describe.schema())["$defs"]["RolloutConfig"]["properties"]["in_flight_groups"]
    assert [choice.get("const") for choice in schema["anyOf"]] == [None, "auto"]


def test_auto_on_the_command_line(recipe: Path) -> None:
    for text, value in (("auto", "auto"), ('"auto"', "auto"), ("20", 20)):
        assert load_config([recipe], [("rollout.in_flight_groups", text)]).config.rollout.in_flight_groups == value


@pytest.mark.parametrize(
    ("key", "text", "parts"),
    [
        ("in_flight_groups", "atuo", ['an integer, at least 0, or "auto"', 'Did you mean "auto"?']),
        ("in_flight_groups", "-1", ['an integer, at least 0, or "auto"']),
        ("order", "oldest_frist", ["oldest_first, longest_first", 'Did you mean "oldest_first"?']),
        ("order", "my_order.py", ["no function (module:function or path.py:function)"]),
        ("interrupt", "when_enuff", ['Did you mean "when_enough"?']),
    ],
)
def test_a_misspelt_value_names_the_nearest(recipe: Path, key: str, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([recipe], [(f"rollout.{key}", text)])
    assert all(part in str(error.value) for part in ["command line", f"rollout.{key}", *parts])
