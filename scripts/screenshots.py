"""Makes the pictures of docs/dashboard.md and README.md from a run, in Chromium.

    .venv/bin/python scripts/screenshots.py RUN_DIR docs/images            all of them
    .venv/bin/python scripts/screenshots.py RUN_DIR docs/images rollout    these

A run of `make demo` is what the docs show. Each picture is a PNG of what `rollover view` shows, at one place that is
chosen for what it tells: steps after each of which rollouts roll over, one of those rollouts with siblings that got
another score, ... What a run has nothing of is shown at the next best place.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chromium import chromium, missing, served

from rollover.plugins.dashboard.run_data import RunData
from rollover.plugins.dashboard.trace_index import PARKED

if TYPE_CHECKING:
    from playwright.sync_api import Page

MOST_BYTES = 150_000  # of one picture: a clone holds all of them, and all of their versions
_SETTLED_MS = 700
_GENERATIONS = 4


class Picture(NamedTuple):
    """`view`: what the address says after "#/". `height`: how far down the page is shown, in CSS pixels."""

    name: str
    view: str
    drawn: str
    width: int = 1280
    height: int = 800
    scheme: str = "light"


def pictures(run: RunData) -> list[Picture]:
    rollout = told_rollout(run)
    step = rollout["step"]
    one = f"rollout?step={step}&id={rollout['id']}"
    return [
        Picture("dashboard", f"timeline?{window(run)}", ".lanes canvas", height=860),
        Picture("overview", "overview", ".charts .u-wrap", height=900),
        Picture("rollouts", f"rollouts?step_from={step}&step_to={step}&sort=advantage&order=down", ".row", height=760),
        Picture("rollout", one, ".tokens", height=1220),
        Picture("ledger", "ledger", ".flow", height=820),
        Picture("phone", one, ".tokens", width=390, height=844, scheme="dark"),
    ]


def told_rollout(run: RunData) -> Mapping[str, Any]:
    """One that several policy versions sampled, and that got another score than its siblings; or what comes near."""
    wanted: list[dict[str, str]] = [
        {"versions_from": "3", "score_from": "0.5", "advantage_from": "0.1"},
        {"versions_from": "2", "score_from": "0.5", "advantage_from": "0.1"},
        {"versions_from": "2", "outcome": "trained"},
        {},
    ]
    for query in wanted:
        rows = run.answer("rollouts", {**query, "sort": "tokens", "order": "down", "limit": "50"})["rows"]
        if rows:
            return rows[len(rows) // 2]
    raise ValueError(f"{run.files.directory} has recorded no rollouts: set track.rollouts = true")


def window(run: RunData) -> str:
    """Of time: four generations in a row after each of which rollouts roll over, as many as can be had."""
    told = run.answer("lanes", {"columns": "4000"})
    starts, ends, bars = told["spans"]["generate"]["start"], told["spans"]["generate"]["end"], told["bars"]
    parked = [0] * len(starts)
    if bars is not None:
        for end, how in zip(bars["end"], bars["how"], strict=True):
            if how & PARKED:
                parked[max(0, bisect_right(starts, end) - 1)] += 1
    last = max(0, len(starts) - _GENERATIONS)
    first = max(range(last + 1), key=lambda place: min(parked[place : place + _GENERATIONS - 1], default=0))
    return f"from={starts[first]}&to={ends[min(first + _GENERATIONS, len(ends)) - 1]}"


def take(page: Page, url: str, picture: Picture) -> bytes:
    page.emulate_media(color_scheme="dark" if picture.scheme == "dark" else "light", reduced_motion="reduce")
    page.set_viewport_size({"width": picture.width, "height": picture.height})
    page.goto("about:blank")
    page.goto(f"{url}/#/{picture.view}")
    page.wait_for_selector(f"main {picture.drawn}")
    page.wait_for_selector(".loading", state="detached")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(_SETTLED_MS)  # the last curve is drawn
    return small(page.screenshot())


def small(content: bytes) -> bytes:
    """The same picture in the 256 colours that tell most of it, none of them mixed."""
    from PIL import Image

    packed = BytesIO()
    with Image.open(BytesIO(content)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("names", nargs="*", help="the pictures to make; all without one")
    args = parser.parse_args(words)
    if why := missing():
        print(f"screenshots.py: {why}", file=sys.stderr)
        return 2
    run = RunData(args.run_dir)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    large = []
    with served(args.run_dir) as url, chromium() as browser:
        page = browser.new_page()
        for picture in [of for of in pictures(run) if not args.names or of.name in args.names]:
            content = take(page, url, picture)
            path = args.out_dir / f"{picture.name}.png"
            path.write_bytes(content)
            print(f"{path}: {len(content):,} bytes")
            large += [picture.name] if len(content) > MOST_BYTES else []
    if large:
        print(f"larger than {MOST_BYTES:,} bytes: {', '.join(large)}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
