"""What a program hands over, as a configuration."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollover.api.settings import Arguments, Settings, key_of
from rollover.config import ConfigError
from rollover.live_objects import live_object
from rollover.track.build import build_trackers
from rollover.track.tracker import CustomTracker, Tracker

ROWS = [{"prompt": f"count to {i}", "answer": str(i)} for i in range(40)]


def settled(**arguments: Any) -> Settings:
    overrides = arguments.pop("overrides", {})
    return Arguments(**{"model": "m", "tasks": ROWS, **arguments}, overrides=overrides).settle()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_steps", "train.num_steps"),
        ("group_size", "rollout.group_size"),
        ("train.num_steps", "train.num_steps"),
        ("train", "train"),
        ("rank", "model.lora.rank"),
        ("threads", "run.threads"),
        ("seed", "run.seed"),
        ("max_staleness", "rollout.max_staleness"),
        ("engines", "plan.engines"),
    ],
)
def test_a_keyword_names_a_key(name: str, key: str) -> None:
    assert key_of(name) == key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "every_steps",
            r'may be eval.every_steps or checkpoint.every_steps: write \*\*\{"eval.every_steps": ...\}, or',
        ),
        ("num_step", 'there is no option num_step. Did you mean "num_steps"?'),
    ],
)
def test_a_keyword_that_names_none_or_two_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        key_of(name)


def test_arguments_stand_above_config_and_later_config_above_earlier(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nnum_steps = 1\nlearning_rate = 1e-3\n[rollout]\ngroup_size = 2\n")
    config = [tmp_path / "a.toml", {"train": {"num_steps": 2}, "rollout.group_size": 3}]
    settings = settled(config=config, overrides={"num_steps": np.int64(5), "rollout": {"groups_per_step": 7}})
    made = settings.config
    assert (made.train.num_steps, made.train.learning_rate) == (5, 1e-3)
    assert (made.rollout.group_size, made.rollout.groups_per_step) == (3, 7)
    settings.release()


def test_an_element_of_an_array_is_reached() -> None:
    settings = settled(tasks="chain_sum", overrides={"tasks.sources.0.params.max_digits": 1})
    (source,) = settings.config.tasks.sources
    assert source.kind == "reasoning_gym" and source.params == {"max_digits": 1}


def test_names_of_generators_and_files() -> None:
    kinds = [(s.kind, s.name or s.path) for s in settled(tasks=["chain_sum", "rows.jsonl"]).config.tasks.sources]
    assert kinds == [("reasoning_gym", "chain_sum"), ("dataset", "rows.jsonl")]


def test_functions_are_held_by_name_until_the_run_is_over() -> None:
    def order(view):
        return (view.remaining,)

    settings = settled(
        reward=lambda completions, **_: [1.0 for _ in completions],
        overrides={"order": order, "filters": {"custom": lambda group: None}, "in_flight_groups": 16,
                   "max_staleness": 1, "interrupt": "when_enough", "groups_per_step": 8},
    )  # fmt: skip
    config = settings.config
    assert config.rollout.order.startswith("<python>:order-") and live_object(config.rollout.order) is order
    assert config.filters.custom.startswith("<python>:lambda-")
    assert config.rewards.function.startswith("<python>:lambda-")
    settings.release()
    with pytest.raises(ValueError, match="names an object"):
        live_object(config.rollout.order)


def test_several_rewards_are_one(tmp_path: Path) -> None:
    settings = settled(reward=[lambda completions, **_: [1.0], "exact_match"])
    first, second = settings.config.rewards.functions
    assert first.function.startswith("<python>:lambda-") and second.function == "exact_match"
    assert not settings.config.rewards.function
    weighed = settled(
        overrides={"rewards": {"functions": [{"function": lambda completions, **_: [1.0], "weight": 0.5}]}}
    )
    (row,) = weighed.config.rewards.functions
    assert row.function.startswith("<python>:lambda-") and row.weight == 0.5
    weighed.release()
    assert settled(reward=["exact_match"]).config.rewards.function == "exact_match"
    settings.release()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": [1, 2]}, "row 1 is a int: expected a dict"),
        ({"tasks": 5}, "tasks is a int: expected dicts"),
        ({"tasks": None, "eval_tasks": ROWS}, "eval_tasks needs tasks"),
        ({"tasks": "chain_sum", "eval_tasks": ROWS}, "a generator holds out its own"),
        ({"reward": 5}, "reward is a int, which no option takes"),
        ({"overrides": {"trackers": [Tracker()]}}, "track.trackers.0 is a Tracker, .* give .* its class"),
        ({"reward": []}, "reward is an empty list"),
        ({"model": object()}, "model is a object: give a folder"),
        ({"overrides": {"num_steps": None}}, "train.num_steps = None: leave the key out"),
        ({"overrides": {"num_steps": "many"}}, "train.num_steps = \"many\": expected an integer"),
        ({"overrides": {"train": {"num_step": 1}}}, "train.num_step"),
        ({"overrides": {"run.replay": 1}}, "run.replay"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(**arguments)


def test_windows_is_refused_in_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OSError, match="does not run on Windows itself"):
        settled(tasks=["chain_sum"])


def test_a_function_that_cannot_travel_is_named_with_the_cure() -> None:
    lock = threading.Lock()

    def reward(completions, **_):
        with lock:
            return [0.0 for _ in completions]

    with pytest.raises(ConfigError, match=r"rewards.function: .*It uses lock \(lock\).*Make such a thing inside"):
        settled(reward=reward)


def test_a_reward_beside_a_source_s_own_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    source = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'
    recipe.write_text(f'{source}reward = "exact_match"\n{source}')
    with pytest.raises(ConfigError, match="reward has no effect on the source 'chain_sum'"):
        settled(tasks=None, config=recipe, reward=lambda completions, **_: [0.0])


def test_a_run_that_goes_on_has_its_settings(tmp_path: Path) -> None:
    rows = list(ROWS)  # which no other test holds
    before = settled(
        tasks=rows, reward="exact_match", overrides={"num_steps": 7, "preset": "dapo", "groups_per_step": 4}
    )
    (tmp_path / "config.resolved.json").write_text(before.config.model_dump_json())
    after = Arguments(resume=tmp_path, tasks=rows, overrides={"num_steps": 9, "groups_per_step": 6}).settle()
    changed = {
        key: value
        for key, value in flat(after.config.model_dump(mode="json")).items()
        if value != flat(before.config.model_dump(mode="json")).get(key)
    }
    assert changed == {
        "run.dir": str(tmp_path),
        "train.num_steps": 9,
        "rollout.groups_per_step": 6,
        "rollout.in_flight_groups": 6,
    }
    before.release()
    after.release()
    with pytest.raises(ConfigError, match="tasks.sources.0.path: <python>:tasks.* names an object"):
        Arguments(resume=tmp_path).settle()
    with pytest.raises(ConfigError, match="holds no run"):
        Arguments(resume=tmp_path / "other").settle()


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: json.dumps(value) if isinstance(value, list) else value}
    return {k: v for name, item in value.items() for k, v in flat(item, f"{prefix}.{name}".lstrip(".")).items()}


def test_a_tracker_that_the_program_has_made_is_handed_over_by_a_function(tmp_path: Path) -> None:
    mine = Tracker()
    settings = settled(overrides={"trackers": [lambda: mine]})
    (spec,) = settings.config.track.trackers
    with build_trackers(settings.config, tmp_path) as trackers:
        own = trackers.named[spec]
    assert isinstance(own, CustomTracker) and own.tracker is mine
    settings.release()
