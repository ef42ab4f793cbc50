"""The ledger of a run as its last row of metrics tells it: generated = trained + dropped + held, by reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_DROPPED = re.compile(r"dropped/(.+)/(groups|tokens)")
_FILTERED = re.compile(r"filtered/(.+)/groups")


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is in an account. `tokens`: sampled ones."""

    groups: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where everything is that the run generated so far. `dropped`: by reason, those that are not empty. `filtered`:
    the groups of dropped["filtered"] by the filter's name. `reprefilled`: tokens that the engine computed twice, a
    cost beside the accounts."""

    generated: Amount
    trained: Amount
    held: Amount
    dropped: Mapping[str, Amount]
    filtered: Mapping[str, int]
    reprefilled: int

    @property
    def missing(self) -> Amount:
        """What is in no account: nothing, in the row of a run."""
        left = [self.trained, self.held, *self.dropped.values()]
        return Amount(
            self.generated.groups - sum(amount.groups for amount in left),
            self.generated.tokens - sum(amount.tokens for amount in left),
        )

    def as_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def accounts_of(row: Mapping[str, Any]) -> Accounts | None:
    """The accounts in a row of metrics.jsonl; None where it has none (before the first step)."""
    if row.get("tokens/generated") is None:
        return None

    def amount(groups: str, tokens: str) -> Amount:
        return Amount(int(row.get(groups) or 0), int(row.get(tokens) or 0))

    reasons = dict.fromkeys(match[1] for key in row if (match := _DROPPED.fullmatch(key)))
    dropped = {reason: amount(f"dropped/{reason}/groups", f"dropped/{reason}/tokens") for reason in reasons}
    return Accounts(
        generated=amount("groups/admitted", "tokens/generated"),
        trained=amount("groups/consumed", "tokens/trained"),
        held=amount("groups/held", "tokens/held"),
        dropped={reason: of for reason, of in dropped.items() if of.groups or of.tokens},
        filtered={match[1]: int(row[key] or 0) for key in row if (match := _FILTERED.fullmatch(key))},
        reprefilled=int(row.get("engine/reprefill_tokens") or 0),
    )
