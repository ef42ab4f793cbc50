"""The event log (event_log.py) read back: what it tells happens again, in order, without an engine, a reward or a
decision.

    records ──▶ Lifecycle.admit, run, append, score, take, drop ...     step ──▶ Replay: the same groups are trained
                                                                             └─▶ RollBack: the step is lost

The tokens of a rollout come in pieces while it runs; it gets them when it is parked or finished, or its turn is, as
from an engine; and what its environment wrote as from that. Owns the groups that were taken for a step. Never writes a
file: what the run wrote stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollover.checkpoint.journal import Record
from rollover.rollout.lifecycle import EventKind, Lifecycle
from rollover.run.event_log import PUBLISH, ROLL_BACK, ROW, STEP, TOKENS, digest_of
from rollover.run.parts import Parts
from rollover.staleness import beyond_bound, expired, rolled_back
from rollover.types import DropReason, Group, Prompt, Reward, Rollout, SamplingParams, Segment, StopReason, Task

Train = Callable[[list[Group], int], None]
NextTask = Callable[[int], tuple[Task, Prompt] | None]


class Replay:
    """Carries out what a journal tells, in the parts of a run that was restored from the checkpoint at which the
    journal begins, or that is new.

    `next_task(attempt)`: the next task and its prompt, which had that attempt. `train(groups, version)` trains the step
    at trainer `version` again; `on_row` is called when its row, and with it what was dropped until then, is known to be
    written.
    `num_records`, `num_steps`: what was read so far. `untold`: whether the row of the last step is not known to be
    written; `unpublished`: whether its weights are not known to have been live. `trace_bytes`: size of the trace when
    the last row was written.
    """

    def __init__(self, parts: Parts, next_task: NextTask, train: Train, on_row: Callable[[], None]) -> None:
        self.parts, self.lifecycle = parts, parts.lifecycle
        self.next_task, self.train, self.on_row = next_task, train, on_row
        self.num_records = self.num_steps = 0
        self.untold = self.unpublished = False
        self.trace_bytes = parts.trace.resumes_at
        self.taken: dict[int, Group] = {}
        self.tokens = RunningTokens()
        self._of_kind: dict[str, Callable[[dict[str, Any], bytes], object]] = {
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
            PUBLISH: self._on_published,
            ROLL_BACK: lambda meta, data: None,  # says what to make of the others
        }

    def read(self, records: Iterable[Record]) -> None:
        """Carry out all of them, in order. ValueError where they do not fit the tasks of this start."""
        for meta, data in records:
            self.lifecycle.clock.pause_at(meta["seconds"])
            self._of_kind[meta["kind"]](meta, data)
            self.num_records += 1

    def end(self) -> None:
        """After the last record: what was taken for a step that was not trained is given back; what runs is parked."""
        self._return_taken()
        for rollout in self.lifecycle.cache.running():
            room = self.lifecycle.config.max_new_tokens - 1  # of a full one the journal lacks how it stopped
            segments = self.tokens.take(rollout, min(self.tokens.num_told(rollout), room))
            self._append(rollout, segments, StopReason.PAUSED)
        self.lifecycle.check()
        self.lifecycle.clock.resume()

    # Rollouts

    def _group(self, meta: dict[str, Any]) -> Group:
        return self.lifecycle.cache.groups[meta["group"]]

    def _rollout(self, meta: dict[str, Any]) -> Rollout:
        return self.lifecycle.cache.rollout(meta["rollout"])

    def _admit(self, meta: dict[str, Any], data: bytes) -> None:
        self.parts.prompts.on_step(meta["task_version"])
        item = self.next_task(meta["attempt"])
        wanted = f"{meta['task']} (attempt {meta['attempt']})"
        found = "none" if item is None else f"{item[0].task_id} (attempt {item[0].attempt})"
        if item is not None and found == wanted and meta.get("prompt") not in (None, digest_of(item[1])):
            found = "it with another prompt"
        if item is None or found != wanted:
            raise ValueError(
                f"--resume: the journal goes on with task {wanted}, and [tasks] now gives {found}. Set back what makes"
                " them ([tasks], tasks.before_produce, the data, the model's chat template, [reroll]), or delete the"
                " folder journal/ in run.dir to go on from the checkpoint alone"
            )
        group = self.lifecycle.admit(*item, meta["version"])
        assert group.group_id == meta["group"]

    def _run(self, meta: dict[str, Any], data: bytes) -> None:
        self.lifecycle.run(self._rollout(meta), meta["version"])

    def _tokens(self, meta: dict[str, Any], data: bytes) -> None:
        self.tokens.add(meta["rollout"], self._pieces(meta, data), anew=meta["anew"])

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
        self.lifecycle.give_back(list(self.taken.values()), self.parts.trainer.policy_version)
        self.taken.clear()

    def _step(self, meta: dict[str, Any], data: bytes) -> None:
        groups = list(self.taken.values())
        self.taken.clear()
        self.train(groups, meta["version"])
        self.num_steps += 1
        self.untold = self.unpublished = True

    def _row(self, meta: dict[str, Any], data: bytes) -> None:
        self.told(meta["trace_bytes"])
        self.lifecycle.scheduler.on_new_version()

    def _on_published(self, meta: dict[str, Any], data: bytes) -> None:
        self.unpublished = False
        self.parts.trace.on_weight_sync(meta["version"])

    def told(self, trace_bytes: int | None = None) -> None:
        """From now on it is known that the row of the last step is in metrics.jsonl, and that the groups dropped until
        then are recorded. `trace_bytes`: the size of the trace by then; None where it is not known."""
        self.untold = False
        self.on_row()
        self.parts.lifetimes.step_metrics()
        if trace_bytes is not None:
            self.trace_bytes = trace_bytes
            self.parts.trace.drain()


class RollBack(Replay):
    """A replay that does not train the steps of the journal again: the run goes on with the weights of the checkpoint,
    at its version S. `train(groups, version)` is told of them instead; groups that they had trained are READY again.

    A token that was sampled by a lost version v > S gets the version 2 S - v: it is v - S updates away from the
    checkpoint, and those were lost, so at trainer version t there are (v - S) + (t - S) updates between the two
    policies. That is its staleness then (docs/staleness.md).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.version = self.parts.trainer.policy_version
        self.of_lost_versions: set[int] = set()  # ids of groups with such tokens
        self.of_lost_steps: set[int] = set()  # ids of the groups that they trained

    def give_up(self, bound: int, *, needs_weights: bool) -> int:
        """Drop what cannot be trained within this bound of staleness; returns how many groups. After `end`.

        `needs_weights`: nor what has tokens of lost versions, since the trainer needs the weights that sampled them.
        """
        cache, config = self.lifecycle.cache, self.lifecycle.config
        if not config.finish_first and bound == config.max_staleness:  # every step sees to the bound by itself
            doomed = set(expired(cache.groups.values(), self.version, bound, masks=config.masks))
        else:
            doomed = set(beyond_bound(cache.groups.values(), self.version, bound, config.groups_per_step))
        if needs_weights:
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
        self.untold = self.unpublished = False  # there will be no row of it, and its weights are lost

    def _row(self, meta: dict[str, Any], data: bytes) -> None:
        """The row of a lost step is cut off, with all else that was written of it."""

    def _on_published(self, meta: dict[str, Any], data: bytes) -> None:
        """The weights of a lost step are gone."""


class RunningTokens:
    """The tokens that each running rollout got since it was started, as the journal tells of them: in pieces."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Segment]] = {}

    def add(self, rollout_id: str, pieces: Iterable[Segment], *, anew: bool) -> None:
        """More of them. `anew`: in place of those that were there, as the engine failed and was asked again."""
        if anew:
            self._pieces.pop(rollout_id, None)
        self._pieces.setdefault(rollout_id, []).extend(pieces)

    def num_told(self, rollout: Rollout) -> int:
        """Tokens of the rollout, with those that are not appended to it yet."""
        return rollout.num_tokens + sum(map(len, self._pieces.get(rollout.rollout_id, ())))

    def take(self, rollout: Rollout, num_tokens: int) -> list[Segment]:
        """What is to be appended, up to `num_tokens` of the rollout: one segment for each version in a row."""
        left = num_tokens - rollout.num_tokens
        joined: list[list[Segment]] = []
        for piece in self._pieces.pop(rollout.rollout_id, ()):
            piece = _first(piece, left)
            left -= len(piece)
            if not len(piece):
                break
            if joined and _same_origin(joined[-1][-1], piece):
                joined[-1].append(piece)
            else:
                joined.append([piece])
        return [_one(pieces) for pieces in joined]


def _first(segment: Segment, num: int) -> Segment:
    """Its first `num` tokens, or all it has."""
    if num >= len(segment):
        return segment
    return replace(segment, token_ids=segment.token_ids[:num], logprobs=segment.logprobs[:num])


def _same_origin(a: Segment, b: Segment) -> bool:
    return (a.policy_version, a.sampling, a.trainable) == (b.policy_version, b.sampling, b.trainable)


def _one(pieces: Sequence[Segment]) -> Segment:
    """Consecutive pieces of one origin as one segment."""
    ids, logprobs = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("token_ids", "logprobs"))
    media = tuple(media for piece in pieces for media in piece.media)
    return replace(pieces[-1], token_ids=ids, logprobs=logprobs, start=pieces[0].start, media=media)


def _open(lifecycle: Lifecycle, meta: dict[str, Any], data: bytes) -> None:
    """A call of an agent opened a rollout, whose prompt is in `data`."""
    rollout = Rollout(
        meta["group"],
        meta["sibling"],
        lifecycle.cache.groups[meta["group"]].task,
        prompt=Prompt.of(np.frombuffer(data, "<i4").tolist(), meta.get("media", ())),
        role=meta["role"],
        trajectory=meta["trajectory"],
        context=meta["context"],
        turn_key=meta.get("key"),  # absent in journals of before
    )
    lifecycle.open(rollout)


def _segments(fields: Sequence[Mapping[str, Any]], data: bytes) -> Iterator[Segment]:
    """The segments of a record: the inverse of what EventLog wrote of them."""
    num = sum(of["num_tokens"] for of in fields)
    ids = np.frombuffer(data, "<i4", num).astype(np.int32)
    logprobs = np.frombuffer(data, "<f4", num, offset=4 * num).astype(np.float32)
    at = 0
    for of in fields:
        end = at + of["num_tokens"]
        yield Segment.from_json(of, ids[at:end], logprobs[at:end])
        at = end
