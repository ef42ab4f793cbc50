"""Images of a prompt as a server gets them, and the check that it put them where the prompt has them.

    Media ──content_parts──▶ data URLs beside token ids with expanded placeholders ──▶ first event ──check_expansion

The token ids are the truth: a server that would expand an image to other placeholders is an error, never a shift.
"""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Sequence
from typing import Any

from rollover.images import read_unchanged
from rollover.types import Media

# Of vLLM: a model of text; --limit-mm-per-prompt; of this package in either server.
_NO_IMAGES = re.compile("is not a multimodal model|At most 0 image|takes text alone")
_KEPT_URLS = 32  # a group's rollouts show the same image, and a resumed one shows it again


def content_parts(media: Sequence[Media]) -> list[dict[str, Any]]:
    """Return the `content_parts` of a request, in the order of the prompt. ValueError if an image has changed.

    vLLM reads type and url; `rollover serve --engine embedded` the fields of Media, too. The source, a path of this
    machine, stays here.
    """
    parts = []
    for image in _in_order(media):
        url = _data_url(image.source, image.digest)
        parts.append({"type": "image_url"} | image.to_json() | {"url": url})
        del parts[-1]["source"]
    return parts


def check_expansion(
    media: Sequence[Media],
    sent: Sequence[int],
    served: Sequence[int] | None,
    ranges: Sequence[tuple[int, int]],
) -> None:
    """ValueError that names the image unless the server shows each image at its placeholders in the ids `sent`.

    `served`: the prompt's ids after the server expanded placeholders. `ranges`: [start, end) of the tokens of each
    image there, which may have more tokens around the placeholders.
    """
    ordered = _in_order(media)
    for image, found in zip(ordered, [*ranges, *[None] * (len(ordered) - len(ranges))], strict=False):
        end = image.offset + image.count
        if found is None or not found[0] <= image.offset <= end <= found[1]:
            where = "nowhere" if found is None else f"at tokens {found[0]} to {found[1]}"
            raise ValueError(
                f"image {image.source}: the server shows it {where}, and the prompt at tokens {image.offset} to {end}."
                " Give it the model's own processor and the settings of this run"
            )
    if len(ranges) != len(ordered) or served is None or list(served) != list(sent):
        num = "no" if served is None else f"{len(served):,}"
        raise ValueError(
            f"image {ordered[0].source}: the server made {num} tokens of a prompt of {len(sent):,} with {len(ordered)}"
            " images. Give it the model's own processor and the settings of this run"
        )


def takes_no_images(refusal: str) -> bool:
    """Whether a server refused a request with images because its model, or its command line, takes none."""
    return _NO_IMAGES.search(refusal) is not None


def _in_order(media: Sequence[Media]) -> list[Media]:
    return sorted(media, key=lambda image: image.offset)


@functools.lru_cache(maxsize=_KEPT_URLS)
def _data_url(source: str, digest: str) -> str:
    """The image's pixels as a lossless PNG."""
    out = io.BytesIO()
    read_unchanged(source, digest).save(out, format="PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
