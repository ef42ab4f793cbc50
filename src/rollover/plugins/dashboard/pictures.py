"""An image of a rollout, for the page: drawn anew from the pixels that its record names by their hash.

Owns what of the files that a run's records name may be shown: images alone, whose pixels have the recorded hash, and
never the bytes of a file.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from rollover.images import digest_of, read_image
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.query import NotThere
from rollover.plugins.dashboard.rollout_index import find
from rollover.types import Media

MOST_PIXELS = 640  # a side


def picture(files: IndexedRun, step: int, of: str, number: int) -> dict[str, Any]:
    """Image `number`, counted from 0, of the rollout of this id that left with `step`: as PNG in a data
    URL, at most MOST_PIXELS a side; without "url" and with "why", where it has changed or cannot be read. NotThere
    where there is none."""
    index = files.rollouts
    place = find(index.entries(), step, of)
    if place is None:
        raise NotThere(f"no rollout {of} left the run with step {step}")
    record = index.record(index.entries()[place])
    media = [*(record.get("media") or ()), *(record.get("later_media") or ())]
    if not 0 <= number < len(media):
        raise NotThere(f"rollout {of} has {len(media)} images")
    try:
        recorded = Media.from_json(media[number])
        image = read_image(recorded.source, files.directory / "media")
        if digest_of(image) != recorded.digest:
            raise ValueError(f"image {recorded.source} has changed since it was in the rollout")
    except ValueError as error:  # nothing that is asked for is wrong
        return {"url": None, "why": str(error)}
    except (TypeError, KeyError, AttributeError) as error:
        return {"url": None, "why": f"its record is damaged ({type(error).__name__}: {error})"}
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}", "why": None}
