"""Reward functions for scripts/fuzz.py: from task and text follow the score and how the function misbehaves."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
import zlib

_OWN_PID = os.getpid()
_FORGED = b'{"call": 1, "index": 0, "result": {"score": 7.0, "extras": {}}}\n'


def own_score(task: str, text: str) -> float:
    """What the text of this task's rollout must get, if anything."""
    return zlib.crc32(f"{task}/{text}".encode()) / 2**32


def _write_everywhere() -> None:
    for name in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if name > 2:
                os.write(name, _FORGED)


def _sleep_in_a_fork() -> None:
    if os.fork() == 0:
        time.sleep(1000)


def _become_a_daemon() -> None:
    if os.fork() == 0 and os.fork() == 0:
        os.setsid()
        time.sleep(1000)


def _fail() -> None:
    raise KeyError("no such thing")


def _make_noise() -> None:
    print("noise", flush=True)
    os.system("echo noise")


_MISBEHAVIOUR = [
    *[os.fork] * 3,  # both come back
    _sleep_in_a_fork,
    _become_a_daemon,
    lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True),
    lambda: os._exit(3),
    lambda: ctypes.string_at(0),
    lambda: os.killpg(0, signal.SIGKILL),
    lambda: os.kill(os.getpid(), signal.SIGSTOP),
    lambda: time.sleep(1000),
    lambda: time.sleep(0.3),
    lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(),
    _write_everywhere,
    _fail,
    _make_noise,
]


def _score(task: str, text: str) -> float:
    kind = zlib.crc32(f"{text}/{task}".encode()) % 80
    if kind < len(_MISBEHAVIOUR) and not text.startswith("The answer is 0"):  # the probe's
        _MISBEHAVIOUR[kind]()
    return own_score(task, text) + (os.getpid() != _OWN_PID)


def one(solution_str, ground_truth):
    return _score(ground_truth, solution_str)


def batch(completions, answer, **columns):
    return [_score(a, text) for a, text in zip(answer, completions, strict=True)]


async def together(solution_str, ground_truth):
    await asyncio.sleep(0)
    return _score(ground_truth, solution_str)
