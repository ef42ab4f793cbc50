"""The guarantees of a sandbox on this machine, tested by attempts to break out, and the choice of a sandbox."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.plugins.sandbox.guest.values import NotPlain, from_json, to_json
from rollover.plugins.sandbox.launch import Kind, Launch, SandboxFailed, Template

GUARANTEES = {
    "network": "it reaches no network, this machine's own included",
    "reading": "it reads no files but Python's and the system's libraries",
    "writing": "it writes, makes and removes no files",
    "processes": "it starts, sees and signals no processes",
    "memory": "its memory is limited",
    "user": "it has no rights of root's",
}
NEEDED = ("network", "reading", "writing", "processes", "memory")
_LIMIT_S, _MEMORY_BYTES = 20.0, 1 << 29

# Attacks each guarantee, and returns the broken ones.
_PROBE = """
import ctypes, os, signal, socket

def can(attempt):
    try:
        return attempt() is not False
    except BaseException:
        return False

def probe(port, secret, folder, pid, memory):
    def dial(kind):
        with socket.socket(socket.AF_INET, kind) as end:
            end.settimeout(2)
            end.connect(("127.0.0.1", port))
            end.send(b"x")
    def unix():
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(folder + "/socket")
    def write(path):
        with open(path, "w") as file:
            file.write("x")
    def fork():
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    broken = set()
    if any(can(lambda kind=kind: dial(kind)) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)) or can(unix):
        broken.add("network")
    files = (secret, "/etc/passwd", f"/proc/{pid}/environ", f"/proc/{pid}/maps", "/proc/1/environ")
    if any(can(lambda path=path: open(path).read(1)) for path in files) or can(lambda: os.listdir(folder)):
        broken.add("reading")
    places = (folder + "/new", "/tmp/new", "/dev/shm/new", "new", secret)
    if any(can(lambda path=path: write(path)) for path in places):
        broken.add("writing")
    if any(map(can, (lambda: os.mkdir(folder + "/made"), lambda: os.chmod(secret, 0o777), lambda: os.unlink(secret)))):
        broken.add("writing")
    if can(fork) or can(lambda: os.kill(pid, 0)) or can(lambda: os.execv("/bin/true", ["true"])):
        broken.add("processes")
    if can(lambda: bytearray(memory + (1 << 20))):
        broken.add("memory")
    if can(lambda: os.setuid(0) or os.setgid(0)) and (can(lambda: os.chroot("/")) or can(lambda: os.nice(-5))):
        broken.add("user")
    return sorted(broken)
"""


@dataclass(frozen=True)
class ProbeResult:
    """The broken guarantees of one kind of sandbox. `failed`: why it cannot be started."""

    kind: Kind
    broken: tuple[str, ...] = ()
    failed: str = ""

    @property
    def holds(self) -> bool:
        """Whether it keeps all NEEDED guarantees."""
        return not self.failed and not set(self.broken) & set(NEEDED)

    def __str__(self) -> str:
        if self.failed:
            return f"{self.kind}: {self.failed}"
        held = ", ".join(name for name in GUARANTEES if name not in self.broken)
        return f"{self.kind} holds {held or 'nothing'}" + (
            f"; it does not hold {', '.join(self.broken)}" if self.broken else ""
        )


def probe_sandbox(launch: Launch) -> ProbeResult:
    """Try to break out of a sandbox, by a program in it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listening, socket.socket(socket.AF_UNIX) as unix:
        secret = Path(folder, "secret")
        secret.write_text("x")
        os.chmod(folder, 0o777)
        os.chmod(secret, 0o666)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        unix.bind(f"{folder}/socket")
        unix.listen()
        port = listening.getsockname()[1]
        values = [port, str(secret), folder, os.getpid(), _MEMORY_BYTES]
        try:
            broken = _broken(launch, values)
        except SandboxFailed as error:
            return ProbeResult(launch.kind, failed=str(error))
    return ProbeResult(launch.kind, tuple(name for name in GUARANTEES if name in broken))


def _broken(launch: Launch, values: list[Any]) -> set[str]:
    limits = {"seconds": _LIMIT_S, "memory_bytes": _MEMORY_BYTES, "output_bytes": 1 << 16}
    request = {"mode": "calls", "code": _PROBE, "name": "probe", "inputs": [list(map(to_json, values))]}
    until = time.monotonic() + _LIMIT_S
    template = Template(launch)
    try:
        sandbox = template.sandbox()
        try:
            sandbox.wait_ready(until)
            sandbox.send({**request, "limits": limits}, until)
            reply = sandbox.receive(until + 1) or {}
            return set(from_json(reply.get("value")))
        finally:
            sandbox.kill()
    except (TypeError, NotPlain):
        raise SandboxFailed("a program that tries its guarantees does not end in it") from None
    finally:
        template.close()


def choose_sandbox(sandbox: str, allow_weak: bool) -> tuple[Launch, ProbeResult]:
    """Choose the sandbox for programs.

    sandbox: auto (bubblewrap, else a process that locks itself in), bubblewrap or process. ValueError if none keeps all
    NEEDED guarantees, unless `allow_weak`.
    """
    kinds: tuple[Kind, ...] = ("bubblewrap", "process")
    tried = [probe_sandbox(Launch(kind)) for kind in kinds if sandbox in ("auto", kind)]
    for found in tried:
        if found.holds:
            return Launch(found.kind), found
    if allow_weak and (had := [found for found in tried if not found.failed]):
        best = min(had, key=lambda found: len(found.broken))
        return Launch(best.kind), best
    raise ValueError(
        "the reward code: no sandbox here holds what a program of the policy must be kept from ("
        + "; ".join(map(str, tried))
        + '). Install bubblewrap, use a service (sandbox = "http"), or set allow_weak = true where programs may do harm'
    )
