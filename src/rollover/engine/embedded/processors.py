"""What is done to a sequence's logits before a token is drawn: types.LogitsProcessing, carried out.

A processor knows the tokens of one `extend` from its first prompt token on, so that an answer that was interrupted goes
on as if it had not been. Shapes: V vocabulary, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from rollover.config.logits import LogitsProcessing
from rollover.engine.embedded.structures import Structures
from rollover.engine.protocol import ExtendRequest

_NOTHING = LogitsProcessing()


class Processor:
    """Of one `extend`. `structures`: needed where the answer has one. ValueError for what cannot be done."""

    def __init__(self, request: ExtendRequest, vocab_size: int, structures: Structures | None) -> None:
        self._asked = request.processing
        self._check(request, vocab_size)
        self._answer_start = len(request.prompt) + request.text_start
        self._stop_ids = torch.tensor(sorted(t for t in request.stop_token_ids if t < vocab_size), dtype=torch.long)
        self._bias_V = _bias(self._asked, vocab_size)
        self._seen_V = torch.zeros(vocab_size, dtype=torch.bool)
        self._times_V = torch.zeros(vocab_size)
        self._num_read = 0
        self._matcher = None
        if self._asked.structured:
            if structures is None:
                raise ValueError("rollout.logits: a structure needs the engine's tokenizer")
            self._matcher = structures.matcher(self._asked, vocab_size)
        self._read([*request.prompt.ids, *request.generated_ids])

    def apply(self, logits_V: torch.Tensor, tokens: Seq[int]) -> None:
        """Change the logits of the token that comes after `tokens` (the prompt's and all generated), in place."""
        self._read(tokens)
        asked, num_answer = self._asked, len(tokens) - self._answer_start
        out_V = logits_V.float().cpu()
        if self._bias_V is not None:
            out_V = out_V + self._bias_V
        if asked.repetition_penalty != 1:
            repeated_V = torch.where(out_V > 0, out_V / asked.repetition_penalty, out_V * asked.repetition_penalty)
            out_V = torch.where(self._seen_V, repeated_V, out_V)
        if asked.presence_penalty or asked.frequency_penalty:
            out_V = out_V - asked.presence_penalty * (self._times_V > 0) - asked.frequency_penalty * self._times_V
        if num_answer < len(asked.forced_token_ids):
            out_V = _only(out_V, torch.tensor([asked.forced_token_ids[num_answer]]))
        elif num_answer < asked.min_new_tokens:
            out_V = out_V.index_fill(0, self._stop_ids, float("-inf"))
        if self._matcher is not None:
            allowed_V = self._matcher.allowed()
            may_stop = self._matcher.complete and num_answer >= asked.min_new_tokens
            allowed_V[self._stop_ids] = may_stop or not bool((allowed_V & (out_V > float("-inf"))).any())
            out_V = out_V.masked_fill(~allowed_V, float("-inf"))
        if not bool((out_V > float("-inf")).any()) and len(self._stop_ids):  # what may come is banned: it ends
            out_V = _only(logits_V.float().cpu(), self._stop_ids)
        logits_V.copy_(out_V)

    def _check(self, request: ExtendRequest, vocab_size: int) -> None:
        asked = self._asked
        ids = (*asked.forced_token_ids, *(token for token, _ in asked.logit_bias))
        if ids and max(ids) >= vocab_size:
            raise ValueError(f"rollout.logits names the token {max(ids)}, and the model has {vocab_size} tokens")
        if asked.structured and not request.stop_token_ids:
            raise ValueError("rollout.logits: an answer with a structure has to end by a stop token, and there is none")

    def _read(self, tokens: Seq[int]) -> None:
        new = list(tokens[self._num_read :])
        if not new:
            return
        self._seen_V[new] = True
        answer = new[max(0, self._answer_start - self._num_read) :]
        self._num_read = len(tokens)
        if answer:
            self._times_V += torch.bincount(torch.tensor(answer), minlength=len(self._times_V))
            if self._matcher is not None:
                self._matcher.read(answer)


def _bias(asked: LogitsProcessing, vocab_size: int) -> torch.Tensor | None:
    """[V]; None: nothing is added."""
    if not asked.logit_bias:
        return None
    bias_V = torch.zeros(vocab_size)
    tokens, values = zip(*asked.logit_bias, strict=True)
    bias_V[list(tokens)] = torch.tensor(values, dtype=torch.float32)
    return bias_V


def _only(logits_V: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Without all others."""
    out_V = torch.full_like(logits_V, float("-inf"))
    out_V[tokens] = logits_V[tokens]
    return out_V


def processor_of(request: ExtendRequest, vocab_size: int, structures: Structures | None) -> Processor | None:
    """None: its logits are taken as they are. ValueError as of `Processor`."""
    return None if request.processing == _NOTHING else Processor(request, vocab_size, structures)


def process(logits_BV: torch.Tensor, processors: Seq[Processor | None], tokens: Seq[Seq[int]]) -> None:
    """Change each row that has a processor, in place. `tokens`: all so far, of each row."""
    for row, processor in enumerate(processors):
        if processor is not None:
            processor.apply(logits_BV[row], tokens[row])
