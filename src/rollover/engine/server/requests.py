"""Validated body of vLLM's /inference/v1/generate. Fields without support are refused by name."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.images import Places, stored
from rollover.openai_wire import MAX_ID, Fields, Number, Refusal, StreamOptions
from rollover.types import Media, Prompt, SamplingParams

_SEED_BITS = 2**64 - 1
_Token = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Whole2 = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]
_Bias = Annotated[Number, Field(ge=-100, le=100)]


class SamplingFields(Fields):
    """`sampling_params`. Fields with one legal value are vLLM's, and not supported here."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: Number = Field(1.0, ge=0)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_ID)
    min_p: Number = Field(0.0, ge=0, le=1)
    seed: int | None = None
    logprobs: int | None = Field(None, ge=0, le=1)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_ID)]] | None = None
    stop: str | list[str] | None = None
    min_tokens: int = Field(default=0, ge=0)
    repetition_penalty: Number | None = Field(default=None, gt=0)
    logit_bias: dict[_Token, _Bias] | None = None
    # Without effect on tokens:
    stream_interval: int | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Not supported:
    n: Literal[1] = 1
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    prompt_logprobs: None = None
    allowed_token_ids: None = None
    bad_words: None = None
    structured_outputs: None = None

    @model_validator(mode="after")
    def _fewest_within_most(self) -> SamplingFields:
        """Refuse min_tokens above max_tokens, as vLLM does."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> SamplingParams:
        """Return the distribution; top_k -1 and 0 are off."""
        return SamplingParams(self.temperature, self.top_p, max(self.top_k, 0), self.min_p)

    def processing(self) -> LogitsProcessing:
        """Return the logits processing."""
        return LogitsProcessing(
            logit_bias=tuple(sorted((int(token), bias) for token, bias in (self.logit_bias or {}).items())),
            repetition_penalty=self.repetition_penalty or 1.0,
            min_new_tokens=self.min_tokens,
        )


class ImagePart(Fields):
    """An image of a prompt, in `content_parts`: `types.Media`, with the image as a data URL for its source."""

    type: Literal["image_url"]
    url: Annotated[str, Field(pattern=r"^data:image/[a-z]+;base64,")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: _Whole2
    offset: int = Field(ge=0)
    count: int = Field(ge=1)
    grid: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list, max_length=3)
    uuid: str | None = None  # vLLM's key of what it computes for the image; here the digest is

    def stored(self) -> Media:
        """Store the image in a file. Raises ValueError for an invalid image."""
        path, _ = stored(self.url, Places(folder=None))
        width, height = self.size
        return Media(path, self.digest, (width, height), self.offset, self.count, tuple(self.grid))


class GenerateBody(Fields):
    """The body of POST /inference/v1/generate. `token_ids` have the placeholders of images expanded."""

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: SamplingFields
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Literal[0] = 0
    content_parts: list[ImagePart] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"

    def request(
        self,
        rollout_id: str,
        most_tokens: int,
        eos: Collection[int],
        random_seed: int,
        media: tuple[Media, ...] = (),
    ) -> ExtendRequest:
        """Return the engine's request. `most_tokens`: longest sequence of the engine. Raises Refusal if none is left.

        max_tokens is limited to what fits, which is also its default. `eos` end it unless ignore_eos.
        """
        params, left = self.sampling_params, most_tokens - len(self.token_ids)
        if left < 1:
            raise Refusal(
                f"token_ids: {len(self.token_ids)} tokens, and {most_tokens} fit, with at least one that is generated",
                "token_ids",
            )
        if "" in params.stop_strings:
            raise Refusal("sampling_params.stop: an empty string stops everything", "sampling_params.stop")
        return ExtendRequest(
            rollout_id=rollout_id,
            prompt=Prompt(tuple(self.token_ids), media),
            generated_ids=(),
            max_new_tokens=min(left, params.max_tokens or left),
            seed=(random_seed if params.seed is None else params.seed) & _SEED_BITS,
            sampling=params.sampling(),
            stop=StopCriteria(
                frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else eos),
                params.stop_strings,
            ),
            processing=params.processing(),
        )


def text_field(body: Any, name: str) -> str:
    """Return a required text of a body. Raises Refusal without it."""
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, str) or not value:
        raise Refusal(f"{name}: a text is wanted", name)
    return value


def choice(value: str | None, name: str, default: str, choices: Collection[str]) -> str:
    """Return a query parameter that must be one of `choices`. Raises Refusal for other values."""
    if value is None:
        return default
    if value not in choices:
        raise Refusal(f"{name}: {value!r} is none of {', '.join(choices)}", name)
    return value


def flag(value: str | None, name: str, *, default: bool) -> bool:
    """Return a boolean query parameter."""
    return choice(value, name, str(default).lower(), ("true", "false", "1", "0")) in ("true", "1")
