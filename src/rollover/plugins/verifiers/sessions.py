"""Whose call it is: verifiers sends the id of its trace with each, and the gateway asks for the key of a trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SESSION, _KEY = b"x-session-id", b"authorization"


class Sessions:
    """The API keys of the trajectories that are played, by the ids of their traces."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def add(self, trace_id: str, api_key: str) -> None:
        """From now on calls of this trace are of this trajectory."""
        self._keys[trace_id] = api_key

    def forget(self, trace_ids: Iterable[str]) -> None:
        """They make no more calls."""
        for trace_id in trace_ids:
            self._keys.pop(trace_id, None)

    def over(self, app: Any) -> Any:
        """The ASGI application `app`, for calls that say the id of a trace in place of the key."""

        async def joined(scope: Any, receive: Any, send: Any) -> None:
            await app(self._with_key(scope) if scope["type"] == "http" else scope, receive, send)

        return joined

    def _with_key(self, scope: Any) -> Any:
        said = next((value for name, value in scope["headers"] if name == _SESSION), b"")
        key = self._keys.get(said.decode("latin-1"))
        if key is None:
            return scope
        headers = [(name, value) for name, value in scope["headers"] if name != _KEY]
        return {**scope, "headers": [*headers, (_KEY, f"Bearer {key}".encode())]}
