"""Supervised training (`rollover sft`): examples as the groups of steps, and their held-out loss.

    sft.path      rows of a dataset (tasks/examples.py)          ──┐
    sft.rollouts  recorded rollouts of a run that pass a filter  ──┴─▶ Examples ──▶ SupervisedExamples.produce

An example is a Group of one Rollout, as if the current policy had sampled it. Owns the selection and order of examples,
and which are held out. The loss is algorithm.loss = "nll" (trainer/objective.py).
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rollover.config import Config
from rollover.config.resume import change_in_run
from rollover.files import did_you_mean_path, local_path
from rollover.models.load import LoadedModel, max_positions
from rollover.models.vision import placeholder_ids
from rollover.tasks.examples import Example, ExampleRows, TokenSpan
from rollover.tasks.rows import TableLocation
from rollover.tasks.split import key_of, problem_text
from rollover.track.records import read_rollouts, step_files
from rollover.trainer.backend import TrainerBackend
from rollover.trainer.batch import BatchBuilder
from rollover.types import (
    FIRST_EVAL_GROUP,
    Group,
    Prompt,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    why_not_in_vocabulary,
)

logger = logging.getLogger(__name__)

_ENDED = (StopReason.EOS, StopReason.STOP_STRING, StopReason.ENV_DONE)


@dataclass(frozen=True)
class Examples:
    """The examples of a run: to train, and `held_out`. `skipped`: number of those that are too long."""

    trained: Sequence[Example]
    held_out: Sequence[Example]
    skipped: int = 0

    def fingerprint(self) -> str:
        """Return a text that identifies the trained examples, their tokens and their order."""
        digest = hashlib.blake2b(digest_size=8)
        for example in self.trained:
            digest.update(example.token_ids().astype(np.int64).tobytes())
            digest.update("".join(image.digest for image in example.prompt.media).encode())
        return f"{len(self.trained)} examples, {digest.hexdigest()}"


def load_examples(config: Config, loaded: LoadedModel) -> Examples:
    """Read and tokenise all examples; with sft.epochs they set train.num_steps. Log a summary.

    ValueError, which names the option, the file or the row, where there is nothing to train.
    """
    sft, tokenizer = config.sft, loaded.tokenizer
    positions = max_positions(loaded.model.config.get_text_config()) or sft.max_tokens
    read = _Reading(min(sft.max_tokens, positions), loaded.vocab_size, placeholder_ids(loaded.model.config))
    trained: list[Example] = []
    held_out: list[Example] = []
    if sft.path:
        place = TableLocation(sft.path, sft.subset, sft.split, table="sft")
        rows = ExampleRows(place, sft, config.tasks, tokenizer, loaded.processor)
        trained += read.short_enough(map(rows.example, range(len(rows))))
    if sft.rollouts:
        trained += read.short_enough(_recorded(config))
    if sft.eval_path:
        place = TableLocation(sft.eval_path, key="eval_path", table="sft")
        rows = ExampleRows(place, sft, config.tasks, tokenizer, loaded.processor)
        held_out += read.short_enough(map(rows.example, range(len(rows))))
        keys = {_key(example) for example in held_out}
        repeated = [example for example in trained if _key(example) in keys]
        if repeated:
            logger.info(f"sft: {len(repeated)} examples are not trained, as sft.eval_path has them")
            trained = [example for example in trained if _key(example) not in keys]
    elif sft.eval_fraction:
        is_out = [_key(example) < sft.eval_fraction * 2**64 for example in trained]
        held_out = [example for example, out in zip(trained, is_out, strict=True) if out]
        trained = [example for example, out in zip(trained, is_out, strict=True) if not out]
    if read.skipped:
        logger.info(f"sft: {read.skipped} examples of more than {read.most} tokens are skipped (sft.max_tokens)")
    if not trained:
        raise ValueError(f"sft: no example is left to train: {read.why_none(bool(held_out))}")
    if (sft.eval_path or sft.eval_fraction) and not held_out:
        raise ValueError(
            f"sft.eval_fraction = {sft.eval_fraction:g}: none of {len(trained)} examples is held out. Raise it, or set"
            " it to 0"
        )
    if sft.epochs:
        change_in_run(config, "train.num_steps", -(-sft.epochs * len(trained) // sft.batch_examples))
    tokens = sum(len(part.token_ids) for example in trained for part in example.spans if part.trained)
    num_steps, passes = config.train.num_steps, config.train.num_steps * sft.batch_examples / len(trained)
    logger.info(
        f"sft: {len(trained):,} examples with {tokens:,} trained tokens, {len(held_out):,} held out; {num_steps} steps"
        f" of {sft.batch_examples} examples are {sft.epochs or passes:.3g} passes"
    )
    return Examples(trained, held_out, read.skipped)


class SupervisedExamples:
    """The Producer of a supervised run: examples, shuffled for each epoch by run.seed.

    An epoch that ends within a batch is followed by the next one. Its state is the number of examples so far. [] after
    sft.epochs.
    """

    source, uses_engine = "examples", False

    def __init__(self, config: Config, examples: Examples) -> None:
        self.config, self.examples = config, examples
        self.given = 0
        self._order: tuple[int, list[int]] = (-1, [])
        self._fingerprint = examples.fingerprint()

    async def produce(self, step: int, version: int) -> list[Group] | None:
        sft, num = self.config.sft, len(self.examples.trained)
        end = self.given + sft.batch_examples
        if sft.epochs:
            end = min(end, sft.epochs * num)
        groups = [as_group(self._example(i), i, version) for i in range(self.given, end)]
        self.given = max(self.given, end)
        return groups

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the examples so far."""
        return {
            "sft/epoch": self.given / len(self.examples.trained),
            "sft/examples": float(self.given),
            "sft/skipped": float(self.examples.skipped),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "examples": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where the state is that of other examples."""
        was = state.get("examples", self._fingerprint)
        if was != self._fingerprint:
            raise ValueError(
                f"--resume: the examples of [sft] are not what they were when the checkpoint was written ({was}; now"
                f" {self._fingerprint}): some would be repeated or skipped. Set them back, or start a new run in"
                " another run.dir"
            )
        self.given = state.get("given", 0)

    def _example(self, index: int) -> Example:
        """Return example `index`, counted over all epochs."""
        epoch, place = divmod(index, len(self.examples.trained))
        if self._order[0] != epoch:
            numbers = list(range(len(self.examples.trained)))
            random.Random(f"{self.config.run.seed}/sft/{epoch}").shuffle(numbers)
            self._order = epoch, numbers
        return self.examples.trained[self._order[1][place]]


class HeldOutLoss:
    """The mean negative log-likelihood of the trained tokens of the held-out examples."""

    def __init__(self, config: Config, examples: Examples, batches: BatchBuilder) -> None:
        self.config = config
        groups = [as_group(example, FIRST_EVAL_GROUP + i, 0) for i, example in enumerate(examples.held_out)]
        self._samples = batches.sampled(groups, 0)

    def after_step(self, step: int, backend: TrainerBackend) -> dict[str, float]:
        """Return eval/sft_loss (nats per token) of the weights after `step`, if due."""
        every, last = self.config.sft.eval_every_steps, self.config.train.num_steps
        if not self._samples or not (step == last or (every and step % every == 0)):
            return {}
        logprobs = backend.compute_logprobs(self._samples)
        values = np.concatenate([logprobs[s.rollout_id] for s in self._samples])
        return {"eval/sft_loss": -float(values.mean(dtype=np.float64))}


def as_group(example: Example, group_id: int, version: int) -> Group:
    """Return the example as a group to train at trainer `version`. Its log-probs are 0, and unused."""
    segments = [
        Segment(
            part.token_ids,
            np.zeros(len(part.token_ids), np.float32),
            version,
            SamplingParams(),
            StopReason.EOS,
            trainable=part.trained,
        )
        for part in example.spans
    ]
    rollout = Rollout(group_id, 0, example.task, segments, RolloutState.READY, StopReason.EOS)
    return Group(group_id, example.task, example.prompt, [rollout])


# Private


def _key(example: Example) -> int:
    """Return a key of the example's problem: its text and images."""
    return key_of(problem_text(example.task))


class _Reading:
    """Filter and counter of examples.

    `most`: limit of tokens; `vocab_size`: upper bound of token ids. `never`: ids that no answer may have (placeholders
    of images).
    """

    def __init__(self, most: int, vocab_size: int, never: Sequence[int] = ()) -> None:
        self.most, self.vocab_size, self.never = most, vocab_size, frozenset(never)
        self.num, self.skipped = 0, 0

    def short_enough(self, examples: Iterator[Example]) -> list[Example]:
        """Return the examples within the limit. ValueError for invalid token ids."""
        kept: list[Example] = []
        for example in examples:
            self.num += 1
            if example.num_tokens > self.most:
                self.skipped += 1
                continue
            if (why := why_not_in_vocabulary(example.token_ids(), self.vocab_size)) is not None:
                raise ValueError(
                    f"sft: the example {example.task.task_id!r} cannot be trained: {why}. Was it made with another"
                    " tokenizer?"
                )
            if any(part.trained and self.never.intersection(part.token_ids.tolist()) for part in example.spans):
                raise ValueError(
                    f"sft: the answer of the example {example.task.task_id!r} has the model's token for an image, which"
                    " no policy can write: remove it from the text"
                )
            kept.append(example)
        return kept

    def why_none(self, held_out: bool) -> str:
        if held_out:
            return "all are held out. Lower sft.eval_fraction"
        if self.num:
            return f"all {self.num} have more than {self.most} tokens. Raise sft.max_tokens"
        return "no recorded rollout passes. Lower sft.min_reward, or give another run"


def _recorded(config: Config) -> Iterator[Example]:
    """Return the recorded rollouts of sft.rollouts that pass the filter, by task, the best first."""
    sft = config.sft
    folder = _records_of(local_path(sft.rollouts))
    left_out = Counter[str]()
    passed: dict[str, list[Rollout]] = {}
    seen: set[tuple[Prompt, tuple[int, ...]]] = set()
    for group in (group for groups in read_rollouts(folder, include_dropped=True) for group in groups):
        for rollout in group.rollouts:
            score = None if rollout.reward is None else rollout.reward.score
            key = rollout.prompt, tuple(rollout.token_ids())
            if score is None or score < sft.min_reward:
                left_out[f"have no reward of {sft.min_reward:g} or more"] += 1
            elif rollout.stop_reason not in _ENDED or not rollout.num_sampled_tokens:
                left_out["did not end by themselves"] += 1
            elif key in seen:
                left_out["repeat another"] += 1
            else:
                seen.add(key)
                passed.setdefault(group.task.task_id, []).append(rollout)
    kept: list[Rollout] = []
    for of_task in passed.values():
        best = sorted(of_task, key=_reward_of, reverse=True)[: sft.per_task or None]  # stable: the earliest first
        kept += best
        left_out[f"are beyond the best {sft.per_task} of their task"] += len(of_task) - len(best)
    whys = "".join(f", {num:,} {why}" for why, num in left_out.items() if num)
    logger.info(f"sft: of {len(kept) + left_out.total():,} recorded rollouts {len(kept):,} are examples{whys}")
    return map(_as_example, kept)


def _records_of(folder: Path) -> Path:
    """Return the folder rollouts/ of a run, or `folder` itself where it is one."""
    inner = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    if not step_files(inner):
        near = "" if folder.is_dir() else did_you_mean_path(folder)
        raise ValueError(f"sft.rollouts = {str(folder)!r}: there are no recorded rollouts of a run{near}")
    return inner


def _reward_of(rollout: Rollout) -> float:
    assert rollout.reward is not None and rollout.reward.score is not None
    return rollout.reward.score


def _as_example(rollout: Rollout) -> Example:
    """Return an example of the rollout's tokens, up to the last sampled one."""
    parts = [
        TokenSpan(np.concatenate([segment.token_ids for segment in run]).astype(np.int32), trained)
        for trained, run in ((t, list(of)) for t, of in groupby(rollout.segments, key=lambda s: s.trainable))
    ]
    parts = [part for part in parts if len(part.token_ids)]
    while not parts[-1].trained:
        parts.pop()
    return Example(rollout.task, rollout.prompt, tuple(parts))
