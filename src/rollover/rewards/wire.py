"""What a reward worker may say, and what of it is believed. Import-light: both ends use it. No I/O.

Every request has a call id, and every reply to it the same one. A line that is not such a reply is nobody's reward: it
is a failure of the worker.
"""

from __future__ import annotations

import json
from typing import Any

from rollover.functions import is_score

MAX_LINE_BYTES = 64 * 2**20


class BadReply(Exception):
    """What came out of the worker is not a reply to the present call; the text completes "the reward worker ..."."""


def reply_of(line: bytes, call: int) -> dict[str, Any]:
    """The reply in this line. BadReply unless it is one to `call`."""
    try:
        reply = json.loads(line)
    except ValueError:
        raise BadReply("said something that is no reply") from None
    if not isinstance(reply, dict) or not isinstance(reply.get("call"), int):
        raise BadReply("said something that is no reply")
    if reply["call"] != call:
        raise BadReply("answered another call")
    return reply


def results_of(reply: dict[str, Any], mode: str, missing: set[int]) -> dict[int, dict[str, Any]]:
    """The results in a reply, by the index of their item: each {"score", "extras"} and maybe "shaping", finite numbers,
    and "texts", or {"error"}.

    BadReply unless they are those of `missing` items: one of them, in mode "batch" all.
    """
    if mode == "batch":
        results = [reply] * len(missing) if "error" in reply else reply.get("results")
        return dict(zip(sorted(missing), _checked(results, len(missing)), strict=True))
    index = reply.get("index")
    if not isinstance(index, int) or index not in missing:
        raise BadReply("scored another sample")
    return {index: _checked([reply.get("result")], 1)[0]}


def _checked(results: Any, num: int) -> list[dict[str, Any]]:
    if not isinstance(results, list) or len(results) != num or not all(map(_is_result, results)):
        raise BadReply("gave results that are none")
    return results


def _is_result(result: Any) -> bool:
    if not isinstance(result, dict):
        return False
    if "error" in result:
        return isinstance(result["error"], str)
    parts, texts = (result.get("extras"), result.get("shaping", {})), result.get("texts", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        return False
    return _is_number(result.get("score")) and all(
        isinstance(part, dict) and all(map(_is_number, part.values())) for part in parts
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and is_score(value)


def line_of(message: dict[str, Any]) -> str:
    """A reply as a line. One that is too long for a line is a failure instead, under the same call and index."""
    line = json.dumps(message) + "\n"
    if len(line) <= MAX_LINE_BYTES:  # JSON of ASCII characters
        return line
    failure = {"error": f"the function's result is {len(line) / 2**20:.0f} MiB long, above {MAX_LINE_BYTES >> 20} MiB"}
    rest = {key: message[key] for key in ("call", "index") if key in message}
    return json.dumps(rest | ({"result": failure} if "index" in rest else failure)) + "\n"
