"""Agents reach the gateway directly, whatever proxy the user's shell names (HTTP_PROXY).

Clients read that from the environment: the user's own in this process, and those in child processes. So it is there
that the gateway's host is named as one without a proxy, while a gateway is served. Owns what the variables said before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("NO_PROXY", "no_proxy")
_changed: dict[str, tuple[str | None, str]] = {}  # what each said before, and what it says since
_num_inside = 0  # several gateways may be served at once, and this process has one environment


@contextmanager
def without_proxy(host: str) -> Iterator[None]:
    """Inside, clients of this process, and of those that it starts, ask `host` directly. When the last one leaves, the
    variables say what they said before, but for one that somebody else has changed meanwhile."""
    global _num_inside
    _num_inside += 1
    for name in NAMES:
        before = os.environ.get(name)
        hosts = [known for known in (before or "").split(",") if known]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])
            _changed[name] = before, os.environ[name]
    try:
        yield
    finally:
        _num_inside -= 1
        if not _num_inside:
            _take_back()


def _take_back() -> None:
    for name, (before, ours) in _changed.items():
        if os.environ.get(name) != ours:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _changed.clear()
