"""Images of a prompt on the page of its rollout, in a real browser: served, and in a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chromium import served
from drawn_run import make_run
from PIL import Image
from watched import Watched

from recorded_run import group, recorded
from rollover.images import digest_of
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import RolloutRecorder
from rollover.types import Media, Prompt, Task

pytestmark = pytest.mark.browser
VIEW = "rollout?step=20&id=90-0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
    image.save(folder / "a.png")
    (folder / "gone.png").write_bytes((folder / "a.png").read_bytes()[:99])
    media = [
        Media(str(folder / name), digest_of(image), image.size, i, 1) for i, name in enumerate(("a.png", "gone.png"))
    ]
    content = [{"type": "image", "image": of.source, "sha256": "3c"} for of in media] + [
        {"type": "text", "text": "<b>?"}
    ]
    run = make_run(folder / "run")
    of = group(90, [0.0])
    for rollout in of.rollouts:
        rollout.prompt = Prompt((1, 2, 3), tuple(media))
    task = of.rollouts[0].task
    of.task = Task(task.task_id, task.source, task.reward, messages=({"role": "user", "content": content},))
    RolloutRecorder(run / "rollouts").write(20, [recorded(of)])
    return run


def test_image_is_drawn_and_a_damaged_one_is_said(open_page: Callable[..., Watched], run: Path) -> None:
    with served(run) as url:
        page = open_page()
        page.show(url, VIEW)
        page.until("document.querySelector('figure img')?.complete")
        assert page.value("[...document.querySelectorAll('figure img')].map((of) => of.naturalWidth)") == [40]
        page.until("document.querySelectorAll('figure')[1].innerText.includes('cannot be read as an image')")
        assert "[image: a.png][image: gone.png]<b>?" in page.text(".message")


def test_report_has_the_names_alone(open_page: Callable[..., Watched], run: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(make_report([RunData(run)]))
    page = open_page()
    page.show((tmp_path / "report.html").as_uri(), VIEW)
    assert page.value("document.querySelectorAll('figure').length") == 2
    assert page.value("document.querySelectorAll('figure img').length") == 0
    assert "a.png, 40 x 30 pixels, 1 token" in page.text("figure")
