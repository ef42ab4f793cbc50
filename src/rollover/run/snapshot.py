"""The consistent cut: every owner's state at one moment between two generation phases, and the way back.

    Snapshot.begin (every owner hands over its state) ──▶ write (the files, one by one) ──▶ the store's commit

Owns the list of who is in a checkpoint (docs/checkpoint-format.md). Never decides when one is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch

from rollover.checkpoint.journal import Mark
from rollover.checkpoint.store import CheckpointStore, FileWriter, checkpoint_name
from rollover.rollout.lifecycle import Lifecycle
from rollover.run.directory import RunDirectory
from rollover.run.parts import Parts
from rollover.run.producer import Producer
from rollover.tasks.prompts import PromptSource
from rollover.track.history import RunHistory
from rollover.trainer.reuse import Reuse
from rollover.trainer.trainer import Trainer

FORMAT = 1
_TRAINER = "trainer-"


@dataclass(frozen=True)
class Owners:
    """Everyone whose state is in a checkpoint."""

    trainer: Trainer
    lifecycle: Lifecycle
    prompts: PromptSource
    directory: RunDirectory
    history: RunHistory
    reuse: Reuse
    producer: Producer

    @classmethod
    def of(cls, parts: Parts, directory: RunDirectory, history: RunHistory, producer: Producer) -> Owners:
        """Those of a run that is made of `parts`."""
        return cls(parts.trainer, parts.lifecycle, parts.prompts, directory, history, parts.reuse, producer)


@dataclass(frozen=True)
class Snapshot:
    """The state of every owner at one moment: the files of a checkpoint that are still to be written.

    Arrays and tensors are the owners' own, not copies: they must not change before `write` returns.
    """

    name: str
    files: dict[str, FileWriter]

    @classmethod
    def begin(cls, owners: Owners, journal: Mark | None = None) -> Snapshot:
        """The cut, at the trainer's current version. `journal`: where it goes on from here, if there is one."""
        owners.directory.metrics.sync()
        owners.directory.evals.sync()
        tensors, trainer_meta = owners.trainer.save_state()
        lifecycle, arrays = owners.lifecycle.state_dict()
        reuse, kept = owners.reuse.state_dict()
        state = {
            "format": FORMAT,
            "trainer": trainer_meta,
            **lifecycle,
            "prompts": owners.prompts.state_dict(),
            "reuse": reuse,
            "producer": owners.producer.state_dict(),
            "chronicle": owners.history.state_dict(),
            "journal": journal,
        }
        files: dict[str, FileWriter] = {
            "rollouts.safetensors": lambda path: safetensors.numpy.save_file(arrays, path),
            "replay.safetensors": lambda path: safetensors.numpy.save_file(kept, path),
            "state.json": json.dumps(state).encode(),
        }
        # One file per kind of tensor (master, exp_avg, exp_avg_sq): saving copies a whole file's tensors in memory.
        for kind in sorted({key.partition("/")[0] for key in tensors}):
            part = {key: value.contiguous() for key, value in tensors.items() if key.startswith(f"{kind}/")}
            files[f"{_TRAINER}{kind}.safetensors"] = partial(safetensors.torch.save_file, part)
        return cls(checkpoint_name(owners.trainer.policy_version), files)

    def write(self, store: CheckpointStore) -> None:
        """Write the files, and commit them. CheckpointWriteError if that fails: then it was never there."""
        store.write(self.name, self.files)


def load_snapshot(name: str, owners: Owners) -> Mark | None:
    """Restore every owner from checkpoint `name`. What the run wrote after it stays: see RunDirectory.truncate.

    Returns where the journal goes on from it; None if there was none.
    """
    files = owners.directory.store.open(name)
    state: dict[str, Any] = json.loads(Path(files["state.json"]).read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"checkpoint {name} has format {state['format']}, this version reads {FORMAT}")
    tensors = {}
    for file, path in files.items():
        if file.startswith(_TRAINER):
            tensors |= safetensors.torch.load_file(path)
    owners.trainer.load_state(tensors, state["trainer"])
    owners.lifecycle.load_state_dict(state, safetensors.numpy.load_file(files["rollouts.safetensors"]))
    owners.prompts.load_state_dict(state["prompts"])
    if "reuse" in state:  # not in a checkpoint of an earlier version
        kept = safetensors.numpy.load_file(files["replay.safetensors"])
        version, max_prompt_tokens = owners.trainer.policy_version, owners.prompts.max_prompt_tokens
        owners.reuse.load_state_dict(state["reuse"], kept, version, max_prompt_tokens)
    owners.producer.load_state_dict(state.get("producer", {}))
    groups = owners.lifecycle.cache.groups.values()
    owners.history.load_state_dict(state.get("chronicle", {}), groups, owners.trainer.policy_version)
    owners.lifecycle.check()
    mark = state.get("journal")
    return None if mark is None else Mark(*mark)
