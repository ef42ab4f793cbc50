"""Keys of earlier versions are read with a notice, and `rollover config --upgrade` rewrites them."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from rollover.api.settings import key_of
from rollover.cli import main
from rollover.config import ConfigError
from rollover.config.load import load_config
from rollover.config.renames import RENAMED, upgrade
from rollover.config.schema import default_of, field_at
from rollover.config.table import value_of

OLD = """\
# Kept.
[algorithm]
advantage = "gae"
value_clip = 0.3  # of PPO
rejection = "sequence_mean_k3"
rejection_high = 0.05

[train]
num_steps = 3
"""


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_former_key_sets_the_new_one_in_every_layer(old: str, new: str, tmp_path: Path) -> None:
    assert field_at(new) and not field_at(old)
    value = "x" if isinstance(default_of(new), str) else 0.5
    gae = {"algorithm.advantage": "gae"} if new.startswith("critic.") else {}
    text = f'{old} = "{value}"\n' if isinstance(value, str) else f"{old} = {value}\n"
    (tmp_path / "old.toml").write_text(text + "".join(f'{key} = "{name}"\n' for key, name in gae.items()))
    for files, overrides in (
        ([tmp_path / "old.toml"], []),
        ([{old: value} | gae], []),
        ([gae], [(old, str(value))]),
    ):
        resolved = load_config(files, overrides, require_sources=False)
        assert value_of(resolved.config, new) == value
        (notice,) = [line for line in resolved.notices if f"{old} is called {new} now" in line]
        assert "rollover config --upgrade" in notice
    if old.rpartition(".")[2] != new.rpartition(".")[2]:
        assert key_of(old.rpartition(".")[2]) == old


def test_former_key_beside_the_new_one_is_refused() -> None:
    both = {"run.replay_rollouts": "a", "run.train_on_recorded": "b"}
    with pytest.raises(ConfigError, match=r"Python: run\.replay_rollouts .* Remove run\.replay_rollouts"):
        load_config([{"run": {"replay_rollouts": "a", "train_on_recorded": "b"}}], require_sources=False)
    assert load_config([{key: value} for key, value in both.items()], require_sources=False)  # one layer over the other


@pytest.mark.parametrize(("old", "new"), [(0.0, math.inf), (0.5, 0.5)])
def test_off_policy_mask_of_zero_was_off(old: float, new: float) -> None:
    tables = {"algorithm": {"off_policy_mask_threshold": old}}
    upgrade(tables)
    assert tables == {"algorithm": {"off_policy_mask_above": new}}


def test_tables_of_another_shape_are_left_alone() -> None:
    tables = {"algorithm": 3, "critic": 4, "run": ["replay_rollouts"]}
    assert upgrade(tables) == [] and tables == {"algorithm": 3, "critic": 4, "run": ["replay_rollouts"]}
    tables = {"algorithm": {"value_clip": 0.1}, "critic": 4}
    assert upgrade(tables) == []


def test_upgrade_rewrites_a_file_and_keeps_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    before = load_config([path], require_sources=False).config
    assert main(["config", "--upgrade", str(path)]) == 0
    assert "algorithm.value_clip is called critic.value_clip now" in capsys.readouterr().out
    text = path.read_text()
    assert text.startswith("# Kept.\n") and "# of PPO" in text
    assert tomllib.loads(text)["critic"] == {"value_clip": 0.3}
    after = load_config([path], require_sources=False)
    assert after.config == before and after.notices == []
    assert main(["config", "--upgrade", str(path)]) == 0
    assert "nothing to change" in capsys.readouterr().out and path.read_text() == text


def test_upgrade_of_a_wrong_file_names_it_and_leaves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[run\n")
    assert main(["config", "--upgrade", str(path)]) == 2
    assert str(path) in capsys.readouterr().err and path.read_text() == "[run\n"
    assert main(["config", "--upgrade", str(tmp_path / "none.toml")]) == 2
    assert main(["config", "--upgrade", str(path), "--train.num_steps", "1"]) == 2
