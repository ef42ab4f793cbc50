"""Images of prompts on the page: only those whose pixels a record names, drawn anew."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recorded_run import group, recorded, write_run
from rollover.images import digest_of
from rollover.plugins.dashboard.query import NotFound
from rollover.plugins.dashboard.rollout_detail import MOST_PIXELS
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import RolloutRecorder
from rollover.types import Media, Prompt

PIXELS = np.random.default_rng(0).integers(0, 255, (30, 1300, 3), dtype=np.uint8)


def run_with(folder: Path, *media: Media) -> RunData:
    write_run(folder)
    of = group(50, [1.0])
    for rollout in of.rollouts:
        rollout.prompt = Prompt((1, 2, 3), media)
    RolloutRecorder(folder / "rollouts").write(4, [recorded(of)])
    return RunData(folder)


@pytest.fixture
def media(tmp_path: Path) -> Media:
    image = Image.fromarray(PIXELS)
    path = tmp_path / "a.png"
    image.save(path)
    return Media(str(path), digest_of(image), image.size, 0, 1)


def asked(data: RunData, number: int = 0, of: str = "50-0") -> dict:
    return data.answer("picture", {"step": "4", "id": of, "number": str(number)})


def shown(answer: dict) -> Image.Image:
    kind, _, content = answer["url"].partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_image_is_drawn_anew_and_small(tmp_path: Path, media: Media) -> None:
    answer = asked(run_with(tmp_path / "run", media, media), 1)
    assert shown(answer).size == (MOST_PIXELS, 15)


def test_what_is_not_recorded_is_not_shown(tmp_path: Path, media: Media) -> None:
    data = run_with(tmp_path / "run", media)
    for number, of in ((1, "50-0"), (0, "51-0")):
        with pytest.raises(NotFound):
            asked(data, number, of)
    with pytest.raises(ValueError, match="give the id and the step of the rollout"):
        data.answer("picture", {"step": "4", "id": "50-0"})


def test_another_image_than_the_recorded_one_is_not_shown(tmp_path: Path, media: Media) -> None:
    data = run_with(tmp_path / "run", replace(media, digest="0" * 64))
    answer = asked(data)
    assert answer["url"] is None and answer["why"].endswith("a.png has changed since it was in the rollout")


@pytest.mark.parametrize("source", ["/dev/zero", "/etc/hostname", "/none.png", "/etc"])
def test_other_files_are_not_shown(tmp_path: Path, media: Media, source: str) -> None:
    answer = asked(run_with(tmp_path / "run", replace(media, source=source)))
    assert answer["url"] is None and re.search("cannot be read as an image|there is no file", answer["why"])


def test_kept_image_of_a_moved_run_is_shown(tmp_path: Path, media: Media) -> None:
    data = run_with(tmp_path / "run", replace(media, source="/elsewhere/media/3c.png"))
    (tmp_path / "run" / "media").mkdir()
    Path(media.source).rename(tmp_path / "run" / "media" / "3c.png")
    assert shown(asked(data)).size == (MOST_PIXELS, 15)
