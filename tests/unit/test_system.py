"""Where Rollover runs: macOS, containers, and when the hub is not asked."""

from __future__ import annotations

import os
import platform
import socket
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from heard import hear
from rollover import processes, system
from rollover.config import RewardsConfig
from rollover.models import kernels
from rollover.system import cores
from rollover.weights.shared_file import SharedFile

# Where Rollover runs: what is done on macOS without what only Linux has, and when the hub is not asked


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program sees of it: its name, and no function that it lacks."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    for name in ("sched_getaffinity", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    is_dir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: not str(path).startswith(("/proc", "/dev/shm")) and is_dir(path))


@pytest.mark.parametrize(("name", "refused"), [("linux", False), ("darwin", False), ("win32", True), ("cygwin", True)])
def test_who_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, refused: bool) -> None:
    monkeypatch.setattr(sys, "platform", name)
    reason = system.refusal()
    assert bool(reason) == refused and "\n" not in reason and ". " not in reason


def test_cores_of_macos(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert system.cores() == 8
    assert RewardsConfig().num_processes == 4
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert system.cores() == 1


def test_kernels_are_not_tried_on_macos(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is asked: Apple's takes neither the flags nor the library that they are linked with."""
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(kernels.KernelsUnavailable) as error:
        kernels.load(("-O0",))
    assert str(error.value) == "they are built on Linux alone, and this is Darwin"


def test_new_weights_go_through_a_file_of_the_temporary_folder_on_macos(macos: None) -> None:
    said: list[str] = hear([])
    transport = SharedFile()
    try:
        update = transport.write(1, [("a", torch.zeros(1 << 14))])
        assert os.fstat(update.message["file"]).st_size == 1 << 16
    finally:
        transport.close()
    assert said == [], "no place is missed that there never is"


def test_a_parent_is_watched_where_the_kernel_tells_nothing(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """prctl is Linux's. What is left is a thread that watches getppid."""
    threads: list[str] = []

    class Library:
        def __init__(self, name: object) -> None:
            pass  # and it has no prctl

    class Thread:
        def __init__(self, target: object, daemon: bool) -> None:
            threads.append(f"daemon={daemon}")

        def start(self) -> None:
            threads.append("started")

    monkeypatch.setattr(processes.ctypes, "CDLL", Library)
    monkeypatch.setattr(processes.threading, "Thread", Thread)
    processes.die_with(os.getppid())
    assert threads == ["daemon=True", "started"]


@pytest.mark.parametrize(
    ("offline", "proxy", "known", "reason"),
    [
        (True, "", True, "HF_HUB_OFFLINE is set"),
        (False, "", True, ""),
        (False, "", False, "huggingface.co cannot be reached"),
        (False, "http://proxy:1", False, ""),
    ],
)
def test_when_the_hub_is_away(monkeypatch, offline: bool, proxy: str, known: bool, reason: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    if proxy:
        monkeypatch.setenv("https_proxy", proxy)

    def look_up(host: str, *_: object) -> list[object]:
        if not known:
            raise socket.gaierror("Name or service not known")
        return []

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert system.hub_is_away() == reason


# How many cores a run may use: those that its process may run on, and what a container's limit pays for


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("max 100000\n", 8),
        ("100000 100000\n", 1),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("", 8),
        ("what is this\n", 8),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, num: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    limit = tmp_path / "cpu.max"
    assert cores(limit) == 8, "there is no such file"
    limit.write_text(text)
    assert cores(limit) == num
