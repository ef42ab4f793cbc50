"""Differences between kinds of servers: requests, events and weights.

    RemoteEngine ──GenerateRequest──▶ ServerDialect ──path, JSON──▶ ServerClient ──HTTP──▶ server
                 ◀──────Chunk─────────              ◀─JSON, events──

Each kind of server is a subclass, which engine.dialect names: "vllm" (vllm.py), "module:Class", or an entry point of
the group `rollover.dialects`. Every server streams token ids with log-probs, and reports the label of its weights.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.config import Config
from rollover.config.train import DIALECTS
from rollover.engine.protocol import ExtendRequest
from rollover.engine.remote.client import ServerClient, ServerFailed
from rollover.functions import make_named
from rollover.types import Media

_MOST_TOKEN = 2**31  # a Segment has 32 bits for each


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for at most `max_tokens` (>= 1) after `token_ids`: the prompt of `extend` and all generated tokens.

    It ends only at `extend.stop.token_ids`. The server may not use KV cached under another `cache_salt`, nor images
    encoded under another `image_salt`. `images`: of `encode_images`.
    """

    request_id: str
    """Unique among all requests."""
    extend: ExtendRequest
    token_ids: Sequence[int]
    max_tokens: int
    cache_salt: str | None = None
    images: Sequence[Any] = ()
    image_salt: str | None = None

    @property
    def num_generated(self) -> int:
        """Return the number of tokens after the prompt."""
        return len(self.token_ids) - len(self.extend.prompt)

    @property
    def seed(self) -> int:
        """Return 63 bits, different for each number of generated tokens: each request restarts the draws."""
        digest = hashlib.blake2b(f"{self.extend.seed}/{self.num_generated}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a request were sampled by the weights with this label."""

    label: str
    start: int
    end: int

    def __post_init__(self) -> None:
        _check_whole(self.start, self.end)


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """The prompt as a server computes it.

    `token_ids`: with expanded placeholders. `images`: [start, end) of each image's tokens, in order.
    """

    token_ids: tuple[int, ...]
    images: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_whole(*self.token_ids, *(number for ends in self.images for number in ends))


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one event of a stream. The last one has a `finish_reason`. Raises ValueError for invalid values.

    `spans`: weights of all tokens of the request, with the last ones; None if the server does not report them.
    `cached_tokens`: tokens of the request that were cached; in one event. `shown`: with the first tokens, if there are
    images.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    spans: tuple[Span, ...] | None = None
    cached_tokens: int | None = None
    shown: ShownPrompt | None = None

    def __post_init__(self) -> None:
        _check_whole(*self.token_ids, self.cached_tokens or 0)
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(self.logprobs)} log-probs")
        for value in self.logprobs:
            if type(value) not in (int, float):  # true is an int to Python
                raise ValueError(f"{value!r} is no number")


class ServerDialect(ABC):
    """Protocol of one kind of server. It holds no state of a server.

    All methods except `encode_images` run on an event loop. They raise ServerRefused if the server refuses and is
    unchanged, ServerFailed if it fails or does not answer within `limit_s`.
    """

    takes_images = False
    """Prompts may contain images, and the first chunk reports where the server put them."""
    processes_logits = False
    """The server applies `extend.processing`, with all values that config/logits.py permits."""
    keeps_requests = False
    """`pause` pauses requests, and `resume` continues them. Otherwise they are aborted before a weight update, and sent
    again."""
    first_label = "default"
    """Label of the weights that a server was started with."""

    def __init__(self, config: Config) -> None:
        self.config = config

    # Tokens

    def encode_images(self, media: Sequence[Media]) -> Sequence[Any]:
        """Return images encoded for requests. Runs in a thread. Raises ValueError for an image that has changed."""
        raise NotImplementedError

    @abstractmethod
    def generate(self, client: ServerClient, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield tokens as they arrive. Leaving it early closes the connection.

        Raises ValueError for a request that no server accepts, EngineDied for images if the servers take none.
        """
        ...

    @abstractmethod
    async def abort(self, client: ServerClient, request_id: str, limit_s: float) -> None:
        """Abort a request: its stream ends with a `finish_reason`. It may be unknown, or have ended."""
        ...

    # State

    @abstractmethod
    async def check(self, client: ServerClient, limit_s: float) -> None:
        """Raise ServerFailed, with how to start it, if the server lacks a feature that a run needs. Changes nothing."""
        ...

    @abstractmethod
    async def longest_rollout(self, client: ServerClient, limit_s: float) -> int | None:
        """Return the maximum number of tokens, prompt included; None if the server does not report it."""
        ...

    @abstractmethod
    async def weights_label(self, client: ServerClient, limit_s: float) -> str:
        """Return the label of the server's weights. Must not succeed if the engine behind the server hangs."""
        ...

    # Weights

    async def verify_weights(  # noqa: B027 - optional
        self, client: ServerClient, weights: Mapping[str, Any], limit_s: float
    ) -> None:
        """Verify the file ahead, while the server generates; optional. Raises ServerRefused for an unusable file."""

    async def pause(self, client: ServerClient, *, clear_cache: bool, limit_s: float) -> None:  # noqa: B027 - optional
        """Pause sampling; optional. `clear_cache`: drop the KV of the current weights."""

    @abstractmethod
    async def load_weights(
        self, client: ServerClient, weights: Mapping[str, Any], label: str, *, clear_cache: bool, limit_s: float
    ) -> None:
        """Load the file `weights["path"]` (safetensors, SHA-256 `weights["sha256"]`) under `label`, while paused.

        `clear_cache`: as for `pause`.
        """
        ...

    async def resume(self, client: ServerClient, limit_s: float) -> None:  # noqa: B027 - optional
        """Resume the paused requests."""

    async def sleep(self, client: ServerClient, limit_s: float) -> None:
        """Free the GPU, weights included (a weight update follows). No request runs."""
        raise ServerFailed("servers of its kind cannot free their GPUs")

    async def wake(self, client: ServerClient, tags: str, limit_s: float) -> None:
        """Allocate memory for `tags` again: "weights", before `load_weights`, or "kv_cache", after it."""
        raise ServerFailed("servers of its kind cannot free their GPUs")


def make_dialect(config: Config) -> ServerDialect:
    """Return the dialect that engine.dialect names. Raises FunctionError or ValueError if there is none."""
    return make_named("engine.dialect", config.engine.dialect, DIALECTS, config, ServerDialect, "a dialect")


def label_of(run: str, version: int) -> str:
    return f"{run}/{version}"


def version_of(label: str, run: str) -> int | None:
    """Return the policy version of a label; None if it is not of this run."""
    owner, _, version = label.rpartition("/")
    return int(version) if owner == run and version.isdecimal() else None


def _check_whole(*numbers: object) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MOST_TOKEN:
            raise ValueError(f"{number!r} is no token, and no number of tokens")
