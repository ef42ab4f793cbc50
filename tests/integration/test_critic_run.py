"""PPO through the configuration: a critic of its own in a whole run, and with bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

from rollover import cli
from rollover.track.metrics import validate

SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0, "max_new_tokens": 12}
PPO = {"preset": "ppo"}
OWN: dict[str, Any] = {"model": "policy", "learning_rate": 1e-3, "head_learning_rate": 1e-2}


def write(folder: Path, steps: int = 4, rollout: dict[str, Any] = SYNC, **tables: Any) -> Path:
    tables = {"algorithm": PPO, "rewards": {"num_workers": 1}, **tables}
    return runs.write(folder, steps=steps, rollout=rollout, **tables)


def rows(folder: Path) -> list[dict[str, Any]]:
    return runs.json_lines(folder / "run" / "metrics.jsonl")


def test_a_partial_run_with_a_model_of_its_own_tells_of_it(tmp_path: Path) -> None:
    """With a KL in the reward of every token, too."""
    critic = OWN | {"policy_waits_steps": 2, "bootstrap_truncated": True}
    of_tokens = PPO | {"kl_in": "reward", "kl_coef": 0.1}
    recipe = write(tmp_path, steps=6, rollout={}, critic=critic, algorithm=of_tokens)
    assert cli.main(["train", str(recipe)]) == 0
    table = rows(tmp_path)
    for row in table:
        validate(row)
        assert row["critic/grad_norm"] > 0 and row["critic/skipped_steps"] == 0 and row["critic/learning_rate"] == 1e-3
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
    assert [row["grad_norm"] > 0 for row in table] == [False, False, True, True, True, True]
    assert table[0]["critic/value_mean"] == 0 != table[-1]["critic/value_mean"]
    assert any(row["staleness/max"] for row in table)


REFUSED = [
    (
        {"critic": {"bootstrap_truncated": True}, "filters": {"mask_truncated": True}},
        "critic.bootstrap_truncated has no effect with filters.mask_truncated",
    ),
    ({"critic": {"policy_waits_steps": 4}}, "the policy would never be trained"),
    ({"algorithm": PPO | {"value_clip": 0.1}}, "algorithm.value_clip: it is called critic.value_clip now"),
    (
        {"algorithm": PPO | {"critic_learning_rate": 0.1}},
        "algorithm.critic_learning_rate: it is called critic.head_learning_rate now",
    ),
]


@pytest.mark.parametrize(("tables", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_input_names_the_key_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tables: dict[str, Any], said: str
) -> None:
    recipe = runs.write(tmp_path, steps=4, rollout=SYNC, **{"algorithm": PPO, **tables})
    assert cli.main(["train", str(recipe)]) == 2
    assert said in capsys.readouterr().err
