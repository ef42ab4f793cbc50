"""Requests under way, and those whose client went away: a client's retry joins what it has asked already.

    ask ──▶ under way ──answered──▶ delivered                        (forgotten)
                 └──connection gone──▶ orphan ──equal retry──▶ under way again

A client that waits too long closes its connection and asks again. What was sampled for it meanwhile is the answer to
its retry: were it asked anew, tokens would be sampled twice, and one of the two turns would belong to nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from rollover.workflows.calls import Reply

Answering = asyncio.Future[list[Reply]]
_LOOK_S, _MOST_LOOKS = 0.02, 50  # a retry may come before the end of the connection that it replaces is seen


@dataclass(eq=False)
class Question:
    """One request. `answering` goes on when its client has gone."""

    identity: Hashable
    answering: Answering
    orphan: bool = field(default=False)


class Questions:
    """Of one gateway. `identity` is equal for equal requests: the key, the path and the body."""

    def __init__(self) -> None:
        self._open: dict[Hashable, list[Question]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    async def ask(self, identity: Hashable, is_retry: bool, answer: Callable[[], Awaitable[list[Reply]]]) -> Question:
        """The question that a retry joins, or a new one, to which `answer` gives the answer."""
        for _ in range(_MOST_LOOKS if is_retry else 0):
            equal = self._open.get(identity, [])
            if orphan := next((question for question in equal if question.orphan), None):
                orphan.orphan = False
                return orphan
            if not equal:
                break
            await asyncio.sleep(_LOOK_S)
        question = Question(identity, asyncio.ensure_future(answer()))
        question.answering.add_done_callback(_seen)
        self._open.setdefault(identity, []).append(question)
        return question

    def on_gone(self, question: Question) -> None:
        """Its client went away before it had the answer."""
        question.orphan = True

    def on_delivered(self, question: Question) -> None:
        """Its client has the answer."""
        equal = self._open.get(question.identity, [])
        if question in equal:  # else it was forgotten
            equal.remove(question)
        if not equal:
            self._open.pop(question.identity, None)

    def forget(self, of: Callable[[Hashable], bool]) -> list[Reply]:
        """Cancel those whose identity `of` picks: nobody will ask for them again. Returns the answers that were there
        and reached no client."""
        replies: list[Reply] = []
        for identity in [identity for identity in self._open if of(identity)]:
            for question in self._open.pop(identity):
                if not question.answering.cancel() and question.orphan and question.answering.exception() is None:
                    replies += question.answering.result()
        return replies


def _seen(answering: Answering) -> None:
    """Its client may be gone, and asyncio need not complain about an error then."""
    _ = answering.cancelled() or answering.exception()
