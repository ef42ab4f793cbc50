"""The dashboard in a real browser: every view, by mouse and keyboard, live, on a phone, in the dark, and without a
network."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from chromium import PROGRAM, Browser, browser
from recorded_run import HOSTILE, group, recorded, row, write_run
from rollover.http_server import HttpServer
from rollover.track.recorder import RolloutRecorder
from rollover.track.sinks import MetricsFile
from rollover.track.trace import TRACE, TraceEvent, TraceFile
from rollover.view.app import make_app
from rollover.view.report import MOST_BYTES, make_report
from rollover.view.run_data import RunData

pytestmark = [pytest.mark.browser, pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")]
VIEWS = ("overview", "timeline", "rollouts", "rollout?step=2&id=7-0", "ledger", "compare", "plan")
Part = Callable[[Browser, str, Path], Awaitable[None]]


def make_run(path: Path) -> Path:
    """Of twelve steps, with visits to an engine, and with texts that nobody should run."""
    path.mkdir(parents=True)
    names = sorted(name for name in HOSTILE if name != "long")
    write_run(path, steps=12, num_steps=20, text=lambda step: HOSTILE[names[step % len(names)]])
    events = []
    for step in range(1, 13):
        at = 100.0 * step
        events += [TraceEvent("generate_start", at, step - 1)]
        for number in (3 * step, 3 * step + 1):
            for sibling in range(2):
                events += [TraceEvent("start", at + 1 + sibling, step - 1, number, sibling)]
                events += [
                    TraceEvent(
                        "finish", at + 30 + 5 * sibling, step - 1, number, sibling, tokens=3, segments=((step - 1, 3),)
                    )
                ]
        events += [TraceEvent("generate_end", at + 50, step - 1), TraceEvent("train_start", at + 50, step - 1)]
        events += [TraceEvent("train_end", at + 90, step - 1), TraceEvent("publish", at + 91, step)]
    TraceFile(path / TRACE).write(sorted(events, key=lambda event: event.seconds))
    return path


@contextlib.asynccontextmanager
async def served(*runs: Path) -> AsyncIterator[str]:
    server = HttpServer(make_app([RunData(of) for of in runs], "127.0.0.1"))
    await server.start()
    try:
        yield server.url
    finally:
        await server.close()


def shown(tmp_path: Path, part: Part, *more: Path) -> None:
    """Do this with a page of a run (and more), and expect no complaint of the browser."""

    async def work() -> None:
        run = make_run(tmp_path / "run")
        async with served(run, *more) as url, browser(tmp_path / "profile") as page:
            await page.resize(1280, 900)
            await part(page, url, run)
            assert page.errors == []
            assert {of for of in page.asked if not of.startswith((url, "data:", "about:"))} == set()

    asyncio.run(work())


HEADLINES = {
    "overview": ".charts .u-wrap",
    "timeline": ".lanes canvas",
    "rollouts": ".rollouts .row",
    "rollout": ".said",
    "ledger": ".flow",
    "compare": "h1",
    "plan": "h1",
}
WITHOUT_A_NAME = """
[...document.querySelectorAll('button,input,select,a,[tabindex]')]
  .filter((of) => of.checkVisibility() && of.id !== 'main')
  .filter((of) => !(of.ariaLabel || of.textContent.trim() || of.labels?.[0]?.textContent.trim()))
  .map((of) => of.outerHTML)
"""
ON_THE_CANVAS = """
(() => {
  const box = document.querySelector('canvas').getBoundingClientRect();
  return [box.x + 76 + (box.width - 76) * 0.2, box.y, box.bottom];
})()
"""


async def ready(page: Browser, url: str, view: str) -> None:
    await page.open(f"{url}{'' if url.startswith('file:') else '/'}#/{view}")
    await page.until(f"document.querySelector('main {HEADLINES[view.partition('?')[0]]}') !== null")
    await page.until("document.querySelector('.loading') === null")


def test_every_view_opens_at_every_width_in_either_theme_without_a_complaint(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        for view in VIEWS:
            for width, scheme in ((1280, "light"), (390, "dark")):
                await page.resize(width, 844, mobile=width < 500)
                await page.prefer(scheme)
                await page.open("about:blank")
                await ready(page, url, view)
                wide = await page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, f"{view} is {wide} wide on a screen of {width}"
                assert await page.evaluate("document.querySelector('.trouble').textContent") == "", view
                assert await page.evaluate(WITHOUT_A_NAME) == [], view

    shown(tmp_path, part)


def test_from_a_point_of_a_curve_to_the_text_of_its_step_in_two_clicks(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        await ready(page, url, "overview")
        await page.click_on(".chart .u-over")
        await page.until("location.hash.startsWith('#/rollouts?step_from=')")
        await page.click_on(".rollouts .row")
        await page.until("location.hash.startsWith('#/rollout?step=')")
        await page.until("document.querySelector('.tokens')?.textContent.length > 0")
        segments = await page.evaluate("document.querySelector('.segments').ariaLabel")
        assert "policy version" in segments and "staleness" in segments

    shown(tmp_path, part)


def test_the_same_by_the_keyboard_alone(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        await ready(page, url, "overview")
        for _ in range(60):
            await page.press("Tab")
            if await page.evaluate("document.activeElement.classList.contains('plot')"):
                break
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            await page.press(key)
        await page.until("location.hash === '#/rollouts?step_from=2&step_to=2'")
        await page.until("document.querySelector('.rollouts .row') !== null")
        for _ in range(60):
            await page.press("Tab")
            if await page.evaluate("document.activeElement.classList.contains('row')"):
                break
        await page.press("Enter")
        await page.until("document.querySelector('.tokens') !== null")

    shown(tmp_path, part)


def test_a_segment_over_time_leads_to_its_rollout(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        await ready(page, url, "timeline?from=600&to=700")
        await page.until("document.querySelector('.lanes + .legend').textContent.includes('segment')")
        x, y, bottom = await page.evaluate(ON_THE_CANVAS)
        while y < bottom and "rollout " not in await page.evaluate("document.querySelector('.hover').textContent"):
            y += 4
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await page.click(x, y)
        await page.until("location.hash.startsWith('#/rollout?step=6')")

    shown(tmp_path, part)


def test_what_is_written_is_seen_within_two_seconds(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        await ready(page, url, "overview")
        await page.until("document.querySelector('.cards').textContent.includes('12 of 20')")
        RolloutRecorder(run / "rollouts").write(13, [recorded(group(90, [1.0]), text="brand new")])
        with MetricsFile(run / "metrics.jsonl") as metrics:
            metrics.write(row(13))
        begin = time.monotonic()
        await page.until("document.querySelector('.cards').textContent.includes('13 of 20')")
        # 2 s are what is promised; a machine that others use takes longer, and tells it by how long a look takes.
        before = time.monotonic()
        await page.evaluate("fetch('/api/runs/0/state').then((of) => of.text())")
        assert before - begin < 2 + 10 * (time.monotonic() - before)

    shown(tmp_path, part)


def test_texts_are_texts(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        await page.call(
            "Page.addScriptToEvaluateOnNewDocument", source="window.alert = () => { throw new Error('ran') }"
        )
        await ready(page, url, "rollouts?limit=500")
        for step in range(1, 13):
            await ready(page, url, f"rollout?step={step}&id={3 * step}-0")
            await page.until(f"document.querySelector('h1')?.textContent.includes('{3 * step}-0')")
            assert (
                await page.evaluate("document.querySelectorAll('main script, main iframe, main img, main b i').length")
                == 0
            )
            answer = await page.evaluate("document.querySelector('.tokens').textContent")
            assert not set("\x1b\x07\u202e\u2066\u200f\x00\x08") & set(answer)
        assert any("<script>alert(1)</script>" in HOSTILE[name] for name in HOSTILE)

    shown(tmp_path, part)


def test_a_line_of_a_megabyte_is_shown_and_leaves_the_page_usable(tmp_path: Path) -> None:
    async def part(page: Browser, url: str, run: Path) -> None:
        RolloutRecorder(run / "rollouts").write(13, [recorded(group(90, [1.0]), text=HOSTILE["long"])])
        await ready(page, url, "rollouts?order=down")
        await page.click_on(".rollouts .row")
        await page.until("document.querySelector('.tokens')?.textContent.length > 1000000")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 1280
        await page.click_on("nav a")
        await page.until("document.querySelector('.cards') !== null")

    shown(tmp_path, part)


def test_a_report_opens_from_a_disk_with_everything_but_what_is_live(tmp_path: Path) -> None:
    async def work() -> None:
        run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
        file = tmp_path / "report.html"
        file.write_text(make_report([RunData(run), RunData(other)]), encoding="utf-8")
        assert file.stat().st_size < MOST_BYTES < 3_000_000
        async with browser(tmp_path / "profile") as page:
            await page.resize(1280, 900)
            await page.call(
                "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
            )
            for view in VIEWS:
                await page.open("about:blank")
                await ready(page, file.as_uri(), view)
                assert await page.evaluate("document.querySelector('.trouble').textContent") == "", view
            await page.until("document.querySelector('.live').textContent === 'a report'")
            assert page.errors == []
            assert {of for of in page.asked if not of.startswith(("file:", "data:", "about:"))} == set()

    asyncio.run(work())
