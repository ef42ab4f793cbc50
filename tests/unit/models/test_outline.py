"""The modules of a model without its weights: as it was loaded, and without running code that comes with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from rollover.config import ModelConfig
from rollover.models.load import load_model, load_outline, make_outline

CODE = "from pathlib import Path\nPath({!r}).touch()\nraise ImportError('it was run')\n"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_outline_to_be_filled_has_what_the_loaded_model_has(family: str, tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(tiny.save(tmp_path / "model", family, dtype=torch.bfloat16)))
    loaded, outline = load_model(cfg), load_outline(cfg, filled_later=True)
    ours, theirs = dict(outline.model.named_parameters()), dict(loaded.model.named_parameters())
    assert {n: (p.shape, p.dtype) for n, p in ours.items()} == {n: (p.shape, p.dtype) for n, p in theirs.items()}
    assert all(p.is_meta for p in ours.values())
    buffers = [{n: (b.shape, b.dtype) for n, b in m.named_buffers()} for m in (outline.model, loaded.model)]
    assert buffers[0] == buffers[1]
    assert type(outline.model) is type(loaded.model)
    narrow = make_outline(loaded, cfg, torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16} and all(p.is_meta for p in narrow.parameters())


def test_an_outline_runs_no_code_that_comes_with_the_model(tmp_path: Path) -> None:
    folder, marker = tiny.save(tmp_path / "model"), tmp_path / "it_was_run"
    (folder / "own.py").write_text(CODE.format(str(marker)))
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(settings))
    cfg = ModelConfig(path=str(folder))
    loaded = load_model(cfg)
    assert make_outline(loaded, cfg, torch.float32) is not None and load_outline(cfg, filled_later=True)
    assert not marker.exists()
