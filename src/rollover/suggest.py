"""Near names: which known name a wrong one may have meant. Every message that says "did you mean" asks here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable


def alike(name: str, known: Iterable[str], num: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most `num` of `known` that resemble `name` (difflib's ratio, at least `cutoff`), best first."""
    return difflib.get_close_matches(name, list(known), n=num, cutoff=cutoff)


def similarity(a: str, b: str) -> float:
    """How alike two names are, from 0 to 1."""
    return difflib.SequenceMatcher(None, a, b).ratio()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message with the known name that `name` resembles, or ""."""
    near = alike(name, known)
    return f". Did you mean {json.dumps(near[0])}?" if near else ""
