"""When a checkpoint is written, and what becomes of the journal then. The way back is resume.py's business.

    begin ──▶ steps (journal) ──▶ checkpoint (the journal begins anew) ──▶ ...        error ──▶ rescue

Owns which checkpoint is the newest, and whether anything happened since. Never generates and never trains.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.numpy
import safetensors.torch

from rollover.checkpoint.journal import Mark
from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError, FileWriter, FolderWriter, checkpoint_name
from rollover.rollout.lifecycle import Event
from rollover.run.directory import RunDirectory
from rollover.run.event_log import EventLog
from rollover.run.overlap import Overlap
from rollover.run.producer import Producer
from rollover.run.setup import Parts, RunContext
from rollover.run.tracking import Tracking
from rollover.trainer.backend import CheckpointedBackend
from rollover.trainer.stored_tensors import StoredTensors
from rollover.types import Group

FORMAT = 1
_SUFFIX = ".safetensors"


Arrays = Mapping[str, Any]  # numpy arrays or torch tensors, by their names


@dataclass(frozen=True)
class StatefulPart:
    """A part whose state is in a checkpoint."""

    name: str
    """Its key in state.json; "": the keys of its state stand there beside those of the other parts."""
    save: Callable[[], tuple[Mapping[str, Any], Arrays | FolderWriter]]
    """Gives (its JSON-able state, its arrays or, with a "*" in `file`, what writes a folder for each kind of them)."""
    load: Callable[[Any, Arrays], None]
    """Goes on from what `save` gave, with a "*" in `file` the arrays as StoredTensors. The parts before it in the list
    are restored by then."""
    file: str = ""
    """The file of its arrays; "" if it has none. With a "*" there is one for each kind of them, the first word of
    `<kind>/<name>`: saving copies all arrays of a file in memory."""
    default: Mapping[str, Any] | None = None
    """What `load` gets from an older checkpoint, which does not have this part; None: it is not called then."""


def stateful_parts(parts: Parts, producer: Producer) -> list[StatefulPart]:
    """The stateful parts of a run that is made of `parts`, in the order in which they are restored."""
    trainer, lifecycle, prompts, reuse = parts.trainer, parts.lifecycle, parts.prompts, parts.reuse

    backend = cast(CheckpointedBackend, trainer.backend)  # build_trainer makes no other

    def save_trainer() -> tuple[Mapping[str, Any], Arrays | FolderWriter]:
        tensors, meta = backend.save_checkpoint()
        return meta, tensors

    def load_trainer(meta: dict[str, Any], stored: Arrays) -> None:
        assert isinstance(stored, StoredTensors)
        backend.load_checkpoint(stored, meta)

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
        trace_bytes = parts.trace.sync()
        return {
            "seconds": lifecycle.clock.seconds(),
            "trace_bytes": trace_bytes,
            "lifetimes": parts.lifetimes.state_dict(),
        }

    def load_chronicle(state: Mapping[str, Any]) -> None:
        seconds, version = state.get("seconds", 0.0), trainer.policy_version
        lifecycle.clock.set(seconds, version)
        parts.trace.resume_at(state.get("trace_bytes", 0))
        parts.lifetimes.load_state_dict(state.get("lifetimes", {}), lifecycle.cache.groups.values(), version, seconds)

    reward_kl = trainer.reward_kl
    of_reward_kl = [] if reward_kl is None else [
        without_arrays("reward_kl", reward_kl.state_dict, reward_kl.load_state_dict, {})
    ]  # fmt: skip
    return [
        StatefulPart("trainer", save_trainer, load_trainer, "trainer-*"),
        StatefulPart("", lifecycle.state_dict, load_lifecycle, "rollouts"),
        without_arrays("prompts", prompts.state_dict, prompts.load_state_dict),
        StatefulPart("reuse", reuse.state_dict, load_reuse, "replay"),
        without_arrays("producer", producer.state_dict, producer.load_state_dict, {}),
        without_arrays("shaping", parts.batches.shaping.state_dict, parts.batches.shaping.load_state_dict, {}),
        without_arrays("chronicle", save_chronicle, load_chronicle, {}),
        *of_reward_kl,
    ]


def without_arrays(
    name: str,
    state_dict: Callable[[], Mapping[str, Any]],
    load_state_dict: Callable[[Any], None],
    default: Mapping[str, Any] | None = None,
) -> StatefulPart:
    """A part whose state is JSON-able as a whole."""
    return StatefulPart(name, lambda: (state_dict(), {}), lambda state, arrays: load_state_dict(state), default=default)


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


logger = logging.getLogger(__name__)


class Checkpointing:
    """Writes the checkpoints of one run, whose state is that of its `stateful` parts.

    `taken`: the groups of the step that is being trained. `saved_version`: of the newest checkpoint, -1 without one.
    `changed`: whether anything happened to a rollout since the newest checkpoint.
    """

    def __init__(
        self,
        context: RunContext,
        stateful: list[StatefulPart],
        event_log: EventLog,
        overlap: Overlap,
        tracking: Tracking,
    ) -> None:
        self.context, self.config, self.parts = context, context.config, context.parts
        self.directory, self.stateful = context.directory, stateful
        self.event_log, self.overlap, self.tracking = event_log, overlap, tracking
        self.taken: list[Group] = []
        self.saved_version = -1
        self.changed = False

    def on_event(self, event: Event) -> None:
        """A listener of Lifecycle."""
        self.changed = True

    def restore(self, name: str) -> Mark | None:
        """Go back to checkpoint `name`. Returns where the journal goes on from it; None if there was none."""
        mark = load_snapshot(name, self.stateful, self.directory)
        self.saved_version = self.parts.trainer.policy_version
        return mark

    async def begin(self) -> None:
        """From now on the journal is written, if it is on. It begins at a checkpoint, or with the run."""
        event_log = self.event_log
        if not self.directory.resume:
            event_log.journal.discard()
        if event_log.is_on and not event_log.journal.writes:
            if self.parts.lifecycle.cache.num_admitted or self.parts.trainer.policy_version:
                self.changed = True
            else:
                event_log.cut(None)
        if self.changed:  # what was read back must not be read back twice, journaled from now on or not
            await self.checkpoint()
        event_log.start(self.parts.driver)

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint must be written after the step that was just told."""
        config, step = self.config.checkpoint, self.parts.trainer.policy_version
        due = config.every_steps > 0 and step % config.every_steps == 0
        return due or self.event_log.journal.num_bytes > config.journal_max_gb * 1e9

    async def checkpoint(self) -> None:
        """Write one, if anything happened since the last."""
        version, event_log = self.parts.trainer.policy_version, self.event_log
        await self.overlap.interrupt_all()
        if version == self.saved_version and not self.changed:
            return
        self.directory.trackers.on_phase("writing a checkpoint")
        self.tracking.on_groups(version, [], None)
        with self.overlap.rows.timed("checkpoint"):
            mark = event_log.cut(checkpoint_name(version))
            snapshot = Snapshot.begin(self.stateful, self.directory, version, mark)
            if self.directory.mirror is not None:
                self.directory.mirror.copy()  # the checkpoint counts on what is written down by now
            snapshot.write(self.directory.store)
            self.directory.on_checkpoint()  # before the journal goes, from which a run without a checkpoint goes on
            if mark is not None:
                event_log.journal.commit(mark)
            else:
                event_log.journal.discard()
        self.saved_version, self.changed = version, False
        if version < self.config.train.num_steps and not self.context.stop.requested:
            command = self.context.resume_command
            logger.info(f"checkpoint {snapshot.name}; if this run ends early, continue with: {command}")

    async def keep_best(self, step: int | None) -> None:
        """With checkpoint.keep_best that of `step`, the best evaluation's, stays whatever comes later. It is written
        now where there is none, if that is the present step."""
        version = self.parts.trainer.policy_version
        if self.config.checkpoint.keep_best and step and step == version != self.saved_version:
            await self.checkpoint()
        self.hold_best(step)

    def hold_best(self, step: int | None) -> None:
        """The same, without writing any. Before the first step there is nothing to keep."""
        if self.config.checkpoint.keep_best and step:
            self.directory.store.keep_also(checkpoint_name(step))

    async def rescue(self, error: Exception) -> None:
        """Before an error ends the run: a checkpoint of what it has, if that is consistent."""
        parts, version = self.parts, self.parts.trainer.policy_version
        if parts.lifecycle.ledger.generated_tokens == version == 0 or isinstance(error, CheckpointWriteError):
            return  # before the first step there are answers to look at, too
        logger.warning(f"{type(error).__name__} after {version} steps: writing a checkpoint before the run ends")
        try:
            parts.driver.interrupt_for_good()  # no score is waited for
            try:
                await parts.driver.interrupt_all()
            except Exception:  # the engine is gone, say: what it had not returned is lost
                await parts.driver.abandon()
            if parts.trainer.in_update:
                raise ValueError(f"the weights are in the middle of step {version + 1}")
            if self.taken:
                parts.lifecycle.give_back(self.taken, version)
            parts.lifecycle.check()
            if version not in (0, self.saved_version) and not self.directory.metrics.reaches(version):
                raise ValueError(f"metrics.jsonl has no row of step {version}")
            await self.checkpoint()
        except Exception as failure:
            newest = next(reversed(self.directory.store.list()), "the start")
            journal = " and its journal" if self.event_log.journal.num_bytes else ""
            logger.warning(f"that checkpoint could not be written ({failure}): --resume goes on from {newest}{journal}")
