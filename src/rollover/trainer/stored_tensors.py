"""The tensors of a checkpoint, whole or in slices of any number of ranks, each read on access.

Knows no backend, and never where a checkpoint lies. ranks/sharded.py writes slices, and reads them as such.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from safetensors import safe_open


class _Slice(NamedTuple):
    path: str
    starts: list[int]
    sizes: list[int]

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name)


class StoredTensors(Mapping[str, torch.Tensor]):
    """Lazy mapping from name to tensor.

    `paths`: local safetensors files with whole tensors, or with slices (ranks/sharded.py). ValueError if the slices of
    a tensor do not make a whole.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = sorted(paths)
        self._slices: dict[str, list[_Slice]] = {}
        for path in self.paths:
            with safe_open(path, "pt") as file:
                # torch's distributed checkpoint stores in the header where each slice starts.
                starts = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    sizes = file.get_slice(name).get_shape()
                    start = starts[name]["saved_offsets"] if name in starts else [0] * len(sizes)
                    self._slices.setdefault(name, []).append(_Slice(path, start, sizes))
        for name, slices in self._slices.items():
            if sum(math.prod(part.sizes) for part in slices) != math.prod(self.shape(name)):
                raise ValueError(f"the stored slices of {name} do not make a tensor of shape {list(self.shape(name))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole tensor, without reading it."""
        ends = ([a + b for a, b in zip(part.starts, part.sizes, strict=True)] for part in self._slices[name])
        return torch.Size(map(max, zip(*ends, strict=True)))

    def __getitem__(self, name: str) -> torch.Tensor:
        slices = self._slices[name]
        first = slices[0].read(name)
        if len(slices) == 1:
            return first
        whole = torch.empty(self.shape(name), dtype=first.dtype)
        for part in slices:
            where = tuple(slice(a, a + b) for a, b in zip(part.starts, part.sizes, strict=True))
            whole[where] = part.read(name)
        return whole


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor, without reading a stored one."""
    return tensors.shape(name) if isinstance(tensors, StoredTensors) else tensors[name].shape
