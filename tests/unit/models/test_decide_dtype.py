"""model.dtype = "auto": decided once by the speed of the device, never where a dtype is given, and kept on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from rollover.cli import main
from rollover.config import Config
from rollover.config.load import ConfigError, load_config
from rollover.models import devices
from rollover.models.devices import decide_dtype, dtype_of

BF16_MACHINE = {torch.float32: 0.010, torch.bfloat16: 0.004}
EMULATES = {torch.float32: 0.010, torch.bfloat16: 0.060}
A_LITTLE_FASTER = {torch.float32: 0.0125, torch.bfloat16: 0.010}


def machine(seconds: dict[torch.dtype, float], asked: list[torch.dtype] | None = None) -> Any:
    def product(device: torch.device, dtype: torch.dtype) -> float:
        if asked is not None:
            asked.append(dtype)
        return seconds[dtype]

    return product


@pytest.mark.parametrize(
    ("seconds", "dtype", "times"),
    [(BF16_MACHINE, "bfloat16", "2.5"), (EMULATES, "float32", "0.17"), (A_LITTLE_FASTER, "float32", "1.2")],
)
def test_auto_is_what_the_device_multiplies_faster(seconds: Any, dtype: str, times: str) -> None:
    config = Config()
    line = decide_dtype(config, seconds=machine(seconds))
    assert line == (
        f'model.dtype = "auto" is {dtype}: this device multiplies bfloat16 {times} times as fast as float32'
    )
    assert config.model.dtype == dtype and dtype_of(config) == getattr(torch, dtype)
    assert Config.model_validate(config.model_dump()).model.dtype == dtype, "what children are given"


def test_a_given_dtype_is_not_timed() -> None:
    for dtype in ("bfloat16", "float32"):
        asked: list[torch.dtype] = []
        config = Config.model_validate({"model": {"dtype": dtype}})
        assert decide_dtype(config, seconds=machine(BF16_MACHINE, asked)) == "" and asked == []
        assert decide_dtype(config, "float32", machine(BF16_MACHINE, asked)) == "" and config.model.dtype == dtype


def test_this_machine_is_timed_by_products() -> None:
    config = Config()
    assert decide_dtype(config).startswith('model.dtype = "auto" is ')
    assert config.model.dtype in ("bfloat16", "float32")


LORA = {"model": {"lora": {"rank": 2, "dora": True}}, "algorithm": {"correction": "none"}}


def test_auto_is_float32_where_bfloat16_would_be_refused() -> None:
    for earlier in ("", "bfloat16"):  # of a run that is resumed with other settings
        config = load_config([LORA], require_sources=False).config
        assert "adapters merged" in decide_dtype(config, earlier, machine(BF16_MACHINE))
        assert config.model.dtype == "float32"
    with pytest.raises(ConfigError, match='model.dtype = "float32" or "auto"'):
        load_config([LORA, {"model": {"dtype": "bfloat16"}}], require_sources=False)


def test_a_dry_run_times_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    monkeypatch.setattr(devices, "product_seconds", machine(EMULATES, asked))
    assert main(["train", str(runs.write(tmp_path, model={"dtype": "auto"})), "--dry-run"]) == 0
    assert asked == []


def test_a_resumed_run_keeps_the_dtype_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs.write(tmp_path, steps=2, model={"dtype": "auto"}, rollout={"max_new_tokens": 8})
    monkeypatch.setattr(devices, "product_seconds", machine(EMULATES))
    assert main(["train", str(recipe)]) == 0
    resolved = tmp_path / "run" / "config.resolved.json"
    assert json.loads(resolved.read_text())["model"]["dtype"] == "float32"
    assert 'model.dtype = "auto" is float32: this device multiplies' in capsys.readouterr().out
    monkeypatch.setattr(devices, "product_seconds", machine(BF16_MACHINE))
    assert main(["train", str(recipe), "--resume", f"--run.dir={tmp_path / 'run'}", "--train.num_steps", "3"]) == 0
    out = capsys.readouterr()
    assert 'model.dtype = "auto" is float32: as this run began' in out.out
    assert json.loads(resolved.read_text())["model"]["dtype"] == "float32"
    changed = json.loads((tmp_path / "run" / "config.resolved.1.json").read_text())
    assert changed["model"]["dtype"] == "float32" and changed["train"]["num_steps"] == 2
