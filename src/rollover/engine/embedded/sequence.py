"""One rollout being continued: its tokens, its open segment, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollover.engine.embedded.kv_cache import RowOwner
from rollover.engine.embedded.processors import Processor
from rollover.engine.protocol import ExtendRequest
from rollover.engine.stop import stop_reason
from rollover.models.vision import NO_IMAGES, ImagePlaces
from rollover.types import Prompt, Segment, StopReason

# Told of each token as it is sampled: the token, its log-prob, and why the sequence stops with it (None: it goes on).
OnToken = Callable[[int, float, StopReason | None], None]


@dataclass(eq=False, slots=True)
class Sequence(RowOwner):
    """`tokens` = prompt + generated before + new. KV of tokens[:kv_len] is cached; the last token never is: it is the
    next decode step's input, so the logits of every sampled token come from one code path."""

    request: ExtendRequest
    future: asyncio.Future[list[Segment]] | None
    tokens: list[int]
    prompt_kv_version: int = -1
    computed: int = 0
    """What is prefilled of tokens[:computed] had been computed before."""
    segments: list[Segment] = field(default_factory=list)
    open_logprobs: list[float] = field(default_factory=list)
    on_token: OnToken | None = None
    cache_salt: str = ""
    """It shares the KV of its prompt with those of the same salt alone."""
    processor: Processor | None = None
    """None: its logits are taken as they are."""
    images: ImagePlaces = NO_IMAGES

    @classmethod
    def start(
        cls, request: ExtendRequest, future: asyncio.Future[list[Segment]], computed: int | None = None
    ) -> Sequence:
        """`computed`: how many of its tokens were computed here before; None: that is not known, and all of one that
        goes on were, by whoever generated them."""
        tokens = [*request.prompt.ids, *request.generated_ids]
        if computed is None:
            computed = len(tokens) if request.generated_ids else 0
        return cls(request, future, tokens, computed=computed)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def prompt_key(self) -> tuple[str, Prompt]:
        """Equal for those that may share the KV of their prompts."""
        return self.cache_salt, self.request.prompt

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt - len(self.request.generated_ids)

    @property
    def next_index(self) -> int:
        """Absolute index, in the generated part, of the token to be sampled next."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefilled(self) -> bool:
        return self.kv_len == len(self.tokens) - 1

    def continues(self, request: ExtendRequest) -> bool:
        """Whether the cached KV of this kept sequence is a prefix of what `request` asks for, without its last token.

        More than what it has may be asked for: an environment wrote something after its turn.
        """
        asked = [*request.prompt.ids, *request.generated_ids]
        return (
            self.request.prompt == request.prompt
            and self.request.later_media == request.later_media[: len(self.request.later_media)]
            and self.kv_len < len(asked)
            and self.tokens[: self.kv_len] == asked[: self.kv_len]
        )

    def resume(self, request: ExtendRequest, future: asyncio.Future[list[Segment]]) -> None:
        self.request, self.future = request, future
        self.tokens = [*request.prompt.ids, *request.generated_ids]
        self.segments, self.open_logprobs = [], []

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.open_logprobs.append(logprob)

    def stop_reason(self, decode_text: Callable[[list[int]], str] | None) -> StopReason | None:
        """Why it stops with the token that was sampled last; None: it goes on."""
        tokens = self.tokens
        return stop_reason(self.request, self.num_new, lambda num: tokens[len(tokens) - num :], decode_text)

    def keeps_kv(self, reason: StopReason) -> bool:
        """Whether what is cached is of use after it ended for this reason."""
        return reason is StopReason.PAUSED or (self.request.may_go_on and reason is not StopReason.LENGTH)

    def open_segment(self, version: int, reason: StopReason) -> Segment:
        """The tokens sampled since the last cut, as a Segment of `version`."""
        num = len(self.open_logprobs)
        return Segment(
            token_ids=np.asarray(self.tokens[len(self.tokens) - num :], dtype=np.int32),
            logprobs=np.asarray(self.open_logprobs, dtype=np.float32),
            policy_version=version,
            sampling=self.request.sampling,
            stop_reason=reason,
            start=self.next_index - num,
        )

    def cut(self, version: int, reason: StopReason) -> None:
        """Close the open segment. An empty one is kept only where it is the answer to an interruption."""
        if self.open_logprobs or (reason is not StopReason.PAUSED) or not self.segments:
            self.segments.append(self.open_segment(version, reason))
        self.open_logprobs = []

    def resolve(self, version: int, reason: StopReason) -> None:
        """End its `extend`, which gets its segments."""
        self.cut(version, reason)
        if self.future is not None and not self.future.done():
            self.future.set_result(self.segments)
        self.future = None

    def cut_at_update(self, version: int) -> None:
        """New weights: what was sampled so far belongs to `version`."""
        if self.open_logprobs:
            self.cut(version, StopReason.PAUSED)
