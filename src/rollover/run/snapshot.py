"""The consistent cut: the state of every stateful part at one moment at which nothing runs, and the way back.

    Snapshot.begin (every part hands over its state) ──▶ write (the files, one by one) ──▶ the store's commit

Owns how a state becomes files (docs/checkpoint-format.md). Knows no part (stateful.py has the list), and never decides
when a checkpoint is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch

from rollover.checkpoint.journal import Mark
from rollover.checkpoint.store import CheckpointStore, FileWriter, FolderWriter, checkpoint_name
from rollover.run.directory import RunDirectory
from rollover.run.stateful import Arrays, StatefulPart
from rollover.trainer.stored_tensors import StoredTensors

FORMAT = 1
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The state of every part at one moment: the files of a checkpoint that are still to be written.

    `folders`: of files that several processes write together, how their names begin, and what writes them. Arrays and
    tensors are the parts' own, not copies: they must not change before `write` returns.
    """

    name: str
    files: dict[str, FileWriter]
    folders: list[tuple[str, FolderWriter]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, parts: Sequence[StatefulPart], directory: RunDirectory, version: int, journal: Mark | None = None
    ) -> Snapshot:
        """The cut, at trainer `version`. `journal`: where it goes on from here, if there is one."""
        directory.metrics.sync()
        directory.evals.sync()
        state: dict[str, Any] = {"format": FORMAT, "journal": journal}
        files: dict[str, FileWriter] = {}
        folders: list[tuple[str, FolderWriter]] = []
        for part in parts:
            of_part, arrays = part.save()
            state |= {part.name: of_part} if part.name else of_part
            if callable(arrays):
                folders.append((part.file.partition("*")[0], arrays))
            else:
                files |= _files(part, arrays)
        return cls(checkpoint_name(version), files | {"state.json": json.dumps(state).encode()}, folders)

    def write(self, store: CheckpointStore) -> None:
        """Write the files, and commit them. CheckpointWriteError if that fails: then it was never there."""
        store.write(self.name, self.files, self.folders)


def _files(part: StatefulPart, arrays: Arrays) -> dict[str, FileWriter]:
    """The files of a part's arrays."""
    if not part.file:
        return {}
    if "*" not in part.file:
        return {part.file + _SUFFIX: partial(_save, arrays)}
    kinds = {kind: {k: v for k, v in arrays.items() if k.startswith(f"{kind}/")} for kind in _kinds(arrays)}
    return {part.file.replace("*", kind) + _SUFFIX: partial(_save, of_kind) for kind, of_kind in kinds.items()}


def _kinds(arrays: Arrays) -> list[str]:
    return sorted({key.partition("/")[0] for key in arrays})


def _save(arrays: Arrays, path: str) -> None:
    if all(isinstance(array, np.ndarray) for array in arrays.values()):
        safetensors.numpy.save_file(dict(arrays), path)
    else:
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in arrays.items()}, path)


def load_snapshot(name: str, parts: Sequence[StatefulPart], directory: RunDirectory) -> Mark | None:
    """Restore every part from checkpoint `name`. What the run wrote after it stays: see RunDirectory.truncate.

    Returns where the journal goes on from it; None if there was none.
    """
    files = directory.store.open(name)
    state: dict[str, Any] = json.loads(Path(files["state.json"]).read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"checkpoint {name} has format {state['format']}, this version reads {FORMAT}")
    for part in parts:
        of_part = state.get(part.name, part.default) if part.name else state
        if of_part is not None:
            part.load(of_part, _arrays(part, files))
    mark = state.get("journal")
    return None if mark is None else Mark(*mark)


def _arrays(part: StatefulPart, files: Mapping[str, Any]) -> Arrays:
    if not part.file:
        return {}
    if "*" not in part.file:
        return safetensors.numpy.load_file(files[part.file + _SUFFIX])
    start = part.file.partition("*")[0]
    return StoredTensors([path for file, path in files.items() if file.startswith(start)])
