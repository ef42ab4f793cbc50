"""The dashboard in a real browser: every view, by mouse and keyboard, at every width, in either theme, on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import served
from drawn_run import make_run
from watched import Watched

from recorded_run import HOSTILE, group, recorded
from rollover.track.records import RolloutRecorder

pytestmark = pytest.mark.browser
VIEWS = ("overview", "timeline", "rollouts", "rollout?step=2&id=7-0", "answers", "ledger", "compare", "plan")
WIDTHS = {"phone": 390, "tablet": 820, "desktop": 1280}
Opens = Callable[..., Watched]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of two runs: the second makes a comparison of one page."""
    folder = tmp_path_factory.mktemp("runs")
    with served(make_run(folder / "run"), make_run(folder / "other")) as address:
        yield address


@pytest.mark.parametrize("device", WIDTHS)
def test_every_view_opens_in_either_theme_without_a_complaint(url: str, open_page: Opens, device: str) -> None:
    is_phone = device == "phone"
    watched = open_page(
        viewport={"width": WIDTHS[device], "height": 844}, is_mobile=is_phone, has_touch=is_phone, color_scheme="dark"
    )
    for view in VIEWS:
        watched.page.emulate_media(color_scheme="light")
        watched.show(url, view)
        for scheme in ("light", "dark"):  # the second while the view is open: it follows the system
            watched.page.emulate_media(color_scheme=scheme)
            watched.drawn(view)
            for check in ("tooWide", "unnamed", "faint"):
                assert watched.value(f"checks.{check}()") == [], f"{view}, {scheme}"
        assert watched.text(".trouble") == "", view


def test_from_a_point_of_a_curve_to_the_text_of_its_step_in_two_clicks(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, "overview")
    watched.page.locator(".chart .u-over").first.hover()
    step = watched.text(".chart .legend .at").removeprefix("step ")
    watched.click(".chart .u-over")
    watched.drawn("rollouts")
    assert watched.value("location.hash") == f"#/rollouts?step_from={step}&step_to={step}"
    assert {text.split()[1] for text in watched.page.locator(".row .facts span:nth-child(2)").all_text_contents()} == {
        step
    }
    watched.click(".rollouts .row")
    watched.drawn("rollout")
    assert watched.value("location.hash").startswith(f"#/rollout?step={step}&id=")
    assert f"the answer of step {step}" in watched.text(".tokens")
    segments = watched.value("document.querySelector('.segments').ariaLabel")
    assert f"policy version {int(step) - 1}" in segments and "staleness 0" in segments


def test_the_same_by_the_keyboard_alone(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, "overview")
    watched.tab_to(".plot")
    watched.press("ArrowRight", "ArrowRight", "Enter")
    watched.drawn("rollouts")
    assert watched.value("location.hash") == "#/rollouts?step_from=2&step_to=2"
    watched.tab_to(".row")
    watched.press("Enter")
    watched.drawn("rollout")
    assert "the answer of step 2" in watched.text(".tokens")


@pytest.mark.parametrize("view", VIEWS)
def test_tab_reaches_every_control_and_shows_where_it_is(url: str, open_page: Opens, view: str) -> None:
    watched = open_page()
    watched.show(url, view)
    for _ in range(400):
        watched.press("Tab")
        if not (found := watched.value("checks.focused()")):
            break  # past the last one: nothing holds it back
        assert found == "good", view
    else:
        raise AssertionError("Tab never comes to the end of the page")
    assert watched.value("checks.unreached()") == [], view


def test_the_first_tab_leads_past_the_navigation(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, "rollouts")
    watched.press("Tab")
    assert watched.value("document.activeElement.textContent") == "To the content"
    assert watched.value("document.activeElement.getBoundingClientRect().width > 40")
    watched.press("Enter", "Tab")
    assert watched.value("document.querySelector('main').contains(document.activeElement)")


def test_over_time_is_gone_through_by_the_keyboard(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, "timeline")
    watched.until("document.querySelector('.lanes + .legend').textContent.includes('segment')")
    watched.tab_to(".lanes canvas")
    watched.press("n", "n", "p")
    assert watched.text(".hover").startswith("rollout 3-0")
    watched.press("Enter")
    watched.drawn("rollout")
    assert watched.value("location.hash").startswith("#/rollout?step=1&id=3-0")


def test_a_segment_over_time_leads_to_its_rollout(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, "timeline?from=600&to=700")
    watched.until("document.querySelector('.lanes + .legend').textContent.includes('segment')")
    box = watched.page.locator(".lanes canvas").bounding_box()
    assert box is not None
    x, y, bottom = box["x"] + 76 + (box["width"] - 76) * 0.2, box["y"], box["y"] + box["height"]
    while y < bottom and "rollout " not in watched.text(".hover"):
        y += 4
        watched.page.mouse.move(x, y)
    watched.page.mouse.click(x, y)
    watched.until("location.hash.startsWith('#/rollout?step=6')")


def test_what_moves_stands_still_for_whoever_wants_that(url: str, open_page: Opens) -> None:
    moving = "[...document.querySelectorAll('*')].some((of) => getComputedStyle(of).transitionDuration !== '0s')"
    watched = open_page(reduced_motion="reduce")
    for view in ("overview", "rollouts"):
        watched.show(url, view)
        assert not watched.value(moving) and watched.value("document.getAnimations().length") == 0
    watched.page.emulate_media(reduced_motion="no-preference")
    assert watched.value(moving)


def test_on_paper_there_is_the_content_alone_and_it_is_light(url: str, open_page: Opens) -> None:
    watched = open_page(color_scheme="dark")
    for view in VIEWS:
        watched.show(url, view)
        watched.page.emulate_media(media="print", color_scheme="dark")
        hidden = (
            "[...document.querySelectorAll('nav, .actions, .filters, .pages')].every((of) => !of.checkVisibility())"
        )
        watched.until(hidden)
        assert watched.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert watched.value("checks.faint()") == [], view
        texts = "[...document.querySelectorAll('.said, .tokens, .scroll')]"
        assert watched.value(f"{texts}.every((of) => of.scrollHeight <= of.clientHeight + 2)"), view
        assert watched.page.pdf(format="A4").startswith(b"%PDF"), view
        watched.page.emulate_media(media="screen")


def test_a_line_of_a_megabyte_is_shown_and_leaves_the_page_usable(tmp_path: Path, open_page: Opens) -> None:
    run = make_run(tmp_path / "run")
    RolloutRecorder(run / "rollouts").write(13, [recorded(group(90, [1.0]), text=HOSTILE["long"])])
    watched = open_page()
    with served(run) as url:
        watched.show(url, "rollouts?order=down")
        watched.click(".rollouts .row")
        watched.until("document.querySelector('.tokens')?.textContent.length > 1000000")
        assert watched.value("checks.tooWide()") == []
        watched.click("nav a")
        watched.drawn("overview")
        watched.close()
