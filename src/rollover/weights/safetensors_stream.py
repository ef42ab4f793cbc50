"""Streaming writer and mapped reader of safetensors files: never the whole file in memory.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, where its bytes are), the
bytes (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 8
_DTYPES = {
    "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float64": ("F64", 8), "int64": ("I64", 8),
    "int32": ("I32", 4), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write `tensors` in the order of `shapes`, with those dtypes and shapes. Raises OSError on a full disk."""
    import torch

    header, end = dict[str, Any](), 0
    for name, (dtype, shape) in shapes.items():
        kind, size = _DTYPES[str(dtype).removeprefix("torch.")]
        start, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    names = iter(shapes)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            expected = next(names)
            assert name == expected and (tensor.dtype, tensor.shape) == (shapes[name][0], tuple(shapes[name][1])), name
            out.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    assert next(names, None) is None, "tensors of the header are missing"


def mapped(path: str | Path, without: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view of the file) of every tensor except `without`. Views outlive the file's removal."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 (not a mapping)
            if name not in without:
                yield name, stored.get_tensor(name)


@dataclass(frozen=True)
class WholeFile:
    """All weights of a model, in a finished file at `path`. Iterates as `mapped`, any number of times."""

    path: Path

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return mapped(self.path)
