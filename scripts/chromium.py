"""The system's Chromium, driven by Playwright, and dashboards to open in it: for tests/browser and screenshots.py.

Playwright comes with the extra `browser`, Chromium with the system (`apt-get install chromium`): no browser is
downloaded. It has a profile of its own, reaches this machine alone, and ends with its block.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_ARGUMENTS = (
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container has 64 MB of it
)


def missing() -> str:
    """What has to be installed first; "" where all is there."""
    for name, module in (("playwright", "playwright"), ("pillow", "PIL")):
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed: pip install 'rollover[browser]'"
    return "" if PROGRAM else "there is no Chromium: apt-get install chromium"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Without a window. Until the end of the block no other event loop runs in this thread: Playwright has its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, which CI is, Chromium starts without its sandbox or not at all. It opens nothing but our own pages.
        sandbox = os.geteuid() != 0
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=_ARGUMENTS, chromium_sandbox=sandbox)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def served(*runs: Path) -> Iterator[str]:
    """The address of what `rollover view` shows of these runs, served in a thread."""
    from rollover.http_server import HttpServer
    from rollover.plugins.dashboard.app import is_of_page, make_app
    from rollover.plugins.dashboard.run_data import RunData

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="served")
    thread.start()
    try:
        server = HttpServer(make_app([RunData(of) for of in runs]), is_public=is_of_page)
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield server.url
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
