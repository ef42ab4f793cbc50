"""Programs that want to get out, to use all there is, or to fake a pass: each is contained, and told by its reason."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attacks
import pytest

from rollover.plugins.sandbox.cases import Cases, read_cases
from rollover.plugins.sandbox.guarantees import probe_sandbox
from rollover.plugins.sandbox.judge import Judge, RunLimits, Verdict
from rollover.plugins.sandbox.launch import Launch
from rollover.process_tree import descendants

X86 = platform.machine() == "x86_64"
MEMORY_BYTES, OUTPUT_BYTES = 1 << 28, 1 << 20
LAUNCHES = {
    "bubblewrap": Launch("bubblewrap"),
    "process": Launch("process"),
    "process without namespaces": Launch("process", namespaces=False),
}


@dataclass
class Outside:
    """What a program could reach if it got out."""

    folder: Path
    listening: socket.socket
    hearing: socket.socket
    unix: socket.socket

    @property
    def given(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "port": self.listening.getsockname()[1],
            "folder": str(self.folder),
            "secret": str(self.folder / "secret"),
            "unix": str(self.folder / "socket"),
        }

    def untouched(self) -> bool:
        for end in (self.listening, self.unix):
            with pytest.raises(BlockingIOError):
                end.accept()
        with pytest.raises(BlockingIOError):
            self.hearing.recv(1)
        return (self.folder / "secret").read_text() == "secret" and len(os.listdir(self.folder)) == 2


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.setenv("SANDBOX_TEST_SECRET", "secret")
    (tmp_path / "secret").write_text("secret")
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hearing,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        hearing.bind(listening.getsockname())
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        for end in (listening, hearing, unix):
            end.setblocking(False)
        yield Outside(tmp_path, listening, hearing, unix)


@pytest.fixture(
    scope="module",
    params=["bubblewrap", pytest.param("process", marks=pytest.mark.slow), "process without namespaces"],
)
def launch(request: pytest.FixtureRequest) -> Launch:
    """Each kind of sandbox that holds here what programs must be kept from."""
    launch = LAUNCHES[request.param]
    found = probe_sandbox(launch)
    if not found.holds:
        pytest.skip(f"this machine cannot give it: {found}")
    return launch


def judged(launch: Launch, code: str, cases: Cases, seconds: float) -> Verdict:
    judge = Judge(launch, RunLimits(seconds, MEMORY_BYTES, OUTPUT_BYTES), ahead=False)
    before = descendants(os.getpid())
    try:
        return judge.judge(code, cases)
    finally:
        judge.close()
        deadline = time.monotonic() + 10
        while not descendants(os.getpid()) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert descendants(os.getpid()) <= before, "something that it started is left over"


def test_nothing_of_the_machine_is_reached(launch: Launch, outside: Outside) -> None:
    """Each attempt in a process of its own, all in one sandbox."""
    tries = {name: code for name, code in attacks.TRIES.items() if "doors" not in name or X86}
    inputs = tuple(json.dumps(outside.given | {"attack": code}) for code in tries.values())
    cases = Cases("stdin", inputs, ("safe",) * len(inputs))
    verdict = judged(launch, attacks.DISPATCH, cases, 120.0)
    assert dict(zip(tries, verdict.ends, strict=True)) == dict.fromkeys(tries, "passed"), verdict.detail
    assert outside.untouched()


@pytest.mark.parametrize("name", attacks.DRAINS)
def test_what_uses_up_something_ends_with_its_reason(name: str, launch: Launch) -> None:
    code, ends = attacks.DRAINS[name]
    cases = Cases("stdin", inputs=("",), outputs=("",))
    verdict = judged(launch, code, cases, 0.5 if "timeout" in ends else 30.0)
    assert verdict.ends[0] in ends, verdict
    assert verdict.share == 0
    assert verdict.detail


@pytest.mark.parametrize("name", attacks.FAKES)
def test_no_score_is_faked(name: str, launch: Launch) -> None:
    verdict = judged(launch, attacks.FAKES[name], read_cases({"tests": "assert f(3) == 1234"}), 3.0)
    assert verdict.ends[0] in ("wrong", "error", "timeout"), verdict
    assert verdict.share == 0


@pytest.mark.parametrize(
    "name",
    [
        "reads a file of the parent's",
        "reads the parent's environment",
        "connects by TCP",
        "sends by UDP",
        "connects to a Unix socket",
        "follows a symbolic link out",
        "makes hard links",
        "starts processes",
        "signals the parent",
    ],
)
def test_without_a_sandbox_it_works(name: str, outside: Outside) -> None:
    """The attempts are worth something. What they signal here is a process that only waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        given = json.dumps(outside.given | {"pid": victim.pid, "attack": attacks.TRIES[name]})
        done = subprocess.run(
            [sys.executable, "-c", attacks.DISPATCH], input=given, capture_output=True, text=True, cwd=outside.folder
        )
        victim.kill()
    assert "breached" in done.stdout, done


def test_a_test_that_would_pass_passes(launch: Launch) -> None:
    """The tests of these fakes can be passed."""
    verdict = judged(launch, "def f(x):\n    return 1234", read_cases({"tests": "assert f(3) == 1234"}), 30.0)
    assert verdict == Verdict(("passed",))
