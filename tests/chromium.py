"""A real browser for tests: Chromium without a window, driven by its own protocol (DevTools) over a web socket.

It has no network but this machine, a profile of its own, and ends with its test. What the page said to the console and
every exception are kept: a test asks `errors` at its end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_DEADLINE_S = 60.0  # a machine that is busy takes long
_LOOK_S = 0.05
_KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}


class Browser:
    """One page of one Chromium. `errors`: what it complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self.errors: list[str] = []
        self.moved_bytes = 0
        self.asked: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol, and its result. RuntimeError where the browser refuses it."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        return await asyncio.wait_for(self._waiting[number], _DEADLINE_S)

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if waiting := self._waiting.pop(told.get("id", 0), None):
                if "error" in told:
                    waiting.set_exception(RuntimeError(told["error"]["message"]))
                else:
                    waiting.set_result(told["result"])
            elif "method" in told:
                self._told(told["method"], told["params"])

    def _told(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(of.get("value") or of.get("description")) for of in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.loadingFinished":
            self.moved_bytes += int(params["encodedDataLength"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        self._session = (await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True))[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    # What a person does

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, promises awaited. RuntimeError where it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    async def until(self, expression: str, deadline_s: float = _DEADLINE_S) -> Any:
        """Its value, as soon as that is true. AssertionError, with what the page shows, where it never is."""
        end = asyncio.get_running_loop().time() + deadline_s
        while True:
            with contextlib.suppress(RuntimeError):  # a page that is being left
                if value := await self.evaluate(expression):
                    return value
            if asyncio.get_running_loop().time() > end:
                shown = await self.evaluate("document.body?.innerText ?? ''")
                raise AssertionError(f"never true: {expression}\nerrors: {self.errors}\nthe page shows: {shown[:2000]}")
            await asyncio.sleep(_LOOK_S)

    async def click(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def click_on(self, selector: str) -> None:
        """In the middle of the first element of this selector, scrolled to."""
        await self.until(f"document.querySelector({json.dumps(selector)}) !== null")
        x, y = await self.evaluate(
            f"(() => {{ const of = document.querySelector({json.dumps(selector)});"
            " of.scrollIntoView({block: 'center'}); const box = of.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        await self.click(x, y)

    async def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else key if len(key) == 1 else None
        named = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper())), "code": key}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def resize(self, width: int, height: int, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def prefer(self, scheme: str) -> None:
        """ "light" or "dark"."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path, whole: bool = False) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """A Chromium with its profile in this empty folder."""
    assert PROGRAM is not None
    process = subprocess.Popen(
        [
            PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "about:blank",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        port, path = await _where(profile, process)
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket:
                driven = Browser(socket)
                listening = asyncio.create_task(driven.listen())
                await driven.attach()
                try:
                    yield driven
                finally:
                    listening.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _where(profile: Path, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    file, end = profile / "DevToolsActivePort", asyncio.get_running_loop().time() + _DEADLINE_S
    while asyncio.get_running_loop().time() < end:
        if file.is_file() and len(lines := file.read_text().split("\n")) > 1:
            return int(lines[0]), lines[1]
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        await asyncio.sleep(_LOOK_S)
    raise AssertionError("Chromium does not start")
