"""Images that clients send: stored, and checked before the engine sees them, where one that is wrong would fail all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollover.engine.server.requests import ImagePart
from rollover.openai_wire import Refusal
from rollover.types import Media

if TYPE_CHECKING:
    from rollover.models.vision import Pixels

_MOST_KNOWN = 10_000


class CheckedImages:
    """The images of requests. `processor`: of the model; None: it takes text alone."""

    def __init__(self, processor: Pixels | None) -> None:
        self._processor = processor
        self._storing = asyncio.Lock()
        self._known: dict[Media, None] = {}  # in order, offset apart

    async def of(self, parts: Sequence[ImagePart]) -> tuple[Media, ...]:
        """The media of these parts. Refusal of what is no image, or not the one that the client made the prompt of."""
        if self._processor is None:
            raise Refusal("content_parts: this model takes text alone", "content_parts")
        try:
            async with self._storing:  # siblings bring the same image at once
                media = await asyncio.to_thread(lambda: tuple(part.stored() for part in parts))
            for image in media:
                self._check(self._processor, image)
        except ValueError as error:
            raise Refusal(f"content_parts: {error}", "content_parts") from error
        return media

    def _check(self, processor: Pixels, image: Media) -> None:
        """In the event loop, as the engine: processors are not made for several threads."""
        if (key := replace(image, offset=0)) in self._known:
            return
        processor.pixels(image)
        self._known[key] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.pop(next(iter(self._known)))
