"""Calls with so much text that to tokenise it takes long: their place is found in a thread, beside the event loop.
Images of calls are stored in threads, too.

Owns that thread and a tokenizer for it, as one may not be used by two threads at once. How much text can be refused
without a look is here, too.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

from rollover.images import MOST_PIXELS, BadImage, num_pixels
from rollover.tasks.image_parts import Store, with_images
from rollover.types import images_in
from rollover.workflows.calls import BudgetUsedUp, Call, CallRefused, NotSupported
from rollover.workflows.conversations import Chats, Continues, Conversations, Opens

LARGE = 50_000
"""Characters, which take some hundredths of a second."""


class LargeCalls:
    """Of one run, whose calls are tokenised by `chats`. `most_tokens`: a Rollout has no more, prompt included."""

    def __init__(self, chats: Chats, most_tokens: int) -> None:
        self.chats, self.most_tokens = chats, most_tokens

    async def place_of(self, call: Call, conversations: Conversations) -> Continues | Opens:
        """As Conversations.place_of; nobody else may ask for a place meanwhile. A call that is not large is placed
        before anything else happens. BudgetUsedUp for one that has more text than tokens could hold."""
        try:
            num = num_characters(call)
        except RecursionError:
            raise CallRefused("the call is nested too deeply", "messages") from None
        longest = 1 if isinstance(call.prompt, tuple) else self._longest_token
        if max(num / longest, len(call.messages or ())) > self.most_tokens:
            raise BudgetUsedUp(
                f"the call has {num:,} {'tokens' if isinstance(call.prompt, tuple) else 'characters'} in"
                f" {len(call.messages or ())} messages, which do not fit into the {self.most_tokens:,} tokens of"
                " prompt and answers"
            )
        if num <= LARGE or call.shows_images:  # the model's processor is not made for several threads
            return conversations.place_of(call)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: conversations.place_of(call, self._chats_there))

    # Private

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: no text of N tokens has more than N times as many."""
        return max(map(len, self.chats.tokenizer.get_vocab()))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "large calls")

    @cached_property
    def _chats_there(self) -> Chats:
        """Made in the thread, and used there alone."""
        chats = self.chats
        return Chats(copy.deepcopy(chats.tokenizer), chats.tool_format, chats.vocab_size, processor=chats.processor)


async def with_stored_images(call: Call, store: Store) -> Call:
    """Return the call with each image stored by `store`. NotSupported for an image that cannot be used, and for more
    than MOST_PIXELS in all: a small file may hold a large image, and all are decoded at once."""
    if not call.shows_images:
        return call

    def stored() -> tuple[dict[str, Any], ...]:
        messages = with_images(call.messages or (), None, "", store)
        if (num := sum(map(num_pixels, images_in(messages)))) > MOST_PIXELS:
            raise BadImage(f"the images of the call have {num:,} pixels in all, and {MOST_PIXELS:,} are the most")
        return messages

    try:
        return replace(call, messages=await asyncio.to_thread(stored))
    except BadImage as error:
        raise NotSupported(str(error), "messages") from error


def num_characters(call: Call) -> int:
    """Of all that a call says; of a prompt of token ids their number."""
    return len(call.prompt or ()) + _num_in(call.messages or ()) + _num_in(call.tools)


def _num_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_in(key) + _num_in(inner) for key, inner in value.items())
    return sum(map(_num_in, value)) if isinstance(value, list | tuple) else 0
