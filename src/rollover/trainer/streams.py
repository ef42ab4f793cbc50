"""Table of the token streams that a training step adds to its samples for the loss.

A policy loss declares a stream by a parameter `<stream>_BT`; terms of [algorithm] and [train] have theirs by `used`. A
new stream is one entry of `STREAMS`. The trainer puts them into the samples, and packing.py makes tensors of them.

    start_logprobs      under the weights at the start of the step, whatever algorithm.proximal is
    proximal_logprobs   as algorithm.proximal says; absent where the pass of the update computes the same numbers
    old_logprobs        what a loss takes its ratio to: the proximal ones, always there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollover.algorithms.loss import OwnLoss, declared_streams, loss_function
from rollover.config import Config
from rollover.staleness import staleness
from rollover.trainer.backend import Stream, TrainerBackend, Version, reference_of
from rollover.types import Sample

GIVEN = ("behavior_logprobs", "advantages", "versions")
"""Those that every sample has."""
STATISTICS = ("statistics_logprobs", "statistics_entropy", "statistics_squares")
"""Streams of a step's samples, the columns of `TrainerBackend.compute_statistics`; no backend is given them."""
_OF_THE_PASS = ("logprobs", "old_logprobs", "entropy")
Minibatches = Sequence[list[Sample]]


class Step(Protocol):
    """What a stream is computed with: the trainer, at the start of a step."""

    backend: TrainerBackend
    whole_config: Config

    def logprobs(self, minibatches: Minibatches, version: Version | None = None, timed_as: str = "logprobs") -> Stream:
        """Log-probs of the loss tokens under the weights of `version`, packed as in training."""
        ...

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Count the seconds of a block as time/<part>_s."""
        ...


def _always(_: Config) -> bool:
    return True


def _never(_: Config) -> bool:
    return False


@dataclass(frozen=True)
class TokenStream:
    """One stream of numbers per token. `compute`: computes it for the samples of a step; None: an earlier stage does.

    `used`: whether something else than the policy loss reads it. `refused`: why a loss cannot have it, in words; "": it
    can. `is_current`: whether it is, in the first update, what the pass itself computes, and is left out there.

    A stream under earlier weights also needs them to be kept (kept_weights.py). The `timed_as` of its passes is a
    metric: time/<timed_as>_s in track/metric_keys.py.
    """

    compute: Callable[[Step, Minibatches], Stream] | None
    used: Callable[[Config], bool] = _never
    refused: Callable[[Config], str] = lambda _: ""
    is_current: Callable[[Config], bool] = _never


def _proximal(step: Step, minibatches: Minibatches) -> Stream:
    if step.whole_config.algorithm.proximal_policy != "snapshot":
        return step.logprobs(minibatches)
    with step.timed("logprobs"):
        return sampling_logprobs(step.backend, minibatches)


def _start(step: Step, minibatches: Minibatches) -> Stream:
    samples = [s for part in minibatches for s in part]
    same = step.whole_config.algorithm.proximal_policy == "step_start"
    if same and all("proximal_logprobs" in s.streams for s in samples):
        return {s.rollout_id: s.in_loss("proximal_logprobs") for s in samples}
    return step.logprobs(minibatches)


def _reference(step: Step, minibatches: Minibatches) -> Stream:
    return step.logprobs(minibatches, reference_of(step.whole_config.algorithm), "reference")


def _staleness(step: Step, minibatches: Minibatches) -> Stream:
    version = step.backend.policy_version
    return {s.rollout_id: staleness(s.in_loss("versions"), version) for part in minibatches for s in part}


_OF_THE_CRITIC = TokenStream(
    None,
    used=lambda c: c.algorithm.needs_critic,
    refused=lambda c: "" if c.algorithm.needs_critic else 'there is no critic: set algorithm.advantage = "gae"',
)


STREAMS: dict[str, TokenStream] = {
    # Of algorithm.proximal, where it takes a forward pass.
    "proximal_logprobs": TokenStream(
        _proximal,
        used=lambda c: c.algorithm.proximal_policy in ("step_start", "snapshot"),
        refused=lambda _: "old_logprobs_BT is that, for every algorithm.proximal",
        is_current=lambda c: c.algorithm.proximal_policy == "step_start",
    ),
    # Under the weights at the start of the step.
    "start_logprobs": TokenStream(_start, used=lambda c: c.train.max_kl > 0, is_current=_always),
    "reference_logprobs": TokenStream(
        _reference,
        used=lambda c: c.algorithm.kl_in_loss,
        refused=lambda c: "" if c.algorithm.needs_reference else "no reference is kept: set algorithm.kl_coef",
    ),
    "teacher_logprobs": TokenStream(
        None,
        refused=lambda c: "" if c.distill.teacher and not c.distill.roles else "set distill.teacher, for all roles",
    ),
    # Trainer version - policy version.
    "staleness": TokenStream(_staleness, used=lambda c: c.algorithm.proximal_policy == "interpolated"),
    "values": _OF_THE_CRITIC,
    "returns": _OF_THE_CRITIC,
    # Factors of the policy loss (token_weights.py).
    "weights": TokenStream(
        None,
        used=lambda c: c.algorithm.correction_normalize or c.algorithm.top_entropy_share < 1,
        refused=lambda _: "the loss is multiplied by that afterwards",
    ),
}


def declared_by_loss(config: Config) -> list[str]:
    """The streams of `STREAMS` that the policy loss declares. ValueError for one that is unknown, or that the run does
    not have."""
    loss = config.algorithm.loss
    declared = declared_streams(OwnLoss(loss) if ":" in loss else loss_function(loss))
    found: list[str] = []
    for name, needed in declared.items():
        if name not in STREAMS and name not in (*GIVEN, *_OF_THE_PASS):
            if not needed:
                continue
            raise ValueError(
                f"algorithm.loss = {loss!r}: its parameter {name}_BT names no stream of tokens. There are"
                f" {', '.join(sorted({*STREAMS, *GIVEN, *_OF_THE_PASS}))}"
            )
        if name in STREAMS and (why := STREAMS[name].refused(config)):
            if not needed:
                continue
            raise ValueError(f"algorithm.loss = {loss!r}: its parameter {name}_BT cannot be given, as {why}")
        found.append(name)
    return [name for name in STREAMS if name in found]


def sampling_logprobs(backend: TrainerBackend, minibatches: Minibatches) -> Stream:
    """Log-probs of every loss token under the trainer's weights of the version that sampled it."""
    out = {s.rollout_id: np.zeros(s.num_loss_tokens, np.float32) for part in minibatches for s in part}
    for part in minibatches:
        versions = {int(v) for s in part for v in np.unique(s.in_loss("versions"))}
        for version in sorted(versions):
            current = version == backend.policy_version
            found = backend.compute_logprobs(part, None if current else version)
            for s in part:
                if s.mask.any():
                    own = s.in_loss("versions") == version
                    out[s.rollout_id][own] = found[s.rollout_id][own]
    return out


def with_stream(samples: Sequence[Sample], name: str, stream: Stream) -> list[Sample]:
    """The samples with that stream; 0 for those without a loss token."""
    nothing = np.zeros(0, np.float32)
    return [s.with_loss_stream(name, stream[s.rollout_id] if s.mask.any() else nothing) for s in samples]
