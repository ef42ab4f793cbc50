"""How a process locks itself in: limits, another user, no capabilities, Landlock, namespaces, the filter of calls.

`lock_runner` holds for the whole sandbox, before it reads a program; `lock_program` for the process that runs one.
Each lock is tried by itself, and what could be had is told: rewards/sandbox/guarantees.py tests what it is worth.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from typing import Any

from rollover.plugins.sandbox.guest.syscalls import install_filter, known_architecture

_UNSHARE = 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # of processes, networks, shared memory, host names
_NEW_USERS = 0x10000000
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK = (444, 445, 446)  # create a ruleset, add a rule, restrict oneself: the same numbers everywhere
_READ_FILE, _READ_FOLDER, _EXECUTE = 1 << 2, 1 << 3, 1
_MAX_THREADS, _MAX_FILES, _STACK_BYTES = 64, 64, 120 << 20
_ANYBODY = 65534


def lock_runner(policy: dict[str, Any]) -> dict[str, Any]:
    """Lock this process in as `policy` says, and return what was had. May go on in a child (namespaces).

    policy: "namespaces", "landlock": bool; "paths": what may be read; "user": give up root's id, if it is root's.
    """
    had: dict[str, Any] = {"namespaces": False, "landlock": 0, "own_user": os.getuid() != 0, "own_count": False}
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if policy["namespaces"]:
        had["namespaces"] = _unshare()
    if policy["landlock"]:
        had["landlock"] = _restrict_files(policy["paths"])
    if os.getuid() == 0:
        if policy["user"]:
            had["own_user"] = had["own_count"] = _become_nobody()
        _drop_capabilities()
    else:
        had["own_count"] = bool(policy["in_namespaces"] or had["namespaces"])
    _prctl(_PDEATHSIG, signal.SIGKILL)  # another user's id cleared it
    _prctl(_DUMPABLE, 0)
    return had


def lock_program(limits: dict[str, Any]) -> None:
    """For the process that a program runs in. limits: "memory_bytes", "seconds", "count_threads"."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    seconds = int(limits["seconds"]) + 2
    wanted = {
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": _MAX_FILES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        **({"RLIMIT_NPROC": _MAX_THREADS} if limits["count_threads"] else {}),
    }
    for name, value in wanted.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    if known_architecture():
        with contextlib.suppress(OSError):
            install_filter()


def _unshare() -> bool:
    """Go on as the first process of namespaces of its own. False where that is not permitted."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or libc.unshare(_UNSHARE | (0 if uid == 0 else _NEW_USERS)):
        return False
    if uid != 0:
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:
            pass  # the ids are nobody's then, which locks in as well
    child = os.fork()
    if child == 0:
        return True
    for standard in (0, 1):
        os.close(standard)
    _, status = os.waitpid(child, 0)  # whatever started in the namespace ends with its first process
    os._exit(0 if status == 0 else 1)


def _restrict_files(paths: list[str]) -> int:
    """From now on only what is beneath `paths` can be read, and nothing written. The kernel's version of Landlock;
    0: it has none, or says no."""
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict = _LANDLOCK
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return 0
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)  # how many ways of access this version knows
    fields = [(1 << bits) - 1] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])
    attributes = struct.pack(f"{len(fields)}Q", *fields)  # of files; TCP; abstract sockets and signals
    rules = libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return 0
    for path in paths:
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = _READ_FILE | _EXECUTE | (_READ_FOLDER if os.path.isdir(path) else 0)
            libc.syscall(add, rules, 1, struct.pack("=Qi", access, folder), 0)
            os.close(folder)
    _prctl(_NO_NEW_PRIVS, 1)
    failed = libc.syscall(restrict, rules, 0)
    os.close(rules)
    return 0 if failed else version


def _become_nobody() -> bool:
    """From root to a user whom nobody else is, so that its threads are counted alone."""
    for user in (0x70000000 + os.getpid(), _ANYBODY):
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return True
    return False


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
