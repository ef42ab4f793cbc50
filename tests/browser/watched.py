"""A page of a browser that is watched: what it complains of, what it asks for, and what everyone may expect of it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

DEADLINE_S = 60.0  # a machine that is busy takes long
CHECKS = Path(__file__).parent / "checks.js"
_LOOK_MS = 40
HEADLINES = {
    "overview": ".charts .u-wrap",
    "timeline": ".lanes canvas",
    "rollouts": ".rollouts .row",
    "rollout": ".said",
    "answers": "h1",
    "episode": "h1",
    "ledger": ".flow",
    "compare": "h1",
    "plan": "h1",
}
"""By view: what is there when it is drawn."""


class Watched:
    """`errors`: complaints of the page, in words. `asked`: the addresses that it asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(1000 * DEADLINE_S)
        page.add_init_script(path=CHECKS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.errors.append(message.text)

    def value(self, expression: str) -> Any:
        """Of an expression in the page, promises awaited."""
        return self.page.evaluate(expression)

    def until(self, expression: str) -> Any:
        """Its value, as soon as that is true. AssertionError, with what the page shows, where it never is."""
        from playwright.sync_api import Error

        end = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(Error):  # a page that is being left
                if value := self.value(expression):
                    return value
            if time.monotonic() > end:
                shown = self.value("document.body?.innerText ?? ''")
                errors = self.errors[:5]
                raise AssertionError(f"never true: {expression}\nerrors: {errors}\nthe page shows: {shown[:2000]}")
            self.page.wait_for_timeout(_LOOK_MS)

    def show(self, url: str, view: str) -> None:
        """Open a view anew, and wait until it is drawn."""
        self.page.goto("about:blank")
        self.page.goto(f"{url}{'' if url.startswith('file:') else '/'}#/{view}")
        self.drawn(view)

    def drawn(self, view: str) -> None:
        """Wait until this view is."""
        self.until(f"document.querySelector('main {HEADLINES[view.partition('?')[0]]}') !== null")
        self.until("document.querySelector('.loading') === null")

    def click(self, selector: str) -> None:
        """In the middle of the first element of this selector."""
        self.page.locator(selector).first.click()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.text_content() or ""

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def tab_to(self, selector: str) -> None:
        """Press Tab until this has the focus."""
        for _ in range(300):
            self.press("Tab")
            if self.value(f"document.activeElement.matches({selector!r})"):
                return
        raise AssertionError(f"Tab does not reach {selector}")

    def close(self) -> None:
        """As its server is about to leave: a page that is open complains of that."""
        self.page.close()

    def check(self, *addresses: str) -> None:
        """Expect no complaint so far, and nothing asked for but of these addresses."""
        assert self.errors == []
        own = (*addresses, "data:", "about:", "blob:")
        assert [of for of in self.asked if not of.startswith(own)] == []
