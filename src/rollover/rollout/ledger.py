"""The ledger: every admitted task and every sampled token is in exactly one account.

Accounts: waiting, running, parked, scoring, ready (together: held, read off the cache), trained, dropped(reason).
Owns the cumulative counters of what left the cache. Invariants, at every moment and across restarts:
generated = trained + dropped + held (tokens), admitted = consumed + dropped + held (groups and rollouts).
Never changes a rollout. A token counts as generated when its segment is appended; environment tokens never count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rollover.rollout.cache import RolloutCache
from rollover.staleness import EVERY_VERSION
from rollover.types import DropReason, Group, Rollout, RolloutState, Segment, StopReason


@dataclass(slots=True)
class Account:
    """Contents of one account. `tokens`: those that a policy sampled."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0

    def add(self, group: Group, times: int = 1) -> None:
        self.groups += times
        self.rollouts += times * len(group.rollouts)
        self.tokens += times * sum(r.num_sampled_tokens for r in group.rollouts)


@dataclass
class Ledger:
    """Cumulative counters since the first step of the run. Lifecycle reports every change of the cache."""

    generated_tokens: int = 0
    environment_tokens: int = 0  # in no account: not sampled
    admitted_groups: int = 0
    admitted_rollouts: int = 0
    resumed_rollouts: int = 0  # times that a parked rollout was started again
    trained: Account = field(default_factory=Account)
    dropped: dict[DropReason, Account] = field(default_factory=lambda: {reason: Account() for reason in DropReason})
    filtered: Counter[str] = field(default_factory=Counter)  # by the filter's name: the groups in dropped(filtered)

    def on_admit(self, group: Group) -> None:
        self.admitted_groups += 1
        self.admitted_rollouts += len(group.rollouts)

    def on_append(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if segment.trainable:
                self.generated_tokens += segment.num_tokens
            else:
                self.environment_tokens += segment.num_tokens

    def on_consume(self, group: Group, oldest_in_loss: int = EVERY_VERSION, times: int = 1) -> None:
        """Count a group as trained. `times` = -1 undoes that.

        Its tokens count as trained, except those of a greedy baseline, dropped(baseline), of a rollout with an
        abandoned call, dropped(abandoned), and of versions below `oldest_in_loss`, dropped(masked).
        """
        self.trained.add(group, times)
        sampled = [r for r in group.rollouts if not r.greedy]
        baseline = sum(r.num_sampled_tokens for r in group.rollouts if r.greedy)
        self._not_trained(DropReason.BASELINE, times * baseline)
        abandoned = [r for r in sampled if r.stop_reason is StopReason.ABANDONED]
        self._not_trained(DropReason.ABANDONED, times * sum(r.num_sampled_tokens for r in abandoned))
        if oldest_in_loss > EVERY_VERSION:
            segments = [s for r in sampled if r not in abandoned for s in r.segments if s.trainable]
            masked = sum(len(s) for s in segments if s.policy_version < oldest_in_loss)
            self._not_trained(DropReason.MASKED, times * masked)

    def _not_trained(self, reason: DropReason, num_tokens: int) -> None:
        self.trained.tokens -= num_tokens
        self.dropped[reason].tokens += num_tokens

    def on_drop(self, group: Group, reason: DropReason) -> None:
        self.dropped[reason].add(group)

    def on_leave(self, rollouts: Iterable[Rollout], reason: DropReason) -> None:
        """Count rollouts that left their group, which stays held."""
        account = self.dropped[reason]
        for rollout in rollouts:
            account.rollouts += 1
            account.tokens += rollout.num_sampled_tokens

    def held(self, cache: RolloutCache) -> dict[RolloutState, Account]:
        """Return rollouts and tokens of the held groups by state (`groups` is 0: states of siblings may differ)."""
        accounts = {s: Account() for s in RolloutState if s not in (RolloutState.CONSUMED, RolloutState.DROPPED)}
        for group in cache.groups.values():
            for rollout in group.rollouts:
                accounts[rollout.state].rollouts += 1
                accounts[rollout.state].tokens += rollout.num_sampled_tokens
        return accounts

    def check(self, cache: RolloutCache) -> None:
        """Raise AssertionError, with all accounts, unless every task and token is in exactly one account."""
        held = self.held(cache)
        left = [self.trained, *self.dropped.values()]
        balances = {
            "tokens": (self.generated_tokens, sum(a.tokens for a in [*left, *held.values()])),
            "rollouts": (self.admitted_rollouts, sum(a.rollouts for a in [*left, *held.values()])),
            "groups": (self.admitted_groups, sum(a.groups for a in left) + len(cache.groups)),
            "admissions": (self.admitted_groups, cache.num_admitted),
            "filtered groups": (self.filtered.total(), self.dropped[DropReason.FILTERED].groups),
        }
        wrong = {name: pair for name, pair in balances.items() if pair[0] != pair[1]}
        if wrong:
            accounts = {s.value: asdict(a) for s, a in held.items()}
            accounts |= {"trained": asdict(self.trained)}
            accounts |= {f"dropped({r.value})": asdict(a) for r, a in self.dropped.items()}
            raise AssertionError(f"the ledger does not balance (in, accounted for): {wrong}; accounts: {accounts}")

    def metrics(self, cache: RolloutCache) -> dict[str, float]:
        """Return cumulative sums, except tokens/held and groups/held, which are current."""
        metrics: dict[str, float] = {
            "tokens/generated": self.generated_tokens,
            "tokens/trained": self.trained.tokens,
            "tokens/dropped": sum(a.tokens for a in self.dropped.values()),
            "tokens/held": sum(a.tokens for a in self.held(cache).values()),
            "groups/admitted": self.admitted_groups,
            "groups/consumed": self.trained.groups,
            "groups/dropped": sum(a.groups for a in self.dropped.values()),
            "groups/held": len(cache.groups),
            "rollouts/resumed": self.resumed_rollouts,
        }
        for reason, account in self.dropped.items():
            metrics[f"dropped/{reason.value}/groups"] = account.groups
            metrics[f"dropped/{reason.value}/tokens"] = account.tokens
        metrics |= {f"filtered/{name}/groups": num for name, num in sorted(self.filtered.items())}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return JSON."""
        state = vars(self) | {"trained": asdict(self.trained), "filtered": dict(self.filtered)}
        return state | {"dropped": {reason.value: asdict(account) for reason, account in self.dropped.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # a checkpoint of an earlier version has no environment_tokens
        self.trained = Account(**state["trained"])
        # A reason that is newer than the checkpoint starts at zero.
        self.dropped = {reason: Account(**state["dropped"].get(reason.value, {})) for reason in DropReason}
        self.filtered = Counter(state.get("filtered", {}))  # absent in a checkpoint from before there were filters
