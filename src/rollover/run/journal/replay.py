"""The journal read back: what it tells happens again, in order, without an engine, a reward or a decision.

    records ──▶ Lifecycle.admit, run, append, score, take, drop ...     step ──▶ the same groups are trained

The tokens of a rollout come in pieces while it runs (running_tokens.py); it gets them when it is parked or finished, or
its turn is, as from an engine; and what its environment wrote as from that. Owns the groups that were taken for a step.
Never writes a file: what the run wrote stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from rollover.checkpoint.journal import Record
from rollover.rollout.lifecycle import EventKind, Lifecycle
from rollover.run.journal.running_tokens import RunningTokens
from rollover.run.journal.writer import PUBLISH, ROLL_BACK, ROW, STEP, TOKENS, digest_of, pieces
from rollover.run.parts import Parts
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
        self.parts, self.lifecycle, self.history = parts, parts.lifecycle, parts.history
        self.next_task, self.train, self.on_row = next_task, train, on_row
        self.num_records = self.num_steps = 0
        self.untold = self.unpublished = False
        self.trace_bytes = parts.history.trace_bytes
        self.taken: dict[int, Group] = {}
        self.tokens = RunningTokens()
        self._of_kind: dict[str, Callable[[dict[str, Any], bytes], object]] = {
            EventKind.ADMIT.value: self._admit,
            EventKind.BEGIN.value: lambda meta, _: self.lifecycle.begin_acting(self._rollout(meta)),
            EventKind.OPEN.value: lambda meta, data: _open(self.lifecycle, meta, data),
            EventKind.RESTART.value: lambda meta, _: self.lifecycle.restart_episode(self._group(meta), meta["sibling"]),
            EventKind.AGAIN.value: lambda meta, _: self.lifecycle.act_again(self._rollout(meta)),
            EventKind.CUT.value: lambda meta, _: self.lifecycle.cut(self._rollout(meta), meta["num_tokens"]),
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
            self.history.stand_at(meta["seconds"])
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
        self.history.go_on()

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
        return list(pieces(meta["segments"], data))

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
        self.history.on_published(meta["version"])

    def told(self, trace_bytes: int | None = None) -> None:
        """From now on it is known that the row of the last step is in metrics.jsonl, and that the groups dropped until
        then are recorded. `trace_bytes`: the size of the trace by then; None where it is not known."""
        self.untold = False
        self.on_row()
        self.history.lifetimes.step_metrics()
        if trace_bytes is not None:
            self.trace_bytes = trace_bytes
            self.history.trace.drain()


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
