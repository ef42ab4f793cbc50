"""`rollover serve` as a process: it says where it answers, ends in order, and never outlives its parent."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

from launcher import Run

import tiny
from contract.server_client import Answer, Client
from contract.server_contract import asked, rest, running
from rollover.http_server import END_S
from unit.rewards.children import wait_until_dead

LIMIT_S = 120
PARENT = """
import os, sys
if os.fork() == 0:
    from rollover.cli import main
    sys.exit(main(sys.argv[1:]))
os.wait()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("served")
    tiny.save(folder / "model")
    path = folder / "recipe.toml"
    path.write_text(
        f'[model]\npath = "{folder}/model"\ndtype = "float32"\ndevice = "cpu"\n'
        "[engine]\nkv_memory_gb = 0.05\nmax_running = 4\n[run]\nthreads = 1\n"
    )
    return str(path)


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Starts `rollover serve` with these words; what still runs at the end is killed."""
    runs: list[Run] = []

    def begin(*words: object, script: Path | None = None) -> Run:
        runs.append(Run(["serve", *map(str, words)], script=script))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
        run.wait(LIMIT_S)


def until(condition: Callable[[], object], run: Run) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, (run.out, run.err)
        time.sleep(0.02)


def ready(run: Run) -> dict:
    """The first line of its output."""
    until(lambda: "\n" in run.out or run.poll() is not None, run)
    assert run.out, run.err
    return json.loads(run.out.splitlines()[0])


@pytest.mark.parametrize(
    ("host", "number", "code"), [("127.0.0.1", signal.SIGTERM, 0), ("localhost", signal.SIGINT, 130)]
)
def test_it_says_where_it_answers_and_ends_in_order(start, recipe: str, host: str, number: int, code: int) -> None:
    """Who is asking when it is told to end gets what there is."""
    run = start(recipe, "--port", 0, *(["--host", host] if host != "127.0.0.1" else []))
    said = ready(run)
    assert said["pid"] == run.pid and said["url"].startswith(f"http://{host}:")

    async def ask() -> Answer:
        async with Client(said["url"]) as client:
            async with running(client, asked([5, 6], max_tokens=900)) as events:
                await client.ok("/pause?mode=keep")  # or it could have ended before it is told
                run.send_signal(number)
                return await rest(events)

    answer = asyncio.run(ask())
    assert answer.finish_reason == "abort" and 3 <= len(answer.tokens) < 900
    assert run.wait(LIMIT_S) == code
    assert len(run.out.splitlines()) == 1 and "Traceback" not in run.err


SLOW_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def health(port: int | None) -> None:
    """TimeoutError where it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        connection.getresponse()
    finally:
        connection.close()


def test_it_ends_whatever_it_does(start, recipe: str, tmp_path: Path) -> None:
    """Here a template, which is the model's own code, holds its event loop up."""
    shutil.copytree(Path(recipe).parent / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(SLOW_TEMPLATE)
    run = start(recipe, "--port", 0, "--model.path", tmp_path / "model")
    port = urlsplit(ready(run)["url"]).port
    body = {"model": str(tmp_path / "model"), "messages": [{"role": "user", "content": "x"}]}
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    asking.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    with pytest.raises(TimeoutError):
        health(port)
    run.send_signal(signal.SIGTERM)
    assert run.wait(END_S + 10) == 0
    assert "the server did not end within 8 s of the signal" in run.err
    asking.close()


def test_it_ends_while_it_is_asked_for_a_device(start, recipe: str) -> None:
    run = start(recipe, "--port", 0)
    url = ready(run)["url"]

    async def ask() -> None:
        async with Client(url) as client:
            for _ in range(3):
                await client.ok("/collective_rpc", {"method": "rollover_verify", "args": ["/dev/zero", "0" * 64]})
            await client.ok("/start_weight_update")
            info = {"path": "/dev/zero", "sha256": "0" * 64}
            assert (await asyncio.wait_for(client.post("/update_weights", {"update_info": info}), 30))[0] == 500

    asyncio.run(ask())
    run.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 0 and "weights refused: '/dev/zero'" in run.err


def test_it_does_not_outlive_its_parent(start, recipe: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    run = start(recipe, "--port", 0, script=script)
    said = ready(run)
    assert said["pid"] != run.pid
    run.kill()
    assert wait_until_dead([said["pid"]])


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(start, recipe: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = start(recipe, "--port", port, "--model.path", "/no/such/folder")
        assert run.wait(LIMIT_S) == 2
    assert run.err == f"rollover: error: --port = {port} cannot be served: Address already in use. Use 0, a free one\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.path", "/no/such/folder"], "model.path = '/no/such/folder': there is no such folder"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines: set a token"),
        (["--host", "no.such.name.invalid"], "--host no.such.name.invalid can be reached"),
        (["--port", "70000"], "70000 is no port"),
        (["--backend.type", "tinker", "--model.lora.rank", "8"], "there is no engine to serve"),
    ],
)
def test_what_is_wrong_is_told_in_words(start, recipe: str, words: list[str], message: str) -> None:
    run = start(recipe, *(words if "--port" in words else ["--port", 0, *words]))
    assert run.wait(LIMIT_S) == 2
    assert message in run.err and "Traceback" not in run.err and not run.out
