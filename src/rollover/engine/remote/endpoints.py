"""Whether a server has the endpoints that a run needs: vLLM has some of them only where it was started so.

Asked when a server joins. One that takes weights, and then no request, would fail every rollout that is sent there.
"""

from __future__ import annotations

from rollover.engine.remote.client import ServerClient
from rollover.engine.remote.wire import GENERATE, Refused, ServerFailed
from rollover.http_guard import TOKEN_VARIABLE

_NO_TOKEN = (401, 403)
_NOT_THERE = (403, 404, 405, 501)  # vLLM: 403 for what it was not started with, in earlier versions 404
_NEEDS = {GENERATE: "--enable-scale-out", "/weight_info": "VLLM_SERVER_DEV_MODE=1"}


async def check_generates(client: ServerClient, limit_s: float) -> None:
    """ServerFailed, in words, where it would never take a request. It is asked for nothing, which none carries out."""
    try:
        await client.post(GENERATE, {}, limit_s=limit_s)
    except Refused as error:
        if (why := lacking(GENERATE, error)) is not None:
            raise ServerFailed(why) from error


def lacking(path: str, error: Refused) -> str | None:
    """What a server lacks that refused `path` so; None: it has it."""
    if error.status in _NOT_THERE and path in _NEEDS:
        return (
            f"it does not have {path} ({error}): a server of vLLM has it with {_NEEDS[path]}, as `rollover serve"
            " --engine vllm` starts it"
        )
    return None


def wants_token(name: str, status: int, said: str) -> str | None:
    """What to tell whoever asked the server `name` without its token; None: that is not the fault."""
    if status not in _NO_TOKEN:
        return None
    return (
        f"the server {name} answers {status} ({said}): it wants a token. Set the environment variable {TOKEN_VARIABLE}"
        " to the one that it was started with"
    )
