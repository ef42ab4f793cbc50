"""Whether what an engine, or a service behind one, answers can be part of a run. No engine and no rollout.

    a service's tokens ──usable──▶ engine ──why_no_segments (a custom one)──▶ Asker ──why_no_continuation──▶ rollout

Owns what is refused, and the words for it. Segment.why_not_sampled looks at the log-probs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from rollover.functions import described, shortened
from rollover.openai_wire import NO_LOGPROB
from rollover.types import Segment, StopReason, why_not_in_vocabulary

_MOST_ROUNDING = 1e-3  # services compute log-probs by log_softmax in float32, which rounds by less


def usable(token_ids: Sequence[int], logprobs: Sequence[float], vocab_size: int | None) -> tuple[list[float], str]:
    """Return the log-probs, without rounding above 0, of the tokens before the first invalid one, and why that is none.

    "": all are valid. Taken for 0, a logit or a probability above 0 would become an importance weight of the size of
    1 / probability.
    """
    found: list[float] = []
    for token, value in zip(token_ids, logprobs, strict=True):
        if not NO_LOGPROB < value <= _MOST_ROUNDING:  # NaN, too
            return found, f"gave token {token} the invalid log-prob {value:g} (they are finite, and at most 0)"
        if vocab_size is not None and token >= vocab_size:
            return found, f"gave token {token}, and the model has {vocab_size}"
        found.append(min(0.0, value))
    return found, ""


def are_segments(answer: object) -> TypeGuard[Sequence[Segment]]:
    return isinstance(answer, list | tuple) and all(isinstance(segment, Segment) for segment in answer)


def why_no_segments(answer: object, vocab_size: Callable[[], int], newest_version: float) -> str | None:
    """Why no policy of a run whose newest version is `newest_version` can have sampled this; None: it can.

    `vocab_size()`: every token id is below it.
    """
    if not are_segments(answer):
        return f"it is {described(answer)}, and no list of Segment"
    return next(filter(None, (_why_none(segment, vocab_size, newest_version) for segment in answer)), None)


def _why_none(segment: Segment, vocab_size: Callable[[], int], newest_version: float) -> str | None:
    ids, version, start = segment.token_ids, segment.policy_version, segment.start
    if ids.dtype.kind not in "iu":
        return f"its token ids are {ids.dtype}, not integers"
    if segment.logprobs.dtype.kind != "f":
        return f"its log-probs are {segment.logprobs.dtype}, not floating-point numbers"
    if not isinstance(segment.stop_reason, StopReason):
        return f"its stop_reason is {described(segment.stop_reason)}, and no StopReason"
    # What the journal writes as JSON: NumPy's integers are none.
    if not isinstance(version, int):
        return f"its policy_version is {shortened(version)}, and no int"
    if not isinstance(start, int | None):
        return f"its start is {shortened(start)}, and no int"
    if len(segment) and version > newest_version:
        return f"it has tokens of policy version {version}, and the newest weights that it got are of {newest_version}"
    return why_not_in_vocabulary(ids, vocab_size()) if len(segment) else None


def why_no_continuation(
    segments: Sequence[Segment], num_tokens: int, remaining: int, oldest_version: int = 0
) -> str | None:
    """Why `segments` cannot come next for a rollout that has `num_tokens` and may get `remaining` more; None: they can.

    The segments must begin where the rollout ends (if the engine stamps where they begin), so that no token comes twice
    and none is missing, and stay within its budget. Their versions must not fall, nor be below `oldest_version`: the
    engine has named that as its oldest, and the staleness bound rests on it. Only the last segment may end otherwise
    than PAUSED. Every log-prob must be one that a policy can give (Segment.why_not_sampled).
    """
    if not segments:
        return "it has no segment"
    next_token, num_new = num_tokens, 0
    for segment in segments:
        if segment.start not in (None, next_token):
            return f"it begins with token {segment.start}, and token {next_token} comes next"
        num_new += segment.num_tokens
        next_token += segment.num_tokens
    if num_new > remaining:
        return f"it has {num_new} tokens, and the rollout may get {remaining}"
    reasons = [segment.stop_reason for segment in segments]
    if any(reason is not StopReason.PAUSED for reason in reasons[:-1]):
        return "it goes on after the rollout has stopped"
    if reasons[-1] is StopReason.PAUSED and num_new == remaining:
        return "it is paused, with nothing left to generate"
    versions = [segment.policy_version for segment in segments if segment.num_tokens]
    if versions != sorted(versions):
        return f"its policy versions go back: {versions}"
    if versions and versions[0] < oldest_version:
        return f"it has tokens of policy version {versions[0]}, and the engine had said: none below {oldest_version}"
    return next(filter(None, (segment.why_not_sampled() for segment in segments)), None)
