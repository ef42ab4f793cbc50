"""What differs between kinds of servers: how one is asked for tokens, and given weights.

    RemoteEngine ──GenerateRequest──▶ ServerDialect ──path, JSON──▶ ServerClient ──HTTP──▶ server
                 ◀──────Chunk─────────              ◀─JSON, events──

A kind of server is one subclass, which engine.dialect names: "vllm" (vllm.py), "module:Class", or an entry point of the
group `rollover.dialects`. A server of any kind gives token ids with their log-probs as it samples them, and says what
its weights are called.
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
    """At most `max_tokens` (>= 1) after `token_ids`: the prompt of `extend` and all that was generated.

    Without end-of-sequence token but `extend.stop_token_ids`. The server may not use what it has cached under another
    `cache_salt`, nor images that it has encoded under another `image_salt`. `images`: of `encode_images`.
    """

    request_id: str
    """No other request ever has it."""
    extend: ExtendRequest
    token_ids: Sequence[int]
    max_tokens: int
    cache_salt: str | None = None
    images: Sequence[Any] = ()
    image_salt: str | None = None

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - len(self.extend.prompt)

    @property
    def seed(self) -> int:
        """63 bits, others for each token that a request of the rollout may begin with: a server draws anew from it."""
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
    """The prompt as a server computes it: `token_ids` with expanded placeholders, and the [start, end) of each image's
    tokens, in order."""

    token_ids: tuple[int, ...]
    images: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_whole(*self.token_ids, *(number for ends in self.images for number in ends))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event of a stream brought: new tokens. The last one has a `finish_reason`. ValueError for what is none.

    `spans`: of all tokens of the request, with the last ones; None where a server does not tell. `cached_tokens`: how
    many of the request's had been computed before; once. `shown`: with the first tokens, where there are images.
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
    """How one kind of server is talked to. It has no state of a server.

    Every method but `encode_images` runs on an event loop, and raises ServerRefused where the server said that it will not,
    and is as it was before; ServerFailed where it failed, or did not answer in `limit_s`.
    """

    takes_images = False
    """Prompts may show images, and the first chunk says where the server put them."""
    processes_logits = False
    """`extend.processing` is honoured: all that config/logits.py lets through."""
    keeps_requests = False
    """After `pause` requests stand still, and go on with `resume`. Otherwise they are aborted before new weights come,
    and asked for again."""
    first_label = "default"
    """Of the weights that a server was started with."""

    def __init__(self, config: Config) -> None:
        self.config = config

    # Tokens

    def encode_images(self, media: Sequence[Media]) -> Sequence[Any]:
        """Return images as requests show them. In a thread: it may take long. ValueError for one that has changed."""
        raise NotImplementedError

    @abstractmethod
    def generate(self, client: ServerClient, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield tokens as they come. ValueError for what no server can do; EngineDied for images, where none takes any.

        A caller that leaves it early has its connection closed.
        """
        ...

    @abstractmethod
    async def abort(self, client: ServerClient, request_id: str, limit_s: float) -> None:
        """End a request: its stream ends with a `finish_reason`. It may be unknown, or have ended."""
        ...

    # State

    @abstractmethod
    async def check(self, client: ServerClient, limit_s: float) -> None:
        """ServerFailed, which says how to start it, unless the server has all that a run needs. Nothing is changed."""
        ...

    @abstractmethod
    async def longest_rollout(self, client: ServerClient, limit_s: float) -> int | None:
        """Return how many tokens the server takes at most, prompt included; None if it does not say."""
        ...

    @abstractmethod
    async def weights_label(self, client: ServerClient, limit_s: float) -> str:
        """Return the label of the weights that it has. An engine that hangs behind the server must not answer this."""
        ...

    # Weights

    async def verify_weights(  # noqa: B027 - optional
        self, client: ServerClient, weights: Mapping[str, Any], limit_s: float
    ) -> None:
        """Read the file ahead, while the server generates. ServerRefused for one that it cannot use. It may do nothing."""

    async def pause(self, client: ServerClient, *, clear_cache: bool, limit_s: float) -> None:  # noqa: B027 - optional
        """Sample no more; `clear_cache`: forget what was computed under the present weights. May do nothing."""

    @abstractmethod
    async def load_weights(
        self, client: ServerClient, weights: Mapping[str, Any], label: str, *, clear_cache: bool, limit_s: float
    ) -> None:
        """Replace the weights by those of the file `weights["path"]` (safetensors), whose SHA-256 is
        `weights["sha256"]`, and call them `label`. It is paused. `clear_cache`: as for `pause`."""
        ...

    async def resume(self, client: ServerClient, limit_s: float) -> None:  # noqa: B027 - optional
        """Go on, with what was paused."""

    async def sleep(self, client: ServerClient, limit_s: float) -> None:
        """Free the GPU, weights included: the next ones replace them. Nothing runs."""
        raise ServerFailed("servers of its kind cannot free their GPUs")

    async def wake(self, client: ServerClient, tags: str, limit_s: float) -> None:
        """Allocate memory for `tags` again: "weights", before `load_weights`, or "kv_cache", after it."""
        raise ServerFailed("servers of its kind cannot free their GPUs")


def make_dialect(config: Config) -> ServerDialect:
    """Return the dialect that engine.dialect names. FunctionError or ValueError where there is none."""
    return make_named("engine.dialect", config.engine.dialect, DIALECTS, config, ServerDialect, "a dialect")


def label_of(run: str, version: int) -> str:
    return f"{run}/{version}"


def version_of(label: str, run: str) -> int | None:
    """The policy version behind a label; None: it is not of this run."""
    whose, _, version = label.rpartition("/")
    return int(version) if whose == run and version.isdecimal() else None


def _check_whole(*numbers: object) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MOST_TOKEN:
            raise ValueError(f"{number!r} is no token, and no number of tokens")
