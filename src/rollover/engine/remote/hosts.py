"""Hosts of servers: a URL (UrlHost), or a child process that is restarted (ProcessHost).

The process is `rollover serve FILE.toml --engine ... --port 0`: when it has loaded its model, it prints one line of
JSON with its address. It ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from rollover.back_off import BackOff
from rollover.config import Config
from rollover.config.describe import settings_as_toml
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.client import ServerClient, ServerFailed, ServerRefused
from rollover.engine.remote.dialect import ServerDialect
from rollover.http_guard import TOKEN_VARIABLE, token
from rollover.processes import brief_waiting, child_command, child_environment
from rollover.workers.worker import LogFile

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.2
_END_S = 10.0
_LOOK_AT_LOG_S = 10.0
_ANSWERS_S = 10.0
_NO_TOKEN = (401, 403)


class ServerHost(Protocol):
    """Host of a server. `name`: for messages, constant. `token`: "" if it has none."""

    name: str
    token: str

    def address(self, limit_s: float) -> str:
        """Wait until the server listens, and return its URL. For any thread. Raises ServerFailed after `limit_s`."""
        ...

    def restart(self) -> None:
        """Restart our process if it has ended before it was `ready`. Call it in a thread that outlives the process."""
        ...

    async def ready(self) -> ServerClient:
        """Return a client of the server, which is started if necessary. Raises ServerFailed."""
        ...

    async def discard(self) -> None:
        """End our process, after the server was ejected."""
        ...

    async def close(self) -> None: ...


class UrlHost:
    """A server that others start and end. `server_token`: None: the environment's."""

    def __init__(self, url: str, server_token: str | None = None) -> None:
        self.name, self.token = url, token() if server_token is None else server_token

    def address(self, limit_s: float) -> str:
        return self.name

    def restart(self) -> None:
        """Nothing: it is not ours."""

    async def ready(self) -> ServerClient:
        return ServerClient(self.name, self.token)

    async def discard(self) -> None:
        """Nothing: it is not ours."""

    async def close(self) -> None:
        """Nothing."""


class ProcessHost:
    """Server process `number` of this run: started at once, and again after `discard`.

    `logs`: folder for its output (server-0.log) and settings (server-0.toml); None: a temporary one. `address`: of this
    machine, on which it listens. `server_token`: "": the environment's, or a random one: every program of this machine
    can reach the server, even web pages in a browser.
    """

    def __init__(
        self,
        config: Config,
        number: int,
        start_limit_s: float,
        logs: Path | None = None,
        address: str = "127.0.0.1",
        server_token: str = "",
    ) -> None:
        self.name = f"{config.engine.server} server {number}"
        self.token = server_token or new_token()
        self._config, self._limit_s, self._address = config, start_limit_s, address
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None
        self._heard = threading.Lock()
        self._temporary = None if logs else tempfile.TemporaryDirectory(prefix="rollover-server-")
        self._folder = logs or Path(self._temporary.name if self._temporary else "")
        self._role = f"server-{number}"
        self._log = LogFile(self._folder / f"{self._role}.log")
        self._closed = threading.Event()
        threading.Thread(target=self._bound_log, daemon=True, name=f"{self._role}.log").start()
        self._start()

    @property
    def pid(self) -> int:
        """Return the id of the current process; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    def _bound_log(self) -> None:
        while not self._closed.wait(_LOOK_AT_LOG_S):
            self._log.bound()

    def _start(self) -> None:
        settings = self._folder / f"{self._role}.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(settings_as_toml(self._config), encoding="utf-8")
        command = ["serve", settings, "--engine", self._config.engine.server, "--host", self._address, "--port", 0]
        with self._log.open() as log:
            self._process = subprocess.Popen(
                child_command("rollover.__main__", *command),  # so that it never outlives this process
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(**brief_waiting(self._config.run)) | {TOKEN_VARIABLE: self.token},
                start_new_session=True,  # Ctrl-C is for the loop
            )

    def address(self, limit_s: float) -> str:
        with self._heard:
            process = self._process
            if self._url is None:
                if process is None:
                    raise ServerFailed("it is not started")
                self._url = self._listen(process, limit_s)
            return self._url

    def restart(self) -> None:
        with self._heard:
            if self._process is not None and self._process.poll() is not None and not self._closed.is_set():
                _close(self._process)
                self._url = None
                self._start()

    def _listen(self, process: subprocess.Popen[bytes], limit_s: float) -> str:
        """Return the URL that the process prints first. Kills it if it prints nothing for too long."""
        assert process.stdout is not None
        clock = threading.Timer(limit_s, process.kill)
        clock.start()
        try:
            line = process.stdout.readline()
            return str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError) as error:
            process.kill()
            code = process.wait()
            where = "" if self._temporary else f" ({self._log.path})"
            said = f"its process ended without printing its address (exit code {code}); its last output{where}: "
            raise ServerFailed(said + (self._log.last_words() or "none")) from error
        finally:
            clock.cancel()

    async def ready(self) -> ServerClient:
        if self._process is None:
            self._start()
        url = await asyncio.to_thread(self.address, self._limit_s)
        return ServerClient(url, self.token)

    async def discard(self) -> None:
        process, self._process, self._url = self._process, None, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
            _close(process)

    async def close(self) -> None:
        """End the process by SIGTERM, so that it cleans up; after a limit by SIGKILL."""
        self._closed.set()
        if (process := self._process) is not None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _END_S)
        await self.discard()
        if self._temporary is not None:
            self._temporary.cleanup()


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()


def new_token() -> str:
    """Return the token of a server that the run starts: the environment's, or a random one."""
    return token() or secrets.token_urlsafe(32)


def make_hosts(
    config: Config, logs: Path | None = None, own: Callable[[int], ServerHost] | None = None
) -> list[ServerHost]:
    """Return the hosts of engine.urls, and engine.num_servers of our own, which start now with output in `logs`.

    `own` creates each of our own by its number; None: processes of this machine.
    """
    engine = config.engine
    make = own or (lambda number: ProcessHost(config, number, engine.give_up_s, logs))
    return [*(UrlHost(url.rstrip("/")) for url in engine.urls), *map(make, range(engine.num_servers))]


def longest_rollout(
    hosts: Sequence[ServerHost], dialect: ServerDialect, limit_s: float, closing: threading.Event
) -> int:
    """Return the longest rollout, in tokens, of the first server that answers. For any thread.

    Raises EngineDied if none answers in time or before `closing` is set, ValueError for a wrong token.
    """
    deadline, said, back_off, next_revival = time.monotonic() + limit_s, "", BackOff(), 0.0
    while (left_s := deadline - time.monotonic()) > 0 and not closing.is_set():
        whys: list[str] = []
        for host in hosts:
            try:
                if (longest := _longest_of(host.address(left_s), host.token, dialect)) is not None:
                    return longest
                whys.append(f"{host.name}: it does not report max_model_len, the longest rollout")
            except (ServerFailed, OSError, ValueError) as error:
                if isinstance(error, ServerRefused) and error.status in _NO_TOKEN:
                    raise ValueError(
                        f"the server {host.name} answers {error.status} ({error.said}): it wants a token. Set the"
                        f" environment variable {TOKEN_VARIABLE} to the one that it was started with"
                    ) from error
                whys.append(f"{host.name}: {error}")
        if not said and not closing.is_set():
            logger.warning(f"no server of [engine] answers yet, they are waited for ({'; '.join(whys)})")
        said = "; ".join(whys)
        if not closing.wait(_ASK_AGAIN_S) and time.monotonic() > next_revival:
            for host in hosts:
                host.restart()
            next_revival = time.monotonic() + back_off.pause_s()
    raise EngineDied(f"no server of [engine] answered within {limit_s:.3g} s (engine.give_up_s); {said}")


def _longest_of(url: str, server_token: str, dialect: ServerDialect) -> int | None:
    async def ask() -> int | None:
        client = ServerClient(url, server_token)
        try:
            return await dialect.longest_rollout(client, _ANSWERS_S)
        finally:
            await client.close()

    with ThreadPoolExecutor(1) as pool:  # this thread may have a running event loop
        return pool.submit(asyncio.run, ask()).result()
