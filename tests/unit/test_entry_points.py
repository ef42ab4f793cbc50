"""Names that other distributions register: what they resolve to, what they cannot replace, and what imports nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollover
from installed import install
from rollover import registry
from rollover.cli import main
from rollover.config import Config, RewardsConfig, TaskSourceConfig
from rollover.config.load import load_config
from rollover.config.schema import leaves
from rollover.config.table import UNSETTLED, ConfigError, Table, entry_points_of, row_of, table_of
from rollover.config.trust import FUNCTIONS, OfRun, named, text_options
from rollover.rewards.routing import choose_reward

PLACE = "untouched:attribute"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that registers `toy` for each kind. Its module cannot be imported."""
    folder = tmp_path / "site"
    install(folder, "untouched", {kind: {"toy": PLACE} for kind in registry.KINDS})
    (folder / "untouched.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def fields(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in leaves(table, prefix):
        if row := row_of(info.annotation):
            yield from fields(row, f"{name}.0.")
        elif name == "workflow.roles":
            yield from fields(table_of(info.annotation.__args__[1]), f"{name}.policy.")
        else:
            yield name, info


OPTIONS = {name: kind for name, info in fields() if (kind := entry_points_of(info))}


def with_value(key: str, value: Any) -> Config:
    for part in reversed(key.split(".")):
        value = [value] if part == "0" else {part: value}
    return Config.model_validate(value, context=UNSETTLED)


def test_every_function_option_takes_registered_names() -> None:
    without_indices = {key.replace(".0.", ".").replace(".policy.", ".") for key in OPTIONS}
    assert without_indices | {"tasks.sources.problem_key"} == set(FUNCTIONS), "(a text there is a column)"
    assert {*OPTIONS.values(), "verbs"} == registry.KINDS.keys()
    assert set(FUNCTIONS) <= set(text_options(Config))


@pytest.mark.parametrize("key", OPTIONS)
def test_registered_name_becomes_its_place(key: str, site: Path) -> None:
    value: Any = "toy"
    value = [value] if key == "track.trackers" else {"maths": value} if key == "rewards.by_data_source" else value
    got = with_value(key, value)
    for part in key.split("."):
        got = got[0] if part == "0" else got[part] if isinstance(got, dict) else getattr(got, part)
    assert got in (PLACE, [PLACE], {"maths": PLACE})
    assert "untouched" not in sys.modules


@pytest.mark.parametrize("kind", [kind for kind, ours in registry.KINDS.items() if ours])
def test_our_name_is_never_replaced(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sorted(registry.imported(registry.KINDS[kind]))
    install(tmp_path, "thief", {kind: dict.fromkeys(ours, PLACE)})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [registry.resolved(kind, name) for name in ours] == ours
    assert not registry.registered(kind)


def test_reward_with_parameters_is_ours(site: Path) -> None:
    for name in ("exact_match/boxed", 'gsm8k/{"method": "flexible"}'):
        assert registry.resolved("rewards", name) == name


def test_entry_point_with_extras_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "extra", {"engines": {"fast": "mine.engines:Fast.make [gpu]"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.resolved("engines", "fast") == "mine.engines:Fast.make"


def test_name_of_two_packages_is_refused(site: Path) -> None:
    install(site, "games", {"losses": {"toy": "games:loss"}, "rewards": {"toy": "games:reward"}})
    with pytest.raises(ConfigError, match=r'algorithm.loss = "toy" is registered by several packages: games:loss \('):
        load_config([{"algorithm.loss": "toy"}], require_sources=False)
    with pytest.raises(ValueError, match="rewards.function: 'toy' is registered by several packages"):
        choose_reward(TaskSourceConfig(kind="dataset", path="x"), RewardsConfig(function="toy"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "engine.kind",
            "toi",
            'engine.kind = "toi" is none of embedded, .*, toy, and no function .*Did you mean "toy"',
        ),
        ("run.hooks", "toi", 'run.hooks = "toi" is none of toy, and no function .*Did you mean "toy"'),
        ("track.trackers", ["wandb", "toi"], 'track.trackers = "toi" is none of wandb, .*Did you mean "toy"'),
        ("tasks.sources", [{"kind": "toi"}], 'tasks.sources.0.kind = "toi" is none of .*Did you mean "toy"'),
        ("workflow.roles", {"policy": {"advantage": "toi"}}, 'roles.policy.advantage = "toi" is none .*an "toy"'),
    ],
)
def test_unknown_name_is_compared_with_registered_ones(key: str, value: Any, said: str, site: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([{key: value}], require_sources=False)


def test_unknown_reward_is_compared_with_registered_ones(site: Path) -> None:
    with pytest.raises(ValueError, match=r"nor registered by a package \(toy\) .*did you mean 'toy'"):
        choose_reward(TaskSourceConfig(kind="dataset", path="x"), RewardsConfig(function="toyy"))


def test_name_of_a_run_directory_is_refused_unless_given(site: Path) -> None:
    """It names code that would run, as module:function does."""
    assert [str(of) for of in named({"algorithm": {"loss": "toy"}})] == [f"algorithm.loss = {PLACE!r}"]
    run = OfRun({"algorithm": {"loss": "toy"}}, "run", False, "--from", "--trust", {})
    with pytest.raises(ConfigError, match=f"algorithm.loss = '{PLACE}'"):
        load_config([run], require_sources=False)
    for same in ("toy", PLACE):
        given = load_config([run, {"algorithm.loss": same}], require_sources=False)
        assert given.config.algorithm.loss == PLACE
    assert "untouched" not in sys.modules


def test_readers_of_a_run_directory_import_no_plugin(site: Path, tmp_path: Path, capsys) -> None:
    golden = Path(__file__).parents[1] / "golden" / "run-format-1"
    run = tmp_path / "run"
    run.mkdir()
    for path in golden.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes())
    saved = json.loads((run / "config.resolved.json").read_text())
    saved["rollout"]["order"] = saved["algorithm"]["loss"] = saved["rewards"]["function"] = "toy"
    saved["track"]["trackers"], saved["engine"]["kind"] = ["toy"], "toy"
    (run / "config.resolved.json").write_text(json.dumps(saved))
    for words in (["show", str(run)], ["report", str(run), "--output", str(tmp_path / "report.html")]):
        main(words)
    main(["plan", "apr", "--from-run", str(run), "--steps", "2"])
    rollover.open(run)
    assert "imported" not in "".join(capsys.readouterr())
    assert "untouched" not in sys.modules
