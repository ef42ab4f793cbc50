"""Starts a sandbox: a bare Python under bubblewrap, or one that locks itself in, with our code inside (guest/).

    Template ──fork──▶ Sandbox: locks itself in ──fork──▶ one program
        └── loads Python and our code once

A sandbox runs one request and ends, so that no program can affect the next. judge.py starts sandboxes ahead of calls.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

MAX_LINE_BYTES = 16 << 20
_START_LIMIT_S = 20.0
_ENDING_S = 0.2  # its sandboxes' pipes may close slightly before it ends
_PACKAGE = "rollover.plugins.sandbox.guest"
_MODULES = ("locks", "values", "program", "testing", "runner")  # in order of imports
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
# Loads our modules from standard input, so that the sandbox needs none of our files, and compiles none.
_BOOT = """
import sys, types, marshal
source = sys.stdin.buffer
size, package, modules = source.readline().decode().split(" ", 2)
parts = package.split(".")
for depth in range(1, len(parts) + 1):
    name = ".".join(parts[:depth])
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = []
    if depth > 1:
        setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], made)
codes = marshal.loads(source.read(int(size)))
for name, code in zip(modules.split(), codes):
    made = types.ModuleType(package + "." + name)
    sys.modules[made.__name__] = made
    setattr(sys.modules[package], name, made)
    exec(code, made.__dict__)
made.main()
"""

Kind = Literal["bubblewrap", "process"]


class SandboxFailed(RuntimeError):
    """The sandbox did not start, or died before it read the program."""


@dataclass(frozen=True)
class Launch:
    """How to start a sandbox."""

    kind: Kind
    namespaces: bool = True  # kind "process": try namespaces as well

    def command(self) -> list[str]:
        """Return the command line."""
        python = [_python(), "-P", "-s", "-S", "-B", "-c", _BOOT]
        return [*_bubblewrap(), *python] if self.kind == "bubblewrap" else python

    def policy(self) -> dict[str, Any]:
        """Return the runner's policy (guest/locks.py)."""
        bare = self.kind == "process"
        return {
            "namespaces": self.namespaces,
            "landlock": bare,
            "paths": _readable(),
            "user": not bare or _readable_by_all(),
            "in_namespaces": not bare,
        }


class Template:
    """A process with our code loaded, which forks sandboxes. It never runs a program itself."""

    def __init__(self, launch: Launch) -> None:
        self._control, theirs = socket.socketpair()
        command = launch.command()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise SandboxFailed(f"{command[0]} cannot be started: {error}") from None
        finally:
            theirs.close()
        self._control.settimeout(_START_LIMIT_S)
        self._starts = _boot_data() + json.dumps(launch.policy()).encode() + b"\n"
        self._is_up = False

    def sandbox(self) -> Sandbox:
        """Start a sandbox. SandboxFailed if the template did not start or has ended."""
        try:
            if not self._is_up:
                self._control.sendall(self._starts)
                self._is_up = self._control.recv(1) == b"u"
            if not self._is_up:
                raise OSError("it ended")
            theirs_in, ours_in = os.pipe()
            ours_out, theirs_out = os.pipe()
            made = Sandbox(ours_in, ours_out)
            try:
                socket.send_fds(self._control, [b"f"], [theirs_in, theirs_out])
            finally:
                os.close(theirs_in)
                os.close(theirs_out)
            return made
        except OSError as error:
            code = self._process.poll()
            how = str(error) if code is None else f"exit code {code}"
            raise SandboxFailed(f"the sandbox did not come up ({how})") from None

    def has_ended(self) -> bool:
        """Return whether the template has ended, or ends within a moment."""
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End the template and its sandboxes, by closing the socket.

        Killing bubblewrap between its two forks would leave the second process waiting forever.
        """
        self._control.close()
        try:
            self._process.wait(_START_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Sandbox:
    """A sandbox for one request. `end_in`, `end_out`: our ends of its input and output pipes."""

    def __init__(self, end_in: int, end_out: int) -> None:
        self._in, self._out = end_in, end_out
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._unread = bytearray()
        self._unsent = memoryview(b"")
        self._locks: dict[str, Any] | None = None

    def wait_ready(self, until: float) -> dict[str, Any]:
        """Wait until it is ready, and return its locks. SandboxFailed if it does not start."""
        if self._locks is None:
            reply = self.receive(until)
            if reply is None or not isinstance(reply.get("ready"), dict):
                raise SandboxFailed("the sandbox did not come up")
            self._locks = dict(reply["ready"])
        return self._locks

    def send(self, message: dict[str, Any], until: float) -> None:
        """Send a line. The rest of a line that it does not read in time is dropped."""
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(message).encode() + b"\n")
        while self._unsent and self._flush() and time.monotonic() < until:
            select.select([], [self._in], [], max(0.0, min(until - time.monotonic(), 0.1)))

    def receive(self, until: float) -> dict[str, Any] | None:
        """Return the next line; {} for an invalid one; None after the timeout or at the end."""
        while True:
            line, found, rest = self._unread.partition(b"\n")
            if found:
                self._unread = rest
                if line:
                    return _parsed(line)
                continue
            if len(self._unread) > MAX_LINE_BYTES:
                return None
            left_s = until - time.monotonic()
            if self._unsent:
                self._flush()
            if left_s <= 0 or not select.select([self._out], [], [], min(left_s, 0.05 if self._unsent else left_s))[0]:
                if left_s <= 0:
                    return None
                continue
            data = os.read(self._out, 1 << 20)
            if not data:
                return None
            self._unread += data

    def kill(self) -> None:
        """End it: its first process notices the closed pipe, kills the program and exits."""
        for end in (self._in, self._out):
            os.close(end)

    def _flush(self) -> bool:
        """Write without blocking. Return False if the pipe is closed."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._in, self._unsent[:65536]) :]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent = memoryview(b"")
            return False
        return True


def _parsed(line: bytes | bytearray) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) else {}


@cache
def _boot_data() -> bytes:
    codes = []
    for name in _MODULES:
        spec = importlib.util.find_spec(f"{_PACKAGE}.{name}")
        assert spec is not None and spec.origin is not None
        codes.append(compile(Path(spec.origin).read_bytes(), f"<sandbox {name}>", "exec", dont_inherit=True))
    data = marshal.dumps(codes)
    return f"{len(data)} {_PACKAGE} {' '.join(_MODULES)}\n".encode() + data


@cache
def _python() -> str:
    """Return this Python, outside of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


@cache
def _readable() -> list[str]:
    """Return the paths that a program can read: Python and the system's libraries."""
    own = [_python(), *(os.path.join(sys.base_prefix, name) for name in ("lib", "lib64"))]
    return [path for path in dict.fromkeys([*own, *_SYSTEM]) if os.path.exists(path)]


def _readable_by_all() -> bool:
    """Return whether other users can read this Python's files."""
    folders = [*Path(_python()).parents, *Path(sys.base_prefix, "lib").parents]
    return all(folder.stat().st_mode & 0o001 for folder in folders)


@cache
def _bubblewrap() -> list[str]:
    """Return bubblewrap's command line. As root, without a user namespace: the runner must change its user id."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxFailed("bubblewrap (bwrap) is not installed")
    names = ["pid", "net", "ipc", "uts", "cgroup-try"] + ([] if os.getuid() == 0 else ["user"])
    out = [program, *(f"--unshare-{name}" for name in names), "--die-with-parent", "--new-session", "--hostname", "box"]
    if os.getuid() == 0:
        out += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path in _readable():
        for folder in reversed([str(parent) for parent in Path(path).parents if str(parent) != "/"]):
            if folder not in out:
                out += ["--perms", "0755", "--dir", folder]  # otherwise only its owner can read it
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        else:
            out += ["--ro-bind", path, path]
    return [*out, "--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", "/", "--"]
