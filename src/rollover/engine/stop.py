"""When a rollout stops: one rule for all engines. Pure; no torch.

Stop strings and repetition are searched in the present turn, over earlier and new tokens: "ab" is found if "a" was
sampled before an interruption, but never in an environment's text.
Kimi k1.5 (arXiv 2501.12599, section 2.6.2) stops generations that repeat themselves, as they would run to the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollover.engine.protocol import ExtendRequest
from rollover.types import StopReason

CHECK_EVERY = 16  # tokens; at indices of the turn, so that interruptions change nothing
MIN_REPEATS = 4
_TOKENS_PER_CHARACTER = 4
_MARGIN = 8


def stop_reason(
    request: ExtendRequest,
    num_new: int,
    last: Callable[[int], Sequence[int]],
    decode_text: Callable[[list[int]], str] | None,
) -> StopReason | None:
    """Return why `request` ends with the last of its `num_new` new tokens (at least one); None: it continues.

    `last(n)`: the last n tokens, `request.generated_ids` included; n is at most the length of the turn.
    `decode_text`: token ids -> text. Raises ValueError for stop strings without it.
    """
    stop = request.stop
    if last(1)[0] in stop.token_ids:
        return StopReason.EOS
    turn_length = len(request.generated_ids) + num_new - request.text_start
    if stop.strings:
        if decode_text is None:
            raise ValueError("stop strings need the engine's decode_text")
        # A character takes at most four tokens, so this tail holds any stop string that just ended.
        longest = max(map(len, stop.strings)) * _TOKENS_PER_CHARACTER + _MARGIN
        text = decode_text(list(last(max(0, min(longest, turn_length)))))
        if any(string in text for string in stop.strings):
            return StopReason.STOP_STRING
    if num_new >= request.max_new_tokens:
        return StopReason.LENGTH
    window = stop.repetition_tokens
    if window and turn_length >= window and turn_length % CHECK_EVERY == 0 and repeats_itself(last(window)):
        return StopReason.REPETITION
    return StopReason.PAUSED if num_new == request.pause_after else None


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Return the text up to the first stop string in it."""
    ends = [end for stop in stop_strings if (end := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def last_of(request: ExtendRequest, new_tokens: Sequence[int]) -> Callable[[int], Sequence[int]]:
    """Return the `last` argument of `stop_reason` for a request and its new tokens."""

    def last(num: int) -> Sequence[int]:
        new = new_tokens[max(0, len(new_tokens) - num) :]
        before = num - len(new)
        return [*request.generated_ids[len(request.generated_ids) - before :], *new] if before > 0 else new

    return last


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Return whether the tokens are one pattern, repeated at least MIN_REPEATS times."""
    return smallest_period(tokens) * MIN_REPEATS <= len(tokens)


def smallest_period(tokens: Sequence[int]) -> int:
    """Return the smallest p with tokens[i] == tokens[i - p] for all i >= p (Knuth-Morris-Pratt failure function)."""
    borders = [0] * len(tokens)
    length = 0
    for i in range(1, len(tokens)):
        while length and tokens[i] != tokens[length]:
            length = borders[length - 1]
        if tokens[i] == tokens[length]:
            length += 1
        borders[i] = length
    return len(tokens) - borders[-1] if borders else 0
