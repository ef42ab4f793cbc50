"""Starts a sandbox: a bare Python under bubblewrap, or one that locks itself in, with our code inside (inside/).

    Template ──fork──▶ Sandbox: locks itself in ──fork──▶ one program
        └── loads Python and our code once

A sandbox runs one request and ends, so that no program meets what another left. It is made ahead (judge.py): what a
call waits for is the request alone.
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
_ENDING_S = 0.2  # its sandboxes' pipes may close a little before it is gone
_PACKAGE = "rollover.plugins.sandbox.guest"
_MODULES = ("syscalls", "locks", "values", "program", "serving", "testing", "runner")  # each after what it imports
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
# Loads our modules from the standard input: none of our files need be in the sandbox, and none is compiled twice.
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
    """The sandbox itself could not be started, or died before it read the program: nobody's program is at fault."""


@dataclass(frozen=True)
class Launch:
    """How a sandbox is started. `paths`: what of the machine's files can be read inside."""

    kind: Kind
    namespaces: bool = True  # kind "process": try namespaces as well

    def command(self) -> list[str]:
        """The command line."""
        python = [_python(), "-P", "-s", "-S", "-B", "-c", _BOOT]
        return [*_bubblewrap(), *python] if self.kind == "bubblewrap" else python

    def policy(self) -> dict[str, Any]:
        """What the runner is told of its locks (inside/locks.py)."""
        bare = self.kind == "process"
        return {
            "namespaces": self.namespaces,
            "landlock": bare,
            "paths": _readable(),
            "user": not bare or _readable_by_all(),
            "in_namespaces": not bare,
        }


class Template:
    """A process that has loaded our code, and makes sandboxes as copies of itself. It never runs a program."""

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
        """A new one. SandboxFailed if the template does not come up, or has ended."""
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
        """Whether it has, or does so now."""
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End it, and all that is in its sandboxes. It ends by itself when nobody holds the other end: a bubblewrap
        that is killed between its two halves would leave the second, which then waits for ever."""
        self._control.close()
        try:
            self._process.wait(_START_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Sandbox:
    """One sandbox that waits for one request, and is ended. `end_in`, `end_out`: of its input and output."""

    def __init__(self, end_in: int, end_out: int) -> None:
        self._in, self._out = end_in, end_out
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._unread = bytearray()
        self._unsent = memoryview(b"")
        self._locks: dict[str, Any] | None = None

    def locks(self, until: float) -> dict[str, Any]:
        """Wait until it is ready, and return which locks it has. SandboxFailed if it does not come up."""
        if self._locks is None:
            said = self.hear(until)
            if said is None or not isinstance(said.get("ready"), dict):
                raise SandboxFailed("the sandbox did not come up")
            self._locks = dict(said["ready"])
        return self._locks

    def say(self, message: dict[str, Any], until: float) -> None:
        """Send a line. What it does not take in time is dropped: its answer, or none, tells."""
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(message).encode() + b"\n")
        while self._unsent and self._flush() and time.monotonic() < until:
            select.select([], [self._in], [], max(0.0, min(until - time.monotonic(), 0.1)))

    def hear(self, until: float) -> dict[str, Any] | None:
        """The next line; {} for one that is nothing; None when there is none until then, or any more."""
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
        """End it: its first process, which sees that nobody reads, kills the one that runs a program, and ends."""
        for end in (self._in, self._out):
            os.close(end)

    def _flush(self) -> bool:
        """Send what can be sent at once. False where nothing can be sent any more."""
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
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


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
    """This Python, without a virtual environment around it."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


@cache
def _readable() -> list[str]:
    """Python and the system's libraries: the only files that a program can read."""
    own = [_python(), *(os.path.join(sys.base_prefix, name) for name in ("lib", "lib64"))]
    return [path for path in dict.fromkeys([*own, *_SYSTEM]) if os.path.exists(path)]


def _readable_by_all() -> bool:
    """Whether another user could read this Python's files: its folders may be root's own."""
    folders = [*Path(_python()).parents, *Path(sys.base_prefix, "lib").parents]
    return all(folder.stat().st_mode & 0o001 for folder in folders)


@cache
def _bubblewrap() -> list[str]:
    """bubblewrap's command line. As root it makes no namespace of users, and keeps what the runner needs to become
    somebody else; a user's own namespace has that user alone."""
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
                out += ["--perms", "0755", "--dir", folder]  # else it is its owner's alone
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        else:
            out += ["--ro-bind", path, path]
    return [*out, "--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", "/", "--"]
