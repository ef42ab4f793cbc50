"""Checkpoints of a run: the state of all components at a moment at which nothing runs, when it is written, restored.

    Snapshot.begin (each component gives its state) ──▶ write (the files, one by one) ──▶ CheckpointStore commits
    Checkpointing: begin ──▶ steps (journal) ──▶ checkpoint (a new journal file begins) ──▶ ...     error ──▶ rescue

Owns which components are in a checkpoint (`stateful_components`: one entry each), how a state becomes files
(docs/checkpoint-format.md), which checkpoint is the newest, and whether anything happened since. resume.py restores.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch

from rollover.checkpoint.journal import Mark
from rollover.checkpoint.storage import FileWriter, FolderWriter, checkpoint_name
from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError
from rollover.rollout.lifecycle import Event
from rollover.run.directory import RunDirectory
from rollover.run.event_log import EventLog
from rollover.run.pipeline import Pipeline
from rollover.run.producer import Producer
from rollover.run.setup import Components, RunContext
from rollover.trainer.backend import StoredTensors

logger = logging.getLogger(__name__)

FORMAT = 1
_SUFFIX = ".safetensors"

Arrays = Mapping[str, Any]  # numpy arrays or torch tensors, by their names


@dataclass(frozen=True)
class StatefulComponent:
    """A component whose state is in a checkpoint."""

    name: str
    """Its key in state.json. "": the keys of its state are top-level keys."""
    save: Callable[[], tuple[Mapping[str, Any], Arrays | FolderWriter]]
    """Return (its JSON-able state, its arrays; or, with a "*" in `file`, a writer of a folder of files)."""
    load: Callable[[Any, Arrays], None]
    """Restore what `save` returned; with a "*" in `file` arrays are StoredTensors. Earlier components of the list are
    restored before."""
    file: str = ""
    """The file of its arrays; "" without arrays. With a "*" there is one file for each kind of arrays, the first word
    of `<kind>/<name>`: saving copies all arrays of a file in memory."""
    default: Mapping[str, Any] | None = None
    """State of checkpoints of older versions, which lack this component. None: `load` is not called."""


def stateful_components(components: Components, producer: Producer) -> list[StatefulComponent]:
    """Return the stateful components of a run, in the order in which they are restored."""
    trainer, lifecycle, prompts, reuse = components.trainer, components.lifecycle, components.prompts, components.reuse

    def save_trainer() -> tuple[Mapping[str, Any], Arrays | FolderWriter]:
        tensors, meta = trainer.backend.save_checkpoint()
        return meta, tensors

    def load_trainer(meta: dict[str, Any], stored: Arrays) -> None:
        assert isinstance(stored, StoredTensors)
        trainer.backend.load_checkpoint(stored, meta)

    def load_lifecycle(state: Any, arrays: Arrays) -> None:
        lifecycle.load_state_dict(state, arrays)
        for group in lifecycle.cache.groups.values():
            if any(rollout.reward is None for rollout in group.rollouts):
                group.task = prompts.rewarded(group.task)
                for rollout in group.rollouts:
                    rollout.task = group.task
        lifecycle.check()

    def load_reuse(state: Mapping[str, Any], arrays: Arrays) -> None:
        reuse.load_state_dict(state, arrays, trainer.policy_version, prompts.max_prompt_tokens)
        reuse.reroll.change_tasks(prompts.rewarded)

    def save_chronicle() -> Mapping[str, Any]:
        trace_bytes = components.trace.sync()
        return {
            "seconds": lifecycle.clock.seconds(),
            "trace_bytes": trace_bytes,
            "lifetimes": components.lifetimes.state_dict(),
        }

    def load_chronicle(state: Mapping[str, Any]) -> None:
        seconds, version = state.get("seconds", 0.0), trainer.policy_version
        lifecycle.clock.set(seconds, version)
        components.trace.resume_at(state.get("trace_bytes", 0))
        held = lifecycle.cache.groups.values()
        components.lifetimes.load_state_dict(state.get("lifetimes", {}), held, version, seconds)

    reward_kl = trainer.reward_kl
    of_reward_kl = [] if reward_kl is None else [
        without_arrays("reward_kl", reward_kl.state_dict, reward_kl.load_state_dict, {})
    ]  # fmt: skip
    return [
        StatefulComponent("trainer", save_trainer, load_trainer, "trainer-*"),
        StatefulComponent("", lifecycle.state_dict, load_lifecycle, "rollouts"),
        without_arrays("prompts", prompts.state_dict, prompts.load_state_dict),
        StatefulComponent("reuse", reuse.state_dict, load_reuse, "replay"),
        without_arrays("producer", producer.state_dict, producer.load_state_dict, {}),
        without_arrays(
            "shaping", components.batches.shaping.state_dict, components.batches.shaping.load_state_dict, {}
        ),
        without_arrays("chronicle", save_chronicle, load_chronicle, {}),
        *of_reward_kl,
    ]


def without_arrays(
    name: str,
    state_dict: Callable[[], Mapping[str, Any]],
    load_state_dict: Callable[[Any], None],
    default: Mapping[str, Any] | None = None,
) -> StatefulComponent:
    """Return a component whose state is JSON-able as a whole."""
    return StatefulComponent(
        name, lambda: (state_dict(), {}), lambda state, arrays: load_state_dict(state), default=default
    )


@dataclass(frozen=True)
class Snapshot:
    """The state of every component at one moment: the files of a checkpoint that are not written yet.

    `folders`: (prefix of the file names, writer) of files that several processes write together. Arrays and tensors are
    not copied: they must not change before `write` returns.
    """

    name: str
    files: dict[str, FileWriter]
    folders: list[tuple[str, FolderWriter]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, components: Sequence[StatefulComponent], directory: RunDirectory, version: int, journal: Mark | None = None
    ) -> Snapshot:
        """Collect the state at trainer `version`. `journal`: where the journal continues from it, if there is one."""
        directory.metrics.sync()
        directory.evals.sync()
        state: dict[str, Any] = {"format": FORMAT, "journal": journal}
        files: dict[str, FileWriter] = {}
        folders: list[tuple[str, FolderWriter]] = []
        for component in components:
            saved, arrays = component.save()
            state |= {component.name: saved} if component.name else saved
            if callable(arrays):
                folders.append((component.file.partition("*")[0], arrays))
            else:
                files |= _files(component, arrays)
        return cls(checkpoint_name(version), files | {"state.json": json.dumps(state).encode()}, folders)

    def write(self, store: CheckpointStore) -> None:
        """Write the files and commit them. CheckpointWriteError leaves no trace of this checkpoint."""
        store.write(self.name, self.files, self.folders)


def _files(component: StatefulComponent, arrays: Arrays) -> dict[str, FileWriter]:
    if not component.file:
        return {}
    if "*" not in component.file:
        return {component.file + _SUFFIX: partial(_save, arrays)}
    kinds = sorted({key.partition("/")[0] for key in arrays})
    by_kind = {kind: {k: v for k, v in arrays.items() if k.startswith(f"{kind}/")} for kind in kinds}
    return {component.file.replace("*", kind) + _SUFFIX: partial(_save, some) for kind, some in by_kind.items()}


def _save(arrays: Arrays, path: str) -> None:
    if all(isinstance(array, np.ndarray) for array in arrays.values()):
        safetensors.numpy.save_file(dict(arrays), path)
    else:
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in arrays.items()}, path)


def load_snapshot(name: str, components: Sequence[StatefulComponent], directory: RunDirectory) -> Mark | None:
    """Restore every component from checkpoint `name`. Later rows of the run's files stay: see RunDirectory.truncate.

    Returns where the journal continues from it; None if there was no journal.
    """
    files = directory.store.open(name)
    state: dict[str, Any] = json.loads(Path(files["state.json"]).read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"checkpoint {name} has format {state['format']}, this version reads {FORMAT}")
    for component in components:
        saved = state.get(component.name, component.default) if component.name else state
        if saved is not None:
            component.load(saved, _arrays(component, files))
    mark = state.get("journal")
    return None if mark is None else Mark(*mark)


def _arrays(component: StatefulComponent, files: Mapping[str, Any]) -> Arrays:
    if not component.file:
        return {}
    if "*" not in component.file:
        return safetensors.numpy.load_file(files[component.file + _SUFFIX])
    prefix = component.file.partition("*")[0]
    return StoredTensors([path for file, path in files.items() if file.startswith(prefix)])


class Checkpointing:
    """Writes the checkpoints of one run.

    `saved_version`: the policy version of the newest checkpoint, -1 without one. `changed`: whether anything happened
    to a rollout since the newest checkpoint.
    """

    def __init__(
        self,
        context: RunContext,
        stateful: list[StatefulComponent],
        event_log: EventLog,
        pipeline: Pipeline,
    ) -> None:
        self.config, self.components, self.stop = context.config, context.components, context.stop
        self.directory, self.stateful = context.directory, stateful
        self.event_log, self.pipeline = event_log, pipeline
        self.saved_version = -1
        self.changed = False

    def on_event(self, event: Event) -> None:
        """Handle an event of Lifecycle."""
        self.changed = True

    def restore(self, name: str) -> Mark | None:
        """Restore checkpoint `name`. Returns where the journal continues from it; None if there was no journal."""
        mark = load_snapshot(name, self.stateful, self.directory)
        self.saved_version = self.components.trainer.policy_version
        return mark

    async def begin(self) -> None:
        """Begin to write the journal, if it is on: at a checkpoint, or at the start of the run."""
        event_log = self.event_log
        if not self.directory.resume:
            event_log.journal.discard()
        if event_log.is_on and not event_log.journal.writes:
            if self.components.lifecycle.cache.num_admitted or self.components.trainer.policy_version:
                self.changed = True
            else:
                event_log.begin_file(None)
        if self.changed:  # a second --resume begins after what was replayed, even where this run writes no journal
            await self.checkpoint()
        event_log.start(self.components.driver)

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due after the step that was just logged."""
        config, step = self.config.checkpoint, self.components.trainer.policy_version
        due = config.every_steps > 0 and step % config.every_steps == 0
        return due or self.event_log.journal.num_bytes > config.journal_max_gb * 1e9

    async def checkpoint(self) -> None:
        """Write a checkpoint, if anything happened since the last one."""
        version, event_log = self.components.trainer.policy_version, self.event_log
        await self.pipeline.interrupt_all()
        if version == self.saved_version and not self.changed:
            return
        self.directory.trackers.on_phase("writing a checkpoint")
        self.pipeline.step_log.records.on_groups(version, [], None)
        with self.pipeline.step_log.timed("checkpoint"):
            mark = event_log.begin_file(checkpoint_name(version))
            snapshot = Snapshot.begin(self.stateful, self.directory, version, mark)
            if self.directory.mirror is not None:
                self.directory.mirror.copy()  # the checkpoint depends on the files as of now
            snapshot.write(self.directory.store)
            self.directory.on_checkpoint()  # before the earlier journal is deleted: a run without a checkpoint needs it
            if mark is not None:
                event_log.journal.commit(mark)
            else:
                event_log.journal.discard()
        self.saved_version, self.changed = version, False
        if version < self.config.train.num_steps and not self.stop.requested:
            command = self.directory.resume_command
            logger.info(f"checkpoint {snapshot.name}; if this run ends early, continue with: {command}")

    async def keep_best(self, step: int | None) -> None:
        """Keep the checkpoint of `step`, the best evaluation's, if checkpoint.keep_best is on; write it if missing."""
        version = self.components.trainer.policy_version
        if self.config.checkpoint.keep_best and step and step == version != self.saved_version:
            await self.checkpoint()
        self.protect_best(step)

    def protect_best(self, step: int | None) -> None:
        """Protect the checkpoint of `step` from deletion, if checkpoint.keep_best is on."""
        if self.config.checkpoint.keep_best and step:  # before the first step there is no checkpoint
            self.directory.store.protect(checkpoint_name(step))

    async def rescue(self, error: Exception) -> None:
        """Write a checkpoint before an error ends the run, if the state is consistent."""
        components, version = self.components, self.components.trainer.policy_version
        if components.lifecycle.ledger.generated_tokens == version == 0 or isinstance(error, CheckpointWriteError):
            return  # nothing was generated
        logger.warning(f"{type(error).__name__} after {version} steps: writing a checkpoint before the run ends")
        try:
            components.driver.interrupt_for_good()  # does not wait for scores
            try:
                await components.driver.interrupt_all()
            except Exception:  # the engine may have failed: tokens that it has not returned are lost
                await components.driver.abandon()
            if components.trainer.in_update:
                raise ValueError(f"the weights are in the middle of step {version + 1}")
            if self.pipeline.taken:
                components.lifecycle.give_back(self.pipeline.taken, version)
            components.lifecycle.check()
            if version not in (0, self.saved_version) and not self.directory.metrics.reaches(version):
                raise ValueError(f"metrics.jsonl has no row of step {version}")
            await self.checkpoint()
        except Exception as failure:
            newest = next(reversed(self.directory.store.list()), "the start")
            journal = " and its journal" if self.event_log.journal.num_bytes else ""
            logger.warning(
                f"that checkpoint could not be written ({failure}): --resume continues from {newest}{journal}"
            )
