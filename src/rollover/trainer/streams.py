"""Streams of numbers per token that a training step adds to its samples, and the tokens that it rejects.

A policy loss declares a stream by a parameter `<stream>_BT`; terms of [algorithm] and [train] have theirs by `used`. A
new stream is one entry of `STREAMS`. The trainer adds the streams to the samples; passes.py makes tensors of them.

    start_logprobs      under the weights at the start of the step, whatever algorithm.proximal is
    proximal_logprobs   as algorithm.proximal says; with step_start absent in the first update of a step, whose own
                        forward pass computes the same numbers
    old_logprobs        denominator of the loss's ratio: the proximal log-probs, always present
    weights             1 / mean importance weight of the step (algorithm.correction_normalize)
                        x whether the token is in the top_entropy_share of its minibatch

algorithm.rejection removes tokens that are too far from the policy that sampled them. It rewrites the masks before
anything is counted, as verl rewrites its response mask: a rejected token is in no denominator, no KL or entropy term
and no sequence ratio. Weights and rejections use the weights of the step's start, so they do not depend on packing. The
importance weight of a single token is the objective's (objective.py, algorithms/correction.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from rollover.algorithms.correction import importance_weights, interpolated_proximal, rejection_mask
from rollover.algorithms.loss import CustomLoss, declared_streams, high_entropy_mask, loss_function
from rollover.config import AlgorithmConfig, Config
from rollover.staleness import staleness
from rollover.trainer.backend import RunBackend, Stream, Version, reference_version
from rollover.types import Sample

SAMPLE_STREAMS = ("behavior_logprobs", "advantages", "versions")
"""Streams of every sample."""
STATISTICS = ("statistics_logprobs", "statistics_entropy", "statistics_squares")
"""Columns of `TrainerBackend.compute_statistics`, as streams of a step's samples; backends do not get them."""
_FROM_THE_PASS = ("logprobs", "old_logprobs", "entropy")
Minibatches = Sequence[list[Sample]]


class StreamContext(Protocol):
    """Inputs of a stream's computation: the trainer, at the start of a step."""

    backend: RunBackend
    whole_config: Config

    def logprobs(self, minibatches: Minibatches, version: Version | None = None, timed_as: str = "logprobs") -> Stream:
        """Return the log-probs of the loss tokens under the weights of `version`, packed as in training."""
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

    `used`: whether anything but the policy loss reads it. `unavailable`: why a loss cannot have it; "": it can.
    `is_current`: whether the pass of the first update computes the same numbers, so that the stream is left out there.

    A stream under earlier weights also needs them to be kept (kept_weights.py). The `timed_as` of its passes is a
    metric: time/<timed_as>_s in track/metric_keys.py.
    """

    compute: Callable[[StreamContext, Minibatches], Stream] | None
    used: Callable[[Config], bool] = _never
    unavailable: Callable[[Config], str] = lambda _: ""
    is_current: Callable[[Config], bool] = _never


def _proximal(step: StreamContext, minibatches: Minibatches) -> Stream:
    if step.whole_config.algorithm.proximal_policy != "snapshot":
        return step.logprobs(minibatches)
    with step.timed("logprobs"):
        return sampling_logprobs(step.backend, minibatches)


def _start(step: StreamContext, minibatches: Minibatches) -> Stream:
    samples = [s for part in minibatches for s in part]
    same = step.whole_config.algorithm.proximal_policy == "step_start"
    if same and all("proximal_logprobs" in s.streams for s in samples):
        return {s.rollout_id: s.in_loss("proximal_logprobs") for s in samples}
    return step.logprobs(minibatches)


def _reference(step: StreamContext, minibatches: Minibatches) -> Stream:
    return step.logprobs(minibatches, reference_version(step.whole_config.algorithm), "reference")


def _staleness(step: StreamContext, minibatches: Minibatches) -> Stream:
    version = step.backend.policy_version
    return {s.rollout_id: staleness(s.in_loss("versions"), version) for part in minibatches for s in part}


_CRITIC_STREAM = TokenStream(
    None,
    used=lambda c: c.algorithm.needs_critic,
    unavailable=lambda c: "" if c.algorithm.needs_critic else 'there is no critic: set algorithm.advantage = "gae"',
)


STREAMS: dict[str, TokenStream] = {
    # Of algorithm.proximal, where it takes a forward pass.
    "proximal_logprobs": TokenStream(
        _proximal,
        used=lambda c: c.algorithm.proximal_policy in ("step_start", "snapshot"),
        unavailable=lambda _: "old_logprobs_BT is that, for every algorithm.proximal",
        is_current=lambda c: c.algorithm.proximal_policy == "step_start",
    ),
    # Under the weights at the start of the step.
    "start_logprobs": TokenStream(_start, used=lambda c: c.train.max_kl > 0, is_current=_always),
    "reference_logprobs": TokenStream(
        _reference,
        used=lambda c: c.algorithm.kl_in_loss,
        unavailable=lambda c: "" if c.algorithm.needs_reference else "no reference is kept: set algorithm.kl_coef",
    ),
    "teacher_logprobs": TokenStream(
        None,
        unavailable=lambda c: "" if c.distill.teacher and not c.distill.roles else "set distill.teacher, for all roles",
    ),
    # Trainer version - policy version.
    "staleness": TokenStream(_staleness, used=lambda c: c.algorithm.proximal_policy == "interpolated"),
    "values": _CRITIC_STREAM,
    "returns": _CRITIC_STREAM,
    # Factors of the policy loss (`with_weights`).
    "weights": TokenStream(
        None,
        used=lambda c: c.algorithm.correction_normalize or c.algorithm.top_entropy_share < 1,
        unavailable=lambda _: "the loss is multiplied by that afterwards",
    ),
}


def declared_by_loss(config: Config) -> list[str]:
    """Return the streams of `STREAMS` that the policy loss declares. ValueError for an unavailable one."""
    loss = config.algorithm.loss
    declared = declared_streams(CustomLoss(loss) if ":" in loss else loss_function(loss))
    found: list[str] = []
    for name, needed in declared.items():
        if name not in STREAMS and name not in (*SAMPLE_STREAMS, *_FROM_THE_PASS):
            if not needed:
                continue
            raise ValueError(
                f"algorithm.loss = {loss!r}: its parameter {name}_BT names no stream of tokens. There are"
                f" {', '.join(sorted({*STREAMS, *SAMPLE_STREAMS, *_FROM_THE_PASS}))}"
            )
        if name in STREAMS and (why := STREAMS[name].unavailable(config)):
            if not needed:
                continue
            raise ValueError(f"algorithm.loss = {loss!r}: its parameter {name}_BT cannot be given, as {why}")
        found.append(name)
    return [name for name in STREAMS if name in found]


def sampling_logprobs(backend: RunBackend, minibatches: Minibatches) -> Stream:
    """Return the log-probs of every loss token under the trainer's weights that sampled it."""
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
    """Return the samples with that stream; it is 0 in samples without a loss token."""
    nothing = np.zeros(0, np.float32)
    return [s.with_loss_stream(name, stream[s.rollout_id] if s.mask.any() else nothing) for s in samples]


ENTROPY = STATISTICS[1]
_BY_SEQUENCE = ("sequence_truncate", "sequence_mask")


def compared_stream(config: AlgorithmConfig) -> str:
    """Return the stream of log-probs that rejection and weights compare with.

    These are the proximal ones, or, where the loss computes the proximal ones itself, those at the start of the step.
    """
    return "proximal_logprobs" if config.proximal_policy in ("step_start", "snapshot") else "start_logprobs"


def proximal_and_behavior(
    config: AlgorithmConfig, sample: Sample, trainer_version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs [1, M] of the loss tokens under algorithm.proximal and the behavior policy.

    The proximal ones are taken at the start of the step. The sample has the `compared_stream`.
    """
    names = compared_stream(config), "behavior_logprobs"
    start_1M, behavior_1M = (torch.from_numpy(sample.in_loss(name))[None] for name in names)
    if config.proximal_policy == "interpolated":
        ages_1M = torch.from_numpy(staleness(sample.in_loss("versions"), trainer_version))[None]
        every_1M = torch.ones_like(start_1M, dtype=torch.bool)
        start_1M = interpolated_proximal(behavior_1M, start_1M, ages_1M, mask_BT=every_1M)
    return start_1M, behavior_1M


def mean_weight(config: AlgorithmConfig, samples: Sequence[Sample], trainer_version: int) -> float:
    """Return the mean importance weight, bounded as applied; 1 if no weight is above 0.

    The mean is over loss tokens, or over sequences in the modes with one weight per sequence (verl's
    rollout_is_batch_normalize). The samples have the `compared_stream`.
    """
    total, count = 0.0, 0
    for s in samples:
        if not s.mask.any():
            continue
        start_1M, behavior_1M = proximal_and_behavior(config, s, trainer_version)
        weights_1M = importance_weights(
            start_1M,
            behavior_1M,
            torch.ones_like(start_1M, dtype=torch.bool),
            mode=config.weight,  # pyright: ignore[reportArgumentType]
            cap=config.correction_cap,
            floor=config.correction_floor or None,
            versions_BT=torch.from_numpy(s.in_loss("versions").astype(np.int64))[None],
        )
        counted = weights_1M[:, :1] if config.weight in _BY_SEQUENCE else weights_1M
        total += float(counted.double().sum())
        count += counted.numel()
    return total / count if total > 1e-8 * count else 1.0


def high_entropy_stream(samples: Sequence[Sample], share: float) -> Stream:
    """Return 1 for the loss tokens of a minibatch in the `share` of highest entropy, else 0."""
    samples = [s for s in samples if s.mask.any()]
    if not samples:
        return {}
    entropy_1M = torch.from_numpy(np.concatenate([s.in_loss(ENTROPY) for s in samples]))[None]
    kept_M = high_entropy_mask(entropy_1M, torch.ones_like(entropy_1M, dtype=torch.bool), share=share)[0]
    parts = np.split(kept_M.numpy().astype(np.float32), np.cumsum([s.num_loss_tokens for s in samples])[:-1])
    return {s.rollout_id: part for s, part in zip(samples, parts, strict=True)}


def with_weights(
    config: AlgorithmConfig, minibatches: Sequence[list[Sample]], trainer_version: int
) -> tuple[list[list[Sample]], float]:
    """Return (the minibatches with the stream "weights", the mean importance weight).

    No stream is added if all weights are 1. The samples have the `compared_stream` with
    algorithm.correction_normalize, and STATISTICS with algorithm.top_entropy_share.
    """
    share, mean = config.top_entropy_share, 1.0
    if config.correction_normalize:
        mean = mean_weight(config, [s for part in minibatches for s in part], trainer_version)
    elif share == 1:
        return list(minibatches), mean
    out: list[list[Sample]] = []
    for part in minibatches:
        kept = high_entropy_stream(part, share) if share < 1 else {}
        ones = ((s, np.ones(s.num_loss_tokens, np.float32)) for s in part)
        out.append([s.with_loss_stream("weights", kept.get(s.rollout_id, one) / np.float32(mean)) for s, one in ones])
    return out, mean


def without_rejected(config: AlgorithmConfig, sample: Sample, trainer_version: int) -> Sample:
    """Return the sample without the tokens that algorithm.rejection rejects. It has the `compared_stream`."""
    start_1M, behavior_1M = proximal_and_behavior(config, sample, trainer_version)
    every_1M = torch.ones_like(start_1M, dtype=torch.bool)
    kept_1M = every_1M
    for name, bound in config.rejection.items():
        level, _, kind = name.rpartition("_")
        low, high = bound if isinstance(bound, list | tuple) else (None, bound)
        kept_1M = kept_1M & rejection_mask(
            start_1M,
            behavior_1M,
            every_1M,
            kind=kind,  # pyright: ignore[reportArgumentType]
            level=level,  # pyright: ignore[reportArgumentType]
            high=high,
            low=low,
        )
    mask = sample.mask.copy()
    mask[sample.mask] = kept_1M[0].numpy()
    return replace(sample, mask=mask)


def all_rejected_message(config: AlgorithmConfig, num_tokens: int) -> str:
    """Return why all tokens of a step were rejected, and what to change."""
    bounds = " and ".join(f"{name} = {json.dumps(bound)}" for name, bound in config.rejection.items())
    return (
        f"algorithm.rejection leaves out all its {num_tokens} tokens, as none is within {bounds}. Widen it, or lower"
        " rollout.max_staleness"
    )
