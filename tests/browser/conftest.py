"""What the tests in a browser get: a Chromium for each file of tests, and watched pages in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from chromium import chromium
from watched import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def a_browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(a_browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Opens an empty page of a profile of its own; the options are those of Playwright's new_context. What it
    complained of by the end of the test is an error."""
    pages = []

    def opened(**options: Any) -> Watched:
        context = a_browser.new_context(**{"viewport": DESKTOP, **options})
        pages.append(Watched(context.new_page()))
        return pages[-1]

    yield opened
    for watched in pages:
        watched.page.context.close()
    for watched in pages:
        watched.check("http://127.0.0.1:", "file:")
