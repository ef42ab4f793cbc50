"""A file that is written one tensor after the other is one that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollover.weights.safetensors_stream import mapped, write_safetensors

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.arange(3).to(torch.bfloat16),
    "transposed": torch.arange(6, dtype=torch.float32).view(2, 3).T,
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}


def shapes() -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}


def test_it_is_read_back_by_safetensors_and_as_views(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_safetensors(path, shapes(), TENSORS.items())
    for found in (load_file(path), dict(mapped(path))):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    views = dict(mapped(path))
    path.unlink()
    assert torch.equal(views["b"], TENSORS["b"])


@pytest.mark.parametrize("names", [["b"], ["a", "b", "transposed", "scalar", "empty"]])
def test_what_does_not_come_as_it_was_said_is_noticed(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "weights.safetensors", shapes(), [(name, TENSORS[name]) for name in names])
