"""[rollout.logits]: what each option makes of the engine's request, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollover.config import Config
from rollover.config.load import load_config
from rollover.config.logits import LogitsProcessing
from rollover.rollout.requests import Requests
from rollover.types import Prompt, Rollout, Task

SCHEMA = {"type": "object"}


def config(logits: dict[str, Any], **tables: Any) -> Config:
    rollout = {"logits": logits} | tables.pop("rollout", {})
    return Config.model_validate({"rollout": rollout, **tables})


def asked(made: Config) -> LogitsProcessing:
    """What the engine is asked to do for a rollout of such a run."""
    rollout = Rollout(0, 0, Task("t", "s", "r", prompt="p"), prompt=Prompt((1, 2)))
    return Requests(made.rollout, 0).continuation(rollout).processing


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("repetition_penalty", 1.1, {"repetition_penalty": 1.1}),
        ("presence_penalty", -0.5, {"presence_penalty": -0.5}),
        ("frequency_penalty", 0.25, {"frequency_penalty": 0.25}),
        ("min_new_tokens", 4, {"min_new_tokens": 4}),
        ("banned_token_ids", [9, 7], {"logit_bias": ((7, float("-inf")), (9, float("-inf")))}),
        ("forced_token_ids", [3, 3], {"forced_token_ids": (3, 3)}),
        ("logit_bias", {"12": 2.5, "3": -100}, {"logit_bias": ((3, -100.0), (12, 2.5))}),
        ("regex", "a+", {"regex": "a+"}),
        ("json_schema", json.dumps(SCHEMA), {"json_schema": json.dumps(SCHEMA)}),
    ],
)
def test_each_option_reaches_the_engine(option: str, value: Any, expected: dict[str, Any]) -> None:
    assert asked(config({option: value})) == LogitsProcessing(**expected)
    assert asked(Config()) == LogitsProcessing()


def test_from_a_file_with_the_schema_in_another(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "mine.toml").write_text(
        f'[rollout.logits]\njson_schema = "{tmp_path}/answer.json"\nlogit_bias = {{ 5 = -1.5 }}\n'
    )
    made = load_config([tmp_path / "mine.toml"], [], require_sources=False).config
    assert asked(made) == LogitsProcessing(json_schema=json.dumps(SCHEMA), logit_bias=((5, -1.5),))


REMOTE = {"engine": {"kind": "remote", "num_servers": 1}}
LORA = {"model": {"lora": {"rank": 4}}, "backend": {"type": "tinker"}}


@pytest.mark.parametrize(
    ("logits", "tables", "says"),
    [
        ({"regex": "a", "json_schema": "{}"}, {}, "an answer has one structure"),
        ({"json_schema": "nowhere.json"}, {}, "json_schema: nowhere.json cannot be read"),
        ({"json_schema": "{nothing"}, {}, "is no JSON"),
        ({"logit_bias": {"x": 1.0}}, {}, "rollout.logits.logit_bias.x = 1: expected the id of a token"),
        ({"logit_bias": {"3": -101}}, {}, "banned_token_ids"),
        ({"banned_token_ids": [4, 5], "forced_token_ids": [5]}, {}, "both have the token 5"),
        ({"banned_token_ids": [-1]}, {}, "a token's id is 0 or more"),
        ({"min_new_tokens": 300}, {}, "above rollout.max_new_tokens = 256"),
        ({"min_new_tokens": 9}, {"eval": {"num_tasks": 1, "max_new_tokens": 8}}, "above the 8 tokens of an evaluation"),
        (
            {"min_new_tokens": 9},
            {"eval": {"num_tasks": 1, "settings": [{"name": "short", "max_new_tokens": 4}]}},
            "above the 4 tokens of an evaluation",
        ),
        ({"forced_token_ids": [3] * 256}, {}, "names 256 tokens, and rollout.max_new_tokens = 256 leaves none"),
        ({"forced_token_ids": [3], "regex": "a"}, {}, "forced_token_ids has no effect with a structure"),
        ({"presence_penalty": 1}, REMOTE, 'presence_penalty with engine.kind = "remote"'),
        ({"frequency_penalty": 1}, REMOTE, "does not know where it began"),
        ({"forced_token_ids": [1]}, REMOTE, "does not know where it began"),
        ({"json_schema": "{}"}, REMOTE, "does not know where it began"),
        ({"repetition_penalty": 1.2}, LORA, "the service does not know it"),
        ({"repetition_penalty": 1.2}, {"algorithm": {"correction": "none"}}, "rollout.logits"),
        ({"min_new_tokens": 2}, {"algorithm": {"correction": "none"}}, "log-probs of the truncated or processed"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(logits: dict[str, Any], tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="rollout.logits") as error:
        config(logits, **tables)
    assert says in str(error.value)


def test_servers_are_given_what_they_can_do() -> None:
    config({"repetition_penalty": 1.2, "min_new_tokens": 3, "banned_token_ids": [3]}, **REMOTE)


def test_the_uncorrected_may_be_permitted() -> None:
    uncorrected = {"correction": "none", "allow_uncorrected": True}
    assert config({"repetition_penalty": 1.2}, algorithm=uncorrected).rollout.logits.alters
