"""What a rule over more than one option is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollover.config import Config


@dataclass(frozen=True)
class Inert:
    """`options` have no effect when `when(config)` holds; `because` names the settings that switch them off.

    `why` completes "<option> has no effect ..."; `fix` says how to give it one. `neutral`: values that
    the options may have all the same; those of an earlier layer are reset to the first. Empty: the default.
    """

    options: tuple[str, ...]
    because: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str
    fix: str = ""
    neutral: tuple[Any, ...] = ()

    def message(self, key: str) -> str:
        advice = f"{self.fix}, or remove {key}" if self.fix else f"Remove {key}"
        return f"{key} has no effect {self.why}. {advice}"


@dataclass(frozen=True)
class Refused:
    """A combination of `keys` that is an error when `when(config)` holds. `message` says why, and what to change."""

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    message: Callable[[Config], str]
