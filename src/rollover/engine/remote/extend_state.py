"""State of one `extend` over all its requests to servers: its tokens and versions, and when it stops. Pure.

The stop condition is checked here: a server sees neither the tokens before its request nor the turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from rollover.engine.protocol import ExtendRequest, last_of, stop_reason
from rollover.engine.remote.dialect import Span, version_of
from rollover.types import Segment, StopReason


class ExtendState:
    """Tokens, log-probs and versions of one `extend`.

    `decode_text`: token ids -> text, for stop strings. `end` is set when it has a stop `reason` or was interrupted.
    """

    def __init__(self, request: ExtendRequest, decode_text: Callable[[list[int]], str] | None) -> None:
        self.request, self._decode_text = request, decode_text
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.reason: StopReason | None = None
        self.interrupted = False
        self.end = asyncio.Event()
        self.num_surplus = 0
        """Tokens received after its end, and dropped."""

    @property
    def remaining(self) -> int:
        """Return the tokens left until its budget or `pause_after`."""
        most = self.request.max_new_tokens
        if 0 < self.request.pause_after < most:
            most = self.request.pause_after
        return most - len(self.tokens)

    @property
    def newest_version(self) -> int | None:
        """Return the version of its last token; None before the first. It never continues under an older one."""
        return self.versions[-1] if self.versions else None

    def interrupt(self) -> None:
        self.interrupted = True
        self.end.set()

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Add tokens sampled under `version`; those after its end are surplus.

        Greedy tokens get log-prob 0: some servers report the log-prob under softmax(logits).
        """
        greedy = self.request.sampling.temperature == 0
        for num, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            if self.reason is not None:
                self.num_surplus += len(token_ids) - num
                return
            self.tokens.append(token)
            self.logprobs.append(0.0 if greedy else logprob)
            self.versions.append(version)
            self.reason = stop_reason(
                self.request, len(self.tokens), last_of(self.request, self.tokens), self._decode_text
            )
            if self.reason is not None:
                self.end.set()

    def truncate(self, first: int) -> None:
        """Drop the tokens from index `first` on."""
        del self.tokens[first:], self.logprobs[first:], self.versions[first:]
        self.reason = None
        if not self.interrupted:
            self.end.clear()

    def restamp(self, first: int, spans: Sequence[Span], run: str) -> bool:
        """Set the versions of the tokens from index `first` on to those that their server reports.

        Returns whether they differed. Tokens sampled under weights of another run (or after a restart of the server)
        are dropped, with all later ones.
        """
        differs = False
        for span in spans:
            version = version_of(span.label, run)
            at = range(first + span.start, min(first + span.end, len(self.tokens)))
            if version is None:
                if not at:
                    continue
                self.truncate(at.start)
                return True
            for i in at:
                differs = differs or self.versions[i] != version
                self.versions[i] = version
        return differs

    def progress(self) -> list[Segment]:
        """Return the tokens so far, from which the rollout can be resumed.

        After its end the last token is left out: a rollout resumed from all tokens would continue after its end,
        without the last one it samples that token again, and stops.
        """
        return self.segments(StopReason.PAUSED, len(self.tokens) - (self.reason is not None))

    def segments(self, reason: StopReason, num_tokens: int | None = None) -> list[Segment]:
        """Return the first `num_tokens` tokens (None: all), one segment per policy version, the last with `reason`.

        One empty segment if there is no token.
        """
        num_tokens = len(self.tokens) if num_tokens is None else num_tokens
        if not num_tokens:
            return self.request.nothing()
        out: list[Segment] = []
        for version, same in groupby(range(num_tokens), key=self.versions.__getitem__):
            at = list(same)
            part = slice(at[0], at[-1] + 1)
            out.append(
                Segment(
                    np.array(self.tokens[part], dtype=np.int32),
                    np.array(self.logprobs[part], dtype=np.float32),
                    version,
                    self.request.sampling,
                    reason if part.stop == num_tokens else StopReason.PAUSED,
                    start=len(self.request.generated_ids) + part.start,
                )
            )
        return out
