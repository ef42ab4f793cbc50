"""One `extend` under way: what it has got, over all requests that were made for it. No socket, no clock.

Owns its tokens, and decides when it stops: a server sees neither what came before its request nor what a turn is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from rollover.engine.protocol import ExtendRequest
from rollover.engine.remote.dialect import Span, version_of
from rollover.engine.stop import last_of, stop_reason
from rollover.types import Segment, StopReason


class ExtendState:
    """`decode_text` turns token ids into text, for stop strings. `end` is set when nothing more is wanted: `reason`
    says why, or it was interrupted."""

    def __init__(self, request: ExtendRequest, decode_text: Callable[[list[int]], str] | None) -> None:
        self.request, self._decode_text = request, decode_text
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.reason: StopReason | None = None
        self.interrupted = False
        self.end = asyncio.Event()
        self.num_surplus = 0
        """Tokens that came after its end, and were cut off."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be asked for: of its budget, and until it pauses."""
        most = self.request.max_new_tokens
        if 0 < self.request.pause_after < most:
            most = self.request.pause_after
        return most - len(self.tokens)

    @property
    def newest_version(self) -> int | None:
        """Of its tokens; None before the first. It never goes on under an older one."""
        return self.versions[-1] if self.versions else None

    def interrupt(self) -> None:
        self.interrupted = True
        self.end.set()

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """The next tokens, sampled under `version`. Those after its end are surplus. A greedy one had probability 1,
        whatever a server says: some give the log-prob under softmax(logits)."""
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
        """Forget the tokens from index `first` on."""
        del self.tokens[first:], self.logprobs[first:], self.versions[first:]
        self.reason = None
        if not self.interrupted:
            self.end.clear()

    def restamp(self, first: int, spans: Sequence[Span], run: str) -> bool:
        """What its server says of the tokens from index `first` on, which one request gave: its word counts.

        Returns whether it differs from what they were stamped with. What it sampled under other weights than this run's
        (it was started again, or is another's) is cut off, with all that came after.
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
        """Return the tokens so far, from which the rollout can be continued.

        After its end they lack the last token. A rollout that is continued from them samples that token again, and
        stops again; continued from all of them, it would go on after its end.
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
