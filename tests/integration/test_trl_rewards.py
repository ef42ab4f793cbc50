"""Reward functions of TRL's signature in runs without TRL's trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs

import rollover

CODE = """
def warm(completions, trainer_state=None, log_metric=None, log_extra=None, **columns):
    log_metric("twice", 2 * trainer_state.global_step)
    log_extra("chars", [len(text) for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]
"""


@pytest.mark.parametrize("several", [False, True])
def test_trl_reward_sees_the_step_and_logs(several: bool, tmp_path: Path) -> None:
    runs.write(tmp_path)
    reward = f"{tmp_path}/rewards.py:warm"
    (tmp_path / "rewards.py").write_text(CODE)
    run = rollover.train(
        config={"rewards.functions": [{"function": reward}]} if several else {"rewards.function": reward},
        model={"path": str(tmp_path / "model"), "dtype": "float32"},
        tasks=[{"prompt": f"count to {i}"} for i in range(8)],
        threads=1, groups_per_step=2, group_size=2, max_new_tokens=4, num_steps=2,
        train={"minibatches_per_step": 2}, **{"run.dir": str(tmp_path / "out"), "track.live": "plain"},
    )  # fmt: skip
    prefix = "reward/extra/warm." if several else "reward/extra/"
    assert [row["reward/mean"] for row in run.metrics] == [0.0, 0.5]
    assert [row[f"{prefix}twice"] for row in run.metrics] == [0.0, 4.0]
    of = [record["extras"][prefix.removeprefix("reward/extra/") + "chars"] for record in run.records()]
    assert of == [float(len(record["completion"])) for record in run.records()]
