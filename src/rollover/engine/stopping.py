"""Why a rollout stops with its last token, where the caller of a service decides it. Pure; no torch.

A service knows neither what came before its call nor what a turn is, so stop strings and repetition are looked for
here, over earlier and new tokens: "ab" is found where "a" was sampled before an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollover.engine.protocol import ExtendRequest
from rollover.engine.repetition import CHECK_EVERY, repeats_itself
from rollover.types import StopReason

_TOKENS_PER_CHARACTER = 4
_MARGIN = 8


def stop_reason(
    request: ExtendRequest, new_tokens: Sequence[int], decode_text: Callable[[list[int]], str] | None
) -> StopReason | None:
    """Why `request` ends with the last of `new_tokens`, which it has at least one of; None: it goes on.

    ValueError for stop strings without `decode_text`, which turns token ids into text.
    """
    if new_tokens[-1] in request.stop_token_ids:
        return StopReason.EOS
    if request.stop_strings:
        if decode_text is None:
            raise ValueError("stop strings need the engine's decode_text")
        # A character takes at most four tokens, so this tail holds any stop string that just ended.
        longest = max(map(len, request.stop_strings)) * _TOKENS_PER_CHARACTER + _MARGIN
        text = decode_text(_of_the_turn(request, new_tokens, longest))
        if any(stop in text for stop in request.stop_strings):
            return StopReason.STOP_STRING
    if len(new_tokens) >= request.max_new_tokens:
        return StopReason.LENGTH
    window = request.stop_repetition_tokens
    if window:
        num = len(request.generated_ids) + len(new_tokens) - request.text_start
        if num % CHECK_EVERY == 0 and repeats_itself(_of_the_turn(request, new_tokens, num), window):
            return StopReason.REPETITION
    return StopReason.PAUSED if len(new_tokens) == request.pause_after else None


def _of_the_turn(request: ExtendRequest, new_tokens: Sequence[int], most: int) -> list[int]:
    """The last tokens of the present turn, at most so many."""
    of_turn = max(0, len(request.generated_ids) + len(new_tokens) - request.text_start)
    num = min(most, of_turn)
    new = list(new_tokens[max(0, len(new_tokens) - num) :]) if num else []
    before = num - len(new)
    return [*(request.generated_ids[len(request.generated_ids) - before :] if before > 0 else ()), *new]
