"""The text of an answer: the one place that decodes for rewards, records, evaluations, workflows and `sample`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollover.envs.chat import Chat

Decode = Callable[[Sequence[int]], str]


def answer_decoder(tokenizer: Any, keep_special_tokens: bool) -> Decode:
    """Return the function from an answer's token ids to its text.

    The text has no special tokens; with `keep_special_tokens` (rollout.keep_special_tokens) it has all but EOS, padding
    and the token that ends a turn in the chat template.
    """
    if not keep_special_tokens:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
    dropped = {tokenizer.eos_token_id, tokenizer.pad_token_id, _end_of_turn(tokenizer)}
    return lambda ids: tokenizer.decode([id for id in ids if id not in dropped], skip_special_tokens=False)


def _end_of_turn(tokenizer: Any) -> int | None:
    try:
        return Chat(tokenizer).end_of_turn
    except ValueError:  # no chat template, or one without such a token
        return None
