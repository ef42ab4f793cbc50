"""In a browser: agents and their environments, evaluations, staleness, comparisons that go on, and runs that are not
read to their end yet."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import served
from drawn_run import make_run
from watched import Watched

from recorded_run import group, recorded, row
from rollover.plugins.dashboard import run_data
from rollover.track.records import RolloutRecorder
from rollover.track.trace import TRACE, TraceEvent, TraceFile
from rollover.types import Rollout

pytestmark = pytest.mark.browser
Opens = Callable[..., Watched]
DESKTOP_AND_PHONE = ({"width": 1280, "height": 900}, {"width": 390, "height": 844})
INK = """
(() => {
  const canvas = document.querySelector('.lanes canvas'), ratio = devicePixelRatio;
  const left = 90 * ratio, top = canvas.height - 14 * ratio;
  const { data } = canvas.getContext('2d').getImageData(left, top, canvas.width - left, 8);
  return data.some((value) => value !== 0);
})()
"""
"""Whether something is drawn at the foot of the lanes."""


def make_agents_run(path: Path) -> Path:
    """With an episode of two trajectories, whose environment was at work."""
    make_run(path)
    of = group(90, [1.0, 0.5, 0.0], [10, 11])
    places = [(0, 0, "solver"), (0, 1, "solver"), (1, 0, "judge")]
    of.rollouts = [
        Rollout(
            90, 0, one.task, one.segments, one.state, one.stop_reason, one.reward, role=role, trajectory=trajectory,
            context=context,
        )
        for one, (trajectory, context, role) in zip(of.rollouts, places, strict=True)
    ]  # fmt: skip
    RolloutRecorder(path / "rollouts").write(13, [recorded(of)])
    end = TraceFile(path / TRACE)
    end.write(
        [
            TraceEvent("start", 1300.0, 12, 90, 0),
            TraceEvent("act", 1310.0, 12, 90, 0, tokens=3, segments=((12, 3),)),
            TraceEvent("answer", 1350.0, 12, 90, 0),
            TraceEvent("resume", 1352.0, 12, 90, 0, tokens=3),
            TraceEvent("park", 1360.0, 12, 90, 0, tokens=2, segments=((12, 2),)),
            TraceEvent("publish", 1361.0, 13),
            TraceEvent("resume", 1362.0, 13, 90, 0, tokens=5),
            TraceEvent("finish", 1390.0, 13, 90, 0, tokens=4, segments=((13, 4),)),
            TraceEvent("publish", 1400.0, 14),
        ]
    )
    return path


@contextlib.contextmanager
def shown(open_page: Opens, *runs: Path) -> Iterator[tuple[Watched, str]]:
    """A page, and the address of these runs. The page goes before the server does: it would complain of that."""
    with served(*runs) as url:
        watched = open_page()
        yield watched, url
        watched.close()


def sound(watched: Watched, what: str) -> None:
    for check in ("tooWide", "unnamed"):
        assert watched.value(f"checks.{check}()") == [], what
    assert watched.text(".trouble") == "", what


def test_an_episode_lists_its_contexts_and_each_leads_to_its_text(tmp_path: Path, open_page: Opens) -> None:
    with shown(open_page, make_agents_run(tmp_path / "run")) as (watched, url):
        watched.show(url, "rollouts?step_from=13")
        watched.click(".of-episode")
        watched.until("document.querySelector('main h1')?.textContent.startsWith('Episode 90-0')")
        for viewport in DESKTOP_AND_PHONE:
            watched.page.set_viewport_size(viewport)
            sound(watched, "episode")
        assert watched.page.locator("main h2").all_text_contents() == ["Trajectory 0, solver", "Trajectory 1, judge"]
        assert watched.page.locator(".rollouts .row b").all_text_contents() == ["context 0", "context 1", "context 0"]
        watched.page.locator(".rollouts .row").nth(2).click()
        watched.drawn("rollout")
        assert watched.value("location.hash").endswith("id=90-0.1.0")
        watched.page.get_by_role("link", name="Its episode").click()
        watched.until("document.querySelector('main h1')?.textContent.startsWith('Episode 90-0')")
        watched.show(url, "rollout?step=2&id=7-0")
        assert watched.page.get_by_role("link", name="Its episode").count() == 0, "a plain answer is no episode"


def test_environments_at_work_are_below_the_slots(tmp_path: Path, open_page: Opens) -> None:
    with shown(open_page, make_agents_run(tmp_path / "run")) as (watched, url):
        watched.show(url, "timeline?from=1290&to=1400")
        watched.until("document.querySelector('.lanes + .legend').textContent.includes('Lines join')")
        assert watched.value(INK), "the act"
        watched.tab_to(".lanes canvas")
        watched.press("n")
        watched.until("document.querySelector('.hover').textContent.startsWith('rollout 90-0')")
        box = watched.page.locator(".lanes canvas").bounding_box()
        assert box is not None
        left = box["x"] + 76 + (box["width"] - 76) * (1330 - 1290) / 110
        watched.page.mouse.move(left, box["y"] + box["height"] - 12)
        watched.until("document.querySelector('.hover').textContent.startsWith('environment or agent of rollout 90-0')")
        sound(watched, "timeline")


def test_from_an_evaluation_to_one_answer_and_what_its_task_got_before(tmp_path: Path, open_page: Opens) -> None:
    with shown(open_page, make_run(tmp_path / "run")) as (watched, url):
        watched.show(url, "answers")
        watched.until("document.querySelectorAll('.rollouts .row').length === 3")
        for viewport in DESKTOP_AND_PHONE:
            watched.page.set_viewport_size(viewport)
            sound(watched, "answers")
        watched.page.locator("input[name=text]").fill("EIGHT")
        watched.press("Enter")
        watched.until("document.querySelectorAll('.rollouts .row').length === 1")
        assert watched.value("new URLSearchParams(location.hash.split('?')[1]).get('text')") == "EIGHT"
        watched.click(".rollouts .row")
        watched.until("document.querySelector('main h1')?.textContent.startsWith('Task task-0')")
        assert "0.25 after step 0, 0.75 after step 10" in watched.text("main")
        assert watched.page.locator(".said").all_text_contents() == ["What is 0 + 5?", "eight"]
        sound(watched, "one answer")


def test_a_cell_of_the_map_of_staleness_leads_to_its_rollouts_by_the_keyboard(tmp_path: Path, open_page: Opens) -> None:
    with shown(open_page, make_run(tmp_path / "run")) as (watched, url):
        watched.show(url, "overview")
        watched.until("document.querySelector('.heat:not([hidden]) canvas')?.width > 400")
        watched.tab_to(".heat canvas")
        watched.press("ArrowRight", "ArrowRight", "ArrowUp")
        said = watched.text(".heat .legend")
        assert said == "step 2: 2 rollouts of staleness 1, 50% of the trained ones"
        watched.press("Enter")
        watched.drawn("rollouts")
        assert sorted(watched.page.locator(".rollouts .row b").all_text_contents()) == ["7-0", "7-1"]


def test_a_comparison_goes_on_with_each_of_its_runs(tmp_path: Path, open_page: Opens) -> None:
    places = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    with shown(open_page, *places) as (watched, url):
        watched.show(url, "compare")
        watched.until("document.querySelector('.chart .legend .at')?.textContent === 'step 12'")
        with open(places[1] / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row(13)) + "\n")
        watched.until("document.querySelector('.chart .legend .at')?.textContent === 'step 13'")


def test_two_steps_at_one_place_of_an_axis_are_two_points(tmp_path: Path, open_page: Opens) -> None:
    """A step that trained what was there already generated nothing: as many tokens as before."""
    places = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    same = {"step": 13, "reward/mean": 0.125}
    with open(places[0] / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(12) | same) + "\n")
    at_last = "document.querySelector('.chart .legend .line .value')?.textContent"
    with shown(open_page, *places) as (watched, url):
        watched.show(url, "compare?x=tokens&keys=reward/mean")
        watched.tab_to(".plot")
        watched.press("End")
        watched.until(f"{at_last} === '0.125'")
        where = watched.text(".chart .legend .at")
        watched.press("ArrowLeft")
        watched.until(f"{at_last} === '1.2'")
        assert watched.text(".chart .legend .at") == where


def test_a_point_of_several_steps_says_them_and_opens_them_all(tmp_path: Path, open_page: Opens) -> None:
    """Its value may be that of any of them. Over another axis a point is no step."""
    places = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    with open(places[0] / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in range(13, 1601))
    with shown(open_page, *places) as (watched, url):
        watched.show(url, "overview")
        watched.tab_to(".plot")
        watched.press("ArrowRight", "ArrowRight")
        watched.until("document.querySelector('.chart .legend .at').textContent.startsWith('steps 1 to 5, ')")
        watched.press("Enter")
        watched.drawn("rollouts")
        assert watched.value("location.hash") == "#/rollouts?step_from=1&step_to=5"
        watched.show(url, "compare?x=tokens")
        watched.until("document.querySelector('.chart .legend .at')?.textContent.endsWith(' tokens generated')")


def test_what_is_read_so_far_is_shown_and_then_the_rest(
    tmp_path: Path, open_page: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no patience at all each question takes in one file more."""
    monkeypatch.setattr(run_data, "RunData", functools.partial(run_data.RunData, patience_s=0.0))
    with shown(open_page, make_run(tmp_path / "run")) as (watched, url):
        watched.page.goto(f"{url}/#/rollouts")
        watched.until("document.querySelector('.count')?.textContent.includes('Still reading the run')")
        watched.until("document.querySelector('.count')?.textContent.startsWith('60 rollouts of 60.')")
        assert "reading" not in watched.text(".count").lower()
        watched.until("!document.querySelector('.live').textContent.includes('reading')")
