"""State that no process holds as a whole: every rank writes its slices, and any number of ranks reads theirs.

    save_shards (all ranks together) ──▶ <folder>/<kind>/shard-....safetensors ──▶ RankTensors (each rank for itself)
                                                                              └──▶ StoredTensors (one process)

torch's distributed checkpoint (DCP) does both, with safetensors: its own format is a pickle. Knows no backend and no
optimizer, and never where a checkpoint lies.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from rollover.trainer.stored_tensors import StoredTensors


def save_shards(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Write `tensors` (`<kind>/<name>` -> DTensor) below `folder`, each rank the slices that it holds.

    Every rank calls this with the same names at the same time. A folder for each kind: only
    the slices of one are copied in memory at a time. Of a tensor that is no DTensor, any rank's is written. An error
    of one rank is raised on all of them: OSError where its disk is at fault.
    """
    for kind in sorted({name.partition("/")[0] for name in tensors}):
        of_kind = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}
        try:
            writer = HuggingFaceStorageWriter(os.path.join(folder, kind), save_distributed=True)
            save(of_kind, storage_writer=writer)
        except CheckpointException as failed:  # a BaseException, whose text is a traceback of each rank
            raise _cause(failed) from None


def _cause(failed: CheckpointException) -> Exception:
    """What went wrong, and at which rank: where there is one, an error of the disk."""
    causes = [(rank, cause) for rank, (cause, _) in sorted(failed.failures.items())]
    for rank, cause in causes:
        if isinstance(cause, OSError) and cause.errno:
            return OSError(cause.errno, f"{os.strerror(cause.errno)} (rank {rank})")
    rank, cause = causes[0]
    return RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}")


class RankTensors(StoredTensors):
    """StoredTensors of which this rank reads its own slices alone.

    `parameters`: name -> DTensor. A stored `<kind>/.../<name>` is given as a DTensor that is laid out like it; others
    are given whole. Nothing is communicated for it: a rank may read what it likes, when it likes.
    """

    def __init__(self, paths: Collection[str], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__(paths)
        self._parameters = parameters
        self._reader = _Reader(self.paths)

    def __getitem__(self, name: str) -> torch.Tensor:
        like = self._parameters.get(name.rpartition("/")[2])
        if not isinstance(like, DTensor):
            return super().__getitem__(name)
        if like.shape != self.shape(name):
            raise ValueError(f"the stored {name} has shape {list(self.shape(name))}, and not {list(like.shape)}")
        entry = self._reader.read_metadata().state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that each process reads alone, which is meant
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(HuggingFaceStorageReader):
    """Reads these files alone, not all of a folder, and what they hold only once."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(os.path.dirname(paths[0]) if paths else os.curdir)
        self.fs = _Files(paths)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class _Files(FileSystem):
    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = paths

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._paths
