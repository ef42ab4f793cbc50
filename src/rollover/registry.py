"""Parts by name: plugins of this package, and what other installed distributions register as entry points.

The core imports no plugin: `load` imports one when the configuration or a verb names it. PLUGINS is a static table, as
tests and GPU machines run from a source tree that is not installed. Another distribution registers a part of a kind by
an entry point of the group `rollover.<kind>`; docs/own-functions.md has the kinds. Our names come first: an entry point
never replaces one. Nothing is imported before it is used: a name becomes its `module:attribute` by metadata alone.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollover.suggest import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_DASHBOARD = "rollover.plugins.dashboard.verbs"
PLUGINS: dict[str, dict[str, str]] = {
    "verbs": {
        "convert": "rollover.plugins.convert.verb:VERB",
        **{name: f"{_DASHBOARD}.{name}:VERB" for name in ("show", "view", "report", "trace")},
    },
    "engines": {"tinker": "rollover.plugins.tinker.engine:make_tinker"},
    "backends": {"tinker": "rollover.plugins.tinker.backend:make_tinker"},
    "clusters": {"ray": "rollover.plugins.ray.start:open_ray"},
    "workflows": {"verifiers": "rollover.plugins.verifiers.workflow:VerifiersWorkflow"},
    "task_sources": {"verifiers": "rollover.plugins.verifiers.source:taskset_source"},
    "rewards": {"code": "rollover.plugins.sandbox.reward:code"},
    "reward_statements": {"code": "rollover.plugins.sandbox.reward:describe"},
    "trackers": {"external": "rollover.plugins.trackers.external:ExternalTrackers"},
}
"""kind -> name -> module:attribute."""

KINDS: dict[str, str] = {
    "advantages": "rollover.config.traits:ADVANTAGES",
    "after_scoring": "",
    "backends": "rollover.config.backend:BACKENDS",
    "before_produce": "",
    "clusters": "rollover.config.cluster:CLUSTERS",
    "curricula": "rollover.config.curriculum:CURRICULA",
    "dialects": "rollover.config.train:DIALECTS",
    "engines": "rollover.config.train:ENGINES",
    "environments": "rollover.config.rollout:ENVIRONMENTS",
    "filters": "",
    "groupings": "",
    "hooks": "",
    "losses": "rollover.config.traits:LOSSES",
    "metrics": "",
    "orders": "rollover.config.rollout:ORDERS",
    "privileged": "",
    "producers": "",
    "rewards": "rollover.rewards.built_in:BUILT_IN",
    "task_sources": "rollover.config.tasks:SOURCES",
    "tool_environments": "",
    "tool_formats": "rollover.config.workflow:TOOL_FORMATS",
    "trackers": "rollover.config.run:TOOLS",
    "verbs": "rollover.commands:VERBS",
    "workflows": "",
}
"""kind -> module:attribute of the collection of our own names; "": we have none. The entry points of a kind have the
group `rollover.<kind>`."""


def load(kind: str, name: str) -> Any:
    """Import and return the plugin `name` of a kind of PLUGINS."""
    return imported(PLUGINS[kind][name])


def imported(place: str) -> Any:
    """Import and return module:attribute."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def resolved(kind: str, value: Any) -> Any:
    """Return `value` with the `module:attribute` of its entry point in place of each registered name.

    `value`: a name, or a list or mapping of names. Our names, functions (`module:function`) and unknown names stay, as
    does a name that several distributions register.
    """
    if isinstance(value, str):
        return _resolved_name(kind, value)
    if isinstance(value, list | tuple):
        return [resolved(kind, item) for item in value]
    return {name: resolved(kind, item) for name, item in value.items()} if isinstance(value, Mapping) else value


def why_unknown(kind: str, name: str) -> str:
    """Return what is wrong with a name that is neither ours, registered nor a function; "" if nothing."""
    if ":" in name or name in _ours(kind):
        return ""
    found = registered(kind)
    if points := found.get(name):
        places = [f"{place_of(point)} ({package_of(point)})" for point in points]
        return f"is registered by several packages: {', '.join(places)}. Write one of these as module:function"
    known = [*_ours(kind), *found]
    listed = f"is none of {', '.join(known)}, and" if known else "is"
    return f"{listed} no function (module:function or path.py:function){did_you_mean(name, known)}"


def registered(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of other distributions for a kind, by name; ours and names with a colon are left out.

    Entry points of one name are in the order of their packages. Nothing is imported.
    """
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=f"rollover.{kind}"), key=lambda point: (package_of(point), point.value)):
        if point.name not in _ours(kind) and ":" not in point.name:
            found.setdefault(point.name, []).append(point)
    return found


def place_of(point: EntryPoint) -> str:
    """Return the module:attribute of an entry point, without its extras."""
    return point.value.partition("[")[0].replace(" ", "")


def package_of(point: EntryPoint) -> str:
    """Return the name of the distribution that registers an entry point."""
    return point.dist.name if point.dist is not None else ""


def _resolved_name(kind: str, name: str) -> str:
    if not name or ":" in name or name.partition("/")[0] in _ours(kind):  # gsm8k/{"method": "flexible"}
        return name
    return _unambiguous(kind, tuple(sys.path)).get(name, name)


@cache
def _unambiguous(kind: str, path: tuple[str, ...]) -> dict[str, str]:
    """Name -> module:attribute of the names that one distribution registers. `path`: sys.path, which says which
    distributions there are."""
    return {name: place_of(points[0]) for name, points in registered(kind).items() if len(points) == 1}


def _ours(kind: str) -> Collection[str]:
    return imported(place) if (place := KINDS[kind]) else ()
