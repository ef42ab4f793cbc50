"""Several epochs a step in a run: ended within a second one, it goes on to the weights of a run that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
from safetensors import safe_open

from rollover import cli
from rollover.trainer.local_backend import LocalBackend

SYNC = {"interrupt": "never", "in_flight_groups": 4, "groups_per_step": 4, "max_staleness": 0}
TRAIN = {"minibatches_per_step": 2, "epochs_per_step": 3, "optimizer": "muon", "warmup_ratio": 0.2}


def write(folder: Path, **tables: Any) -> Path:
    train = {**TRAIN, **tables.pop("train", {})}
    return runs.write(folder, steps=4, rollout=SYNC, train=train, checkpoint={"every_steps": 2}, **tables)


def weights(folder: Path) -> dict[str, bytes]:
    with safe_open(folder / "run" / "model" / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("more", [{}, {"max_kl": 0.005}], ids=["all updates", "max_kl"])
def test_a_run_that_ends_in_a_second_epoch_goes_on_bit_for_bit(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps after its newest checkpoint: the journal has the rollouts, and the updates are drawn as before."""
    whole, stopped = (write(tmp_path / name, train=more) for name in ("whole", "stopped"))
    assert cli.main(["train", str(whole)]) == 0, capsys.readouterr()
    rows = runs.json_lines(tmp_path / "whole" / "run" / "metrics.jsonl")
    made = [row["train/updates"] for row in rows]
    assert made == [6.0] * 4 if not more else any(3 <= num < 6 for num in made), made
    plain, calls = LocalBackend.forward_backward, []

    def fails(self: LocalBackend, *args: Any, **options: Any) -> Any:
        if self.policy_version == 3:
            calls.append(len(calls))
            if len(calls) == 4:
                raise ValueError("in the second minibatch of the second epoch")
        return plain(self, *args, **options)

    monkeypatch.setattr(LocalBackend, "forward_backward", fails)
    capsys.readouterr()
    assert cli.main(["train", str(stopped)]) == 2
    said = "".join(capsys.readouterr())
    assert "the weights are in the middle of step 4): --resume goes on from step-000002 and its journal" in said, said
    monkeypatch.setattr(LocalBackend, "forward_backward", plain)
    assert cli.main(["train", str(stopped), "--resume"]) == 0, capsys.readouterr()
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    again = runs.json_lines(tmp_path / "stopped" / "run" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "train/updates", "ratio/max"):
        assert [row[name] for row in again] == [row[name] for row in rows], name
