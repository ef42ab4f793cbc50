"""Resume a run (`--resume`, or after a lost backend): its newest checkpoint, then the journal since that.

    load_snapshot ──▶ Replay: repeats the journal's steps   ──▶ sync weights ──▶ cut the run's files ──▶ the loop
                  └─▶ RollBack: undoes them (their groups are READY again)

    journal records ──▶ Lifecycle.admit, run, append, score, take, drop ...    step ──▶ Replay trains the same groups

A replay needs no engine and no rewards, and decides nothing. Owns nothing after the restart. checkpointing.py restores
a checkpoint; event_log.py writes the records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollover.checkpoint.journal import JournalFile, Record
from rollover.config import resume as resume_rules
from rollover.rollout.lifecycle import EventKind, Lifecycle
from rollover.run.checkpointing import Checkpointing
from rollover.run.event_log import PUBLISH, ROLL_BACK, ROW, STEP, TOKENS, digest_of
from rollover.run.setup import Components, RunContext
from rollover.staleness import rolled_back
from rollover.track.tracker import Cut
from rollover.trainer.batch import Batch
from rollover.types import (
    DropReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

logger = logging.getLogger(__name__)


class Resume:
    """Brings a new run, which has done nothing yet, to the state in which its earlier process ended."""

    def __init__(self, context: RunContext, checkpointing: Checkpointing) -> None:
        self.config, self.components, self.directory = context.config, context.components, context.directory
        self.checkpointing, self.event_log = checkpointing, checkpointing.event_log
        self.pipeline, self.step_log = checkpointing.pipeline, checkpointing.pipeline.step_log
        self.trackers = self.directory.trackers
        # (groups, batch, metrics, trainer version before it) of the newest step that was trained again.
        self._retrained: tuple[list[Group], Batch, dict[str, float], int] | None = None

    @property
    def newest_groups(self) -> list[Group] | None:
        """The groups of the newest step that was trained again, if any."""
        return None if self._retrained is None else self._retrained[0]

    async def restore(self) -> None:
        """Restore the checkpoint and replay its journal; without either the run begins again."""
        directory, components, event_log = self.directory, self.components, self.event_log
        if directory.fetched_from:
            logger.info(f"the files of this run come from {directory.fetched_from}")
        name, mark = directory.checkpoint_to_resume(), None
        if name is not None:
            self.trackers.on_phase(f"restoring {name}")
            mark = self.checkpointing.restore(name)
        # The journal continues the newest checkpoint, or the start of the run; it does not fit an older checkpoint.
        usable = event_log.generates and (name is None or (mark is not None and directory.is_newest(name)))
        files = event_log.journal.read(mark) if usable else []
        if name is None and not files:
            num_steps = directory.metrics.path.read_bytes().count(b"\n")
            directory.truncate(Cut(-1))
            event_log.journal.discard()
            lost = f", and no journal tells of its {num_steps} steps, which are lost" if num_steps else ""
            logger.warning(f"the run ended before its first checkpoint{lost}: it begins again")
            if components.is_restart and self.pipeline.syncs:  # the engine may have the weights of lost steps
                await self.pipeline.sync()
            return
        held = bool(components.lifecycle.cache.groups or sum(file.num_records for file in files) > 1)
        resume_rules.refuse(directory.changes, held=held)
        components.lifecycle.stream_ended &= not directory.tasks_changed  # there may be more tasks now
        replay = self._replay(files, from_start=name is None)
        version = components.trainer.policy_version
        if self.pipeline.syncs:
            check_restored(components.lifecycle, version, components.engine.max_tokens)
            await self.pipeline.sync()
            if replay.sync_pending:
                components.trace.on_weight_sync(version)
        if isinstance(replay, RollBack):  # before rows are cut: no later start may repeat these steps
            event_log.roll_back(files[-1])
        self._cut_files(version, replay)
        if files and mark is not None:
            event_log.journal.commit(mark)  # the writer of the checkpoint may have died before its commit
        if len(files) == 1 and not replay.num_records and event_log.is_on:
            event_log.journal.resume(files[0])
        if self.pipeline.syncs:
            components.driver.on_new_version(version)
        self._log(name, replay)

    def _replay(self, files: list[JournalFile], *, from_start: bool) -> Replay:
        """Replay the journal: its steps are trained again, or rolled back. Nothing is generated."""
        components, dropped = self.components, self.step_log.records.dropped
        kinds = {kind for file in files for kind in file.kinds}
        otherwise = resume_rules.trains_otherwise(self.directory.changes, self.config, from_start=from_start)
        next_task = components.reuse.reroll.as_before
        if STEP in kinds and (otherwise or ROLL_BACK in kinds or self.config.checkpoint.lost_steps == "roll_back"):
            replay = RollBack(components, next_task, self._lose, dropped.clear)
        else:
            replay = Replay(components, next_task, self._train_again, dropped.clear)
        for file in files:
            self.trackers.on_phase(f"reading {file.path.name} of the journal")
            replay.read(file.records())
        replay.end()
        if isinstance(replay, RollBack):
            compares_versions = self.config.algorithm.compares_versions
            num = replay.drop_stale(self.config.staleness_bound, compares_versions=compares_versions)
            held_again = replay.of_lost_steps & components.lifecycle.cache.groups.keys()
            components.reuse.on_roll_back(replay.version, held_again)
            why = f", since {', '.join(change.key for change in otherwise)} changed" if otherwise else ""
            logger.info(
                f"{replay.num_steps} steps after the checkpoint are rolled back{why}: their groups are held again, but"
                f" for {num} that can no longer be trained in bound"
            )
        return replay

    def _train_again(self, groups: list[Group], version: int) -> None:
        self.trackers.on_phase(f"training step {version + 1} again")
        self.step_log.begin()
        with self.step_log.timed("train"):
            penalties = self.components.penalties(groups, version)
            batch = self.components.batches.build(groups, version, penalties)
            trained = self.components.trainer.train_step(batch)
        self.components.after_step(groups, batch, version)
        self._retrained = groups, batch, trained, version

    def _lose(self, groups: list[Group], version: int) -> None:
        self.components.reuse.on_lost_step(groups, version)

    def _cut_files(self, version: int, replay: Replay) -> None:
        """Cut the run's files to the restored state; write the row of the last step, if the kill was before it."""
        directory, lifecycle = self.directory, self.components.lifecycle
        row_is_missing = replay.row_pending and not directory.metrics.reaches(version)
        if replay.row_pending and not row_is_missing:
            replay.on_row_written()  # before `held`: groups dropped until then are recorded
        held = {*lifecycle.cache.groups, *(group.group_id for group, _ in self.step_log.records.dropped)}
        last_row = version - row_is_missing
        directory.truncate(Cut(last_row, held, lifecycle.cache.num_admitted or None))
        self.step_log.restore(directory.metrics.last_row if last_row else {}, next_is_missing=row_is_missing)
        if row_is_missing:
            assert self._retrained is not None
            groups, batch, metrics, before = self._retrained
            metrics = self.step_log.custom_metrics(groups) | metrics
            self.step_log.on_step(groups, batch, metrics, before, 0)

    def _log(self, name: str | None, replay: Replay) -> None:
        """Log where the run resumes, and which settings changed."""
        held = sum(len(g.rollouts) for g in self.components.lifecycle.cache.groups.values())
        journal = f" and {replay.num_records} records of its journal ({replay.num_steps} steps)"
        logger.info(
            f"resumed from {name or 'the start'}{journal if replay.num_records else ''}:"
            f" {held} rollouts in the cache continue where they were"
        )
        if changes := self.directory.changes:
            logger.info("settings that changed since:" + "".join(f"\n  {change}" for change in changes))


def check_restored(lifecycle: Lifecycle, version: int, max_tokens: int) -> None:
    """Raise ValueError where this configuration cannot continue the restored rollouts.

    `version`: the trainer's. `max_tokens`: the engine's limit for a rollout with its prompt.
    """
    config = lifecycle.config
    groups = lifecycle.cache.groups.values()
    if config.finish_first and config.excess_groups(groups, version, config.max_staleness):
        raise ValueError(
            f"--resume: the {len(groups)} groups that the checkpoint holds cannot all be trained with"
            f" rollout.max_staleness = {config.max_staleness} and rollout.groups_per_step = {config.groups_per_step}."
            " Set them back to what the run had (config.resolved.json), or set"
            ' rollout.on_stale = "drop" to lose groups that get too old'
        )
    for rollout in (r for g in groups for r in g.rollouts):
        unfinished = rollout.state in (RolloutState.WAITING, RolloutState.PARKED, RolloutState.ACTING)
        if unfinished and len(rollout.prompt) + config.max_new_tokens > max_tokens:
            raise ValueError(
                f"--resume with rollout.max_new_tokens = {config.max_new_tokens}: the unfinished rollout"
                f" {rollout.rollout_id} has a prompt of {len(rollout.prompt)} and {rollout.num_tokens} tokens so"
                f" far, and the engine takes {max_tokens} in all. Set it (and engine.kv_memory_gb) back to what the run"
                " had"
            )
        for segment in rollout.segments:
            was = segment.sampling.temperature
            if segment.trainable and was not in (0.0, config.temperature):
                raise ValueError(
                    f"--resume with rollout.temperature = {config.temperature:g}: rollout"
                    f" {rollout.rollout_id} was begun at {was:g}, and a rollout has one temperature."
                    f" Set rollout.temperature = {was:g}"
                )


Train = Callable[[list[Group], int], None]
NextTask = Callable[[int], tuple[Task, Prompt] | None]


class Replay:
    """Applies the records of a journal to a run that is new, or restored from the checkpoint where the journal begins.

    The journal has tokens of running rollouts in pieces. A rollout gets its pieces as segments when a record says
    that it was parked or finished, or that its turn ended.

    `next_task(attempt)`: the next task of that attempt and its prompt. `train(groups, version)` repeats the step at
    trainer `version`; `on_row` is called when its row, and groups dropped before it, are known to be written.
    `num_records`, `num_steps`: number of those read. `row_pending`: whether the row of the last step may be missing;
    `sync_pending`: whether its weights may not have been synced.
    """

    def __init__(self, components: Components, next_task: NextTask, train: Train, on_row: Callable[[], None]) -> None:
        self.components, self.lifecycle = components, components.lifecycle
        self.next_task, self.train, self.on_row = next_task, train, on_row
        self.num_records = self.num_steps = 0
        self.row_pending = self.sync_pending = False
        self.taken: dict[int, Group] = {}
        self.tokens = RunningTokens()
        self._handlers: dict[str, Callable[[dict[str, Any], bytes], object]] = {
            EventKind.ADMIT.value: self._admit,
            EventKind.BEGIN.value: lambda meta, _: self.lifecycle.begin_acting(self._rollout(meta)),
            EventKind.OPEN.value: lambda meta, data: _open(self.lifecycle, meta, data),
            EventKind.RESTART.value: lambda meta, _: self.lifecycle.restart_episode(self._group(meta), meta["sibling"]),
            EventKind.AGAIN.value: lambda meta, _: self.lifecycle.rerun_agent(self._rollout(meta)),
            EventKind.CUT.value: lambda meta, _: self.lifecycle.truncate(self._rollout(meta), meta["num_tokens"]),
            EventKind.KEEP.value: lambda meta, _: self.lifecycle.keep(
                meta["group"], meta["sibling"], meta["name"], meta["value"]
            ),
            EventKind.START.value: self._run,
            EventKind.RESUME.value: self._run,
            TOKENS: self._tokens,
            EventKind.PARK.value: self._stop,
            EventKind.ACT.value: self._stop,
            EventKind.ANSWER.value: self._stop,
            EventKind.FINISH.value: self._stop,
            EventKind.SCORE.value: self._score,
            EventKind.READY.value: lambda meta, _: self.lifecycle.emit(EventKind.READY, self._group(meta)),
            EventKind.DROP.value: self._drop,
            EventKind.CONSUME.value: self._consume,
            EventKind.GIVE_BACK.value: self._give_back,
            STEP: self._step,
            ROW: self._row,
            PUBLISH: self._on_synced,
            ROLL_BACK: lambda meta, data: None,  # see Resume._replay
        }

    def read(self, records: Iterable[Record]) -> None:
        """Apply all records, in order. ValueError where they do not fit the tasks of this start."""
        for meta, data in records:
            self.lifecycle.clock.pause_at(meta["seconds"])
            self._handlers[meta["kind"]](meta, data)
            self.num_records += 1

    def end(self) -> None:
        """Give back groups of a step that was not trained, and park running rollouts. After the last record."""
        self._return_taken()
        for rollout in self.lifecycle.cache.running():
            # A rollout at max_new_tokens ended, but no record says so: without its last token it can continue, and end.
            room = self.lifecycle.config.max_new_tokens - 1
            segments = self.tokens.take(rollout, min(self.tokens.num_tokens(rollout), room))
            self._append(rollout, segments, StopReason.PAUSED)
        self.lifecycle.check()
        self.lifecycle.clock.resume()

    # Rollouts

    def _group(self, meta: dict[str, Any]) -> Group:
        return self.lifecycle.cache.groups[meta["group"]]

    def _rollout(self, meta: dict[str, Any]) -> Rollout:
        return self.lifecycle.cache.rollout(meta["rollout"])

    def _admit(self, meta: dict[str, Any], data: bytes) -> None:
        self.components.prompts.on_step(meta["task_version"])
        item = self.next_task(meta["attempt"])
        wanted = f"{meta['task']} (attempt {meta['attempt']})"
        found = "none" if item is None else f"{item[0].task_id} (attempt {item[0].attempt})"
        if item is not None and found == wanted and meta.get("prompt") not in (None, digest_of(item[1])):
            found = "it with another prompt"
        if item is None or found != wanted:
            raise ValueError(
                f"--resume: the journal continues with task {wanted}, and [tasks] now gives {found}. Restore what"
                " makes them ([tasks], tasks.before_produce, the data, the model's chat template, [reroll]), or delete"
                " the folder journal/ in run.dir to continue from the checkpoint alone"
            )
        group = self.lifecycle.admit(*item, meta["version"])
        assert group.group_id == meta["group"]

    def _run(self, meta: dict[str, Any], data: bytes) -> None:
        self.lifecycle.run(self._rollout(meta), meta["version"])

    def _tokens(self, meta: dict[str, Any], data: bytes) -> None:
        self.tokens.add(meta["rollout"], self._pieces(meta, data), replace_earlier=meta["anew"])

    def _pieces(self, meta: dict[str, Any], data: bytes) -> list[Segment]:
        return list(_segments(meta["segments"], data))

    def _stop(self, meta: dict[str, Any], data: bytes) -> None:
        self._tokens(meta, data)
        rollout = self._rollout(meta)
        segments = self.tokens.take(rollout, meta["num_tokens"])
        acts = meta["kind"] == EventKind.ACT.value
        self._append(rollout, segments, StopReason(meta["stop_reason"] or StopReason.PAUSED), acts=acts)

    def _append(
        self, rollout: Rollout, segments: list[Segment], stop_reason: StopReason, *, acts: bool = False
    ) -> None:
        limit = self.lifecycle.config.max_new_tokens
        num_tokens = rollout.num_tokens + sum(map(len, segments))
        if num_tokens > limit or (num_tokens == limit and stop_reason is StopReason.PAUSED):
            raise ValueError(
                f"--resume with rollout.max_new_tokens = {limit}: in the journal rollout {rollout.rollout_id} has"
                f" {num_tokens} tokens. Set it back to what the run had"
            )
        segments = segments or [Segment.nothing(SamplingParams(), rollout.num_tokens)]
        self.lifecycle.append(rollout, [*segments[:-1], replace(segments[-1], stop_reason=stop_reason)], acts=acts)

    # Groups and steps

    def _score(self, meta: dict[str, Any], data: bytes) -> None:
        rollout = self._rollout(meta)
        self.lifecycle.cache.set_reward(rollout.rollout_id, Reward(**meta["reward"]))
        self.lifecycle.scored(self.lifecycle.cache.groups[rollout.group_id], [rollout])

    def _drop(self, meta: dict[str, Any], data: bytes) -> None:
        self.lifecycle.drop(meta["group"], DropReason(meta["reason"]), meta["filter"])

    def _consume(self, meta: dict[str, Any], data: bytes) -> None:
        self.taken[meta["group"]] = self.lifecycle.take(meta["group"], meta["version"])

    def _give_back(self, meta: dict[str, Any], data: bytes) -> None:
        self.lifecycle.give_back([self.taken.pop(meta["group"])], meta["version"])

    def _return_taken(self) -> None:
        self.lifecycle.give_back(list(self.taken.values()), self.components.trainer.policy_version)
        self.taken.clear()

    def _step(self, meta: dict[str, Any], data: bytes) -> None:
        groups = list(self.taken.values())
        self.taken.clear()
        self.train(groups, meta["version"])
        self.num_steps += 1
        self.row_pending = self.sync_pending = True

    def _row(self, meta: dict[str, Any], data: bytes) -> None:
        self.on_row_written(meta["trace_bytes"])
        self.lifecycle.scheduler.on_new_version()

    def _on_synced(self, meta: dict[str, Any], data: bytes) -> None:
        self.sync_pending = False
        self.components.trace.on_weight_sync(meta["version"])

    def on_row_written(self, trace_bytes: int | None = None) -> None:
        """Note that the row of the last step, and groups dropped before it, are written.

        `trace_bytes`: the size of the trace at that time, if known.
        """
        self.row_pending = False
        self.on_row()
        self.components.lifetimes.step_metrics()
        if trace_bytes is not None:
            self.components.trace.resume_at(trace_bytes)


class RollBack(Replay):
    """A replay that undoes the steps of the journal: the run continues with the weights of the checkpoint, version S.

    `train(groups, version)` is called for each lost step, but does not train; its groups are READY again. A token
    sampled under a lost version v > S gets the version 2 S - v: v is (v - S) lost updates away from S, so at trainer
    version t there are (v - S) + (t - S) updates between the two policies. That is its staleness (docs/staleness.md).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.version = self.components.trainer.policy_version
        self.of_lost_versions: set[int] = set()  # ids of groups with tokens of lost versions
        self.of_lost_steps: set[int] = set()  # ids of groups that lost steps had trained

    def drop_stale(self, bound: int, *, compares_versions: bool) -> int:
        """Drop groups that cannot be trained within the staleness bound; returns their number. After `end`.

        `compares_versions`: also drop groups with tokens of lost versions, as training tells policies apart by their
        versions, and 2 S - v may be the version of other tokens.
        """
        cache, config = self.lifecycle.cache, self.lifecycle.config
        if not config.finish_first and bound == config.max_staleness:  # every step enforces the bound itself
            doomed = set(config.expired(cache.groups.values(), self.version))
        else:
            doomed = set(config.excess_groups(cache.groups.values(), self.version, bound))
        if compares_versions:
            doomed |= self.of_lost_versions & cache.groups.keys()
        for group_id in sorted(doomed):
            self.lifecycle.drop(group_id, DropReason.ROLLED_BACK)
        return len(doomed)

    def _pieces(self, meta: dict[str, Any], data: bytes) -> list[Segment]:
        pieces = super()._pieces(meta, data)
        if any(piece.policy_version > self.version for piece in pieces):
            self.of_lost_versions.add(self._rollout(meta).group_id)
        return [replace(p, policy_version=rolled_back(p.policy_version, self.version)) for p in pieces]

    def _admit(self, meta: dict[str, Any], data: bytes) -> None:
        super()._admit(meta | {"version": min(meta["version"], self.version)}, data)

    def _run(self, meta: dict[str, Any], data: bytes) -> None:
        super()._run(meta | {"version": min(meta["version"], self.version)}, data)

    def _consume(self, meta: dict[str, Any], data: bytes) -> None:
        self.taken[meta["group"]] = self._group(meta)

    def _give_back(self, meta: dict[str, Any], data: bytes) -> None:
        del self.taken[meta["group"]]

    def _return_taken(self) -> None:
        self.taken.clear()

    def _step(self, meta: dict[str, Any], data: bytes) -> None:
        self.of_lost_steps |= self.taken.keys()
        super()._step(meta, data)
        self.row_pending = self.sync_pending = False  # a lost step has no row and no weights

    def _row(self, meta: dict[str, Any], data: bytes) -> None:
        """Ignore the row of a lost step: it is cut off."""

    def _on_synced(self, meta: dict[str, Any], data: bytes) -> None:
        """Ignore the weights of a lost step."""


class RunningTokens:
    """Tokens of running rollouts since their start, as the journal has them: in pieces."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Segment]] = {}

    def add(self, rollout_id: str, pieces: Iterable[Segment], *, replace_earlier: bool) -> None:
        """Add pieces. `replace_earlier`: the engine failed and generated the earlier ones again."""
        if replace_earlier:
            self._pieces.pop(rollout_id, None)
        self._pieces.setdefault(rollout_id, []).extend(pieces)

    def num_tokens(self, rollout: Rollout) -> int:
        """Return the number of tokens of the rollout, with those not appended yet."""
        return rollout.num_tokens + sum(map(len, self._pieces.get(rollout.rollout_id, ())))

    def take(self, rollout: Rollout, num_tokens: int) -> list[Segment]:
        """Return the segments to append, up to `num_tokens` of the rollout, and forget its pieces."""
        left = num_tokens - rollout.num_tokens
        joined: list[list[Segment]] = []
        for piece in self._pieces.pop(rollout.rollout_id, ()):
            piece = _prefix(piece, left)
            left -= len(piece)
            if not len(piece):
                break
            if joined and _same_origin(joined[-1][-1], piece):
                joined[-1].append(piece)
            else:
                joined.append([piece])
        return [_joined(pieces) for pieces in joined]


def _prefix(segment: Segment, num: int) -> Segment:
    if num >= len(segment):
        return segment
    return replace(segment, token_ids=segment.token_ids[:num], logprobs=segment.logprobs[:num])


def _same_origin(a: Segment, b: Segment) -> bool:
    return (a.policy_version, a.sampling, a.trainable) == (b.policy_version, b.sampling, b.trainable)


def _joined(pieces: Sequence[Segment]) -> Segment:
    """Join consecutive pieces of one origin."""
    ids, logprobs = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("token_ids", "logprobs"))
    media = tuple(media for piece in pieces for media in piece.media)
    return replace(pieces[-1], token_ids=ids, logprobs=logprobs, start=pieces[0].start, media=media)


def _open(lifecycle: Lifecycle, meta: dict[str, Any], data: bytes) -> None:
    """Open the rollout of an agent's call, whose prompt is in `data`."""
    rollout = Rollout(
        meta["group"],
        meta["sibling"],
        lifecycle.cache.groups[meta["group"]].task,
        prompt=Prompt.of(np.frombuffer(data, "<i4").tolist(), meta.get("media", ())),
        role=meta["role"],
        trajectory=meta["trajectory"],
        context=meta["context"],
        turn_key=meta.get("key"),  # absent in journals of older versions
    )
    lifecycle.open(rollout)


def _segments(fields: Sequence[Mapping[str, Any]], data: bytes) -> Iterator[Segment]:
    """Decode the segments of a record that EventLog wrote."""
    num = sum(field["num_tokens"] for field in fields)
    ids = np.frombuffer(data, "<i4", num).astype(np.int32)
    logprobs = np.frombuffer(data, "<f4", num, offset=4 * num).astype(np.float32)
    at = 0
    for field in fields:
        end = at + field["num_tokens"]
        yield Segment.from_json(field, ids[at:end], logprobs[at:end])
        at = end
