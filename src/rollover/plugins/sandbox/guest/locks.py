"""How a process locks itself in: limits, another user, no capabilities, Landlock, namespaces, a system call filter.

`lock_runner` applies to the whole sandbox, before it reads a program; `lock_program` to the process that runs one. Each
lock is optional, and the result lists the active ones; guarantees.py tests them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from functools import cache
from typing import Any

_UNSHARE = 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # of processes, networks, shared memory, host names
_NEW_USERS = 0x10000000
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK = (444, 445, 446)  # create a ruleset, add a rule, restrict oneself: the same numbers everywhere
_READ_FILE, _READ_FOLDER, _EXECUTE = 1 << 2, 1 << 3, 1
_MAX_THREADS, _MAX_FILES, _STACK_BYTES = 64, 64, 120 << 20
_ANYBODY = 65534


def lock_runner(policy: dict[str, Any]) -> dict[str, Any]:
    """Lock this process in, and return the active locks. May continue in a child (namespaces).

    policy: "namespaces", "landlock": bool; "paths": readable ones; "user": drop root's user id.
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
    """Lock the process of a program in. limits: "memory_bytes", "seconds", "count_threads"."""
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
    """Continue as the first process of new namespaces. Return False if that is not permitted."""
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
            pass  # the user is then "nobody", which is as good
    child = os.fork()
    if child == 0:
        return True
    for standard in (0, 1):
        os.close(standard)
    _, status = os.waitpid(child, 0)  # all processes of the namespace end with its first one
    os._exit(0 if status == 0 else 1)


def _restrict_files(paths: list[str]) -> int:
    """Allow reading below `paths` only, and no writing. Return the kernel's Landlock version; 0: unavailable."""
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict = _LANDLOCK
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return 0
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)  # access rights of this version
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
    """Change from root to an unused user id, whose threads are counted separately."""
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


# The system call filter of a program: seccomp, by ctypes.
#
# An allow-list: other calls fail with EPERM, and newer ones with ENOSYS, so that the C library falls back. Allowed are
# the calls that Python needs to compute, read files and start threads. Not allowed: network sockets, processes and
# programs, signals to others, changes of files, names or owners, shared memory outside the process, tracing,
# priorities, namespaces, mounts and modules. Numbers: the kernel's asm/unistd_64.h and asm-generic/unistd.h.

_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets into struct seccomp_data; arguments are 64 bits wide each
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_NEWER = 424  # pidfd_send_signal; above it numbers are those of every architecture

# Allowed with any arguments: (x86_64, aarch64); -1: not on this architecture.
_PLAIN = """
read 0 63, write 1 64, close 3 57, fstat 5 80, newfstatat 262 79, stat 4 -1, lstat 6 -1, statx 332 291, lseek 8 62,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, mincore 27 232, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, pread64 17 67, readv 19 65, writev 20 66, access 21 -1, faccessat 269 48,
faccessat2 439 439, pipe 22 -1, pipe2 293 59, select 23 -1, pselect6 270 72, poll 7 -1, ppoll 271 73,
sched_yield 24 124, dup 32 23, dup2 33 -1, dup3 292 24, nanosleep 35 101, clock_nanosleep 230 115,
clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -1, getitimer 36 102, setitimer 38 103,
alarm 37 -1, pause 34 -1, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_delete 226 111,
timer_getoverrun 225 109, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgrp 111 -1,
getpgid 121 155, getsid 124 156, uname 63 160, getdents 78 -1, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, readlink 89 -1, readlinkat 267 78, umask 95 166, getrusage 98 165, times 100 153, sysinfo 99 179,
getpriority 140 141, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, futex 202 98, set_robust_list 273 99,
set_tid_address 218 96, rseq 334 293, restart_syscall 219 128, exit 60 93, exit_group 231 94, arch_prctl 158 -1,
wait4 61 260, waitid 247 95, getrlimit 97 163, setrlimit 160 164, getrandom 318 278, membarrier 324 283,
epoll_create 213 -1, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -1, epoll_pwait 281 22,
epoll_pwait2 441 441, eventfd2 290 19, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212,
shutdown 48 210, getsockopt 55 209, setsockopt 54 208,
getsockname 51 204, getpeername 52 205, statfs 137 43, fstatfs 138 44, futex_waitv 449 449,
getcpu 309 168
"""
_WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
_CLONE_THREAD = 0x10000
_TERMINAL = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, 0x5413)  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TIOCGWINSZ
_DUPLICATE = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)  # of fcntl; not F_SETOWN and F_SETSIG, which signal others
_NAMES = (15, 16, 0x53564D41)  # of prctl: of a thread, of a mapping

Rule = tuple[int, str, tuple[int, ...]]  # argument, "is" | "has" | "lacks", values or bits


def _conditional(own_pid: int) -> dict[tuple[int, int], list[Rule]]:
    """Return calls that are allowed if every rule holds."""
    return {
        (2, -1): [(1, "lacks", (_WRITING,))],  # open
        (257, 56): [(2, "lacks", (_WRITING,))],  # openat
        (16, 29): [(1, "is", _TERMINAL)],  # ioctl
        (72, 25): [(1, "is", _DUPLICATE)],  # fcntl
        (157, 167): [(0, "is", _NAMES)],  # prctl
        (302, 261): [(0, "is", (0,))],  # prlimit64, of oneself
        # socketpair, which cannot be connected to anything else: event loops wake up by it.
        (53, 199): [(0, "is", (1,)), (1, "is", (1, 1 | 0o4000, 1 | 0o2000000, 1 | 0o2004000))],
        (62, 129): [(0, "is", (own_pid,))],  # kill
        (234, 131): [(0, "is", (own_pid,))],  # tgkill: abort, and signals to a thread
        (56, 220): [(0, "has", (_CLONE_THREAD,))],  # clone
    }


_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def known_architecture() -> bool:
    """Return whether the filter supports this machine."""
    return os.name == "posix" and platform.system() == "Linux" and platform.machine() in _ARCHITECTURES


def filter_program() -> bytes:
    """Return the filter of this process in the kernel's format. KeyError on an unknown architecture."""
    column, _ = _ARCHITECTURES[platform.machine()]
    steps = []
    for numbers, rules in _conditional(os.getpid()).items():
        if numbers[column] >= 0:
            body = [step for rule in rules for step in _checked(rule)] + [(_RETURN, 0, 0, _ALLOW)]
            steps += [(_EQUAL, 0, len(body), numbers[column]), *body]
    steps += [(_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    return _plain_part() + _packed(steps)


def prepare_filter() -> None:
    """Compute the shared part of all filters before processes fork."""
    if known_architecture():
        _plain_part()


@cache
def _plain_part() -> bytes:
    column, arch = _ARCHITECTURES[platform.machine()]
    steps = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32's numbers, on x86_64
        (_RETURN, 0, 0, _KILL),
    ]
    for entry in _PLAIN.replace("\n", " ").split(","):
        number = int(entry.split()[1 + column])
        if number >= 0:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return _packed(steps)


def _packed(steps: list[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _checked(rule: Rule) -> list[tuple[int, int, int, int]]:
    """Return steps that continue if the rule holds, and refuse the call if not."""
    argument, word, values = rule
    steps = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]  # the low half: the kernel uses 32 bits of these
    if word == "is":
        steps += [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    else:
        wanted = word == "has"
        steps += [(_ANY_BIT, 1 if wanted else 0, 0 if wanted else 1, values[0])]
    return [*steps, (_RETURN, 0, 0, _EPERM)]


def install_filter() -> None:
    """Install the filter for this process and its future threads, irrevocably.

    OSError on failure; KeyError on an unknown architecture.
    """
    program = filter_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(described, len(described)), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no filter of system calls")
