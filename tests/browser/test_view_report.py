"""A report in a real browser: opened from a disk, without a network, with everything but what is live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drawn_run import make_run
from watched import Watched

from recorded_run import group, recorded
from rollover.plugins.dashboard.report import MOST_BYTES, make_report
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import RolloutRecorder

pytestmark = pytest.mark.browser
VIEWS = ("overview", "timeline", "rollouts", "rollout?step=2&id=7-0", "answers", "ledger", "compare", "plan")
Opens = Callable[..., Watched]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    runs = [RunData(make_run(folder / name)) for name in ("run", "other")]
    path.write_text(make_report(runs), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES < 3_000_000
    yield path.as_uri()


def offline(open_page: Opens) -> Watched:
    watched = open_page()
    watched.page.context.set_offline(True)
    return watched


def test_every_view_opens(file: str, open_page: Opens) -> None:
    watched = offline(open_page)
    for view in VIEWS:
        watched.show(file, view)
        assert watched.text(".trouble") == "", view
        assert watched.value("checks.tooWide()") == [] == watched.value("checks.unnamed()"), view
    assert watched.text(".live") == "a report"
    watched.check("file:")


def test_from_a_point_to_the_text_and_its_siblings(file: str, open_page: Opens) -> None:
    watched = offline(open_page)
    watched.show(file, "overview")
    watched.click(".chart .u-over")
    watched.drawn("rollouts")
    watched.click(".rollouts .row")
    watched.drawn("rollout")
    assert "the answer of step " in watched.text(".tokens")
    first = watched.text("h1")
    watched.click("td a")
    watched.until(f"document.querySelector('h1').textContent !== {first!r}")


def test_rollouts_are_searched_and_filtered(file: str, open_page: Opens) -> None:
    watched = offline(open_page)
    watched.show(file, "rollouts?text=of+step+7")
    assert watched.text(".count").startswith("2 rollouts of 60")
    watched.page.locator("select[name=scored]").select_option("no")
    watched.until("location.hash.includes('scored=no')")
    watched.until("document.querySelector('.count').textContent.startsWith('0 rollouts')")
    for text, count in (("task-7", "2 rollouts"), ("not in this", "0 rollouts")):
        watched.page.locator("select[name=scored]").select_option("")
        watched.page.locator("input[name=text]").fill(text)
        watched.click("text=Show >> nth=0")
        watched.until(f"document.querySelector('.count').textContent.startsWith('{count}')")


def test_a_long_answer_is_shown_as_far_as_it_is_here(tmp_path: Path, open_page: Opens) -> None:
    run = make_run(tmp_path / "run")
    RolloutRecorder(run / "rollouts").write(11, [recorded(group(90, [1.0], num_tokens=4600))])
    path = tmp_path / "report.html"
    path.write_text(make_report([RunData(run, lambda ids: [f"<{token}>" for token in ids])]), encoding="utf-8")
    watched = offline(open_page)
    watched.show(path.as_uri(), "rollout?step=11&id=90-0")
    assert watched.value("document.querySelectorAll('[data-place]').length") == 2000
    watched.click("text=Further tokens")
    watched.until("document.querySelectorAll('[data-place]').length === 4000")
    assert watched.value("document.querySelector('[data-place=\"3999\"]').textContent") == "<3999>"
    watched.click("text=Further tokens")
    watched.until("document.body.textContent.includes('This report has the first 4000 tokens')")
    assert watched.value("document.querySelectorAll('[data-place]').length") == 4000


def test_what_cannot_be_copied_is_shown_to_be_copied(file: str, open_page: Opens) -> None:
    watched = offline(open_page)
    watched.page.add_init_script("delete Navigator.prototype.clipboard")
    watched.show(file, "rollout?step=2&id=7-0")
    watched.click("text=Copy the answer")
    assert watched.value("document.querySelector('dialog[open] textarea').value") == "the answer 0"
    watched.press("Escape")
    watched.until("document.querySelector('dialog') === null")
