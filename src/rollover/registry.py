"""Plugins by name. The core imports none of them: `load` imports one when the configuration or a verb names it.

A static table, not entry points: tests and GPU machines run from a source tree that is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
    "task sources": {"verifiers": "rollover.plugins.verifiers.source:taskset_source"},
    "rewards": {"code": "rollover.plugins.sandbox.reward:code"},
    "statements on rewards": {"code": "rollover.plugins.sandbox.reward:stated"},
    "trackers": {"tools": "rollover.plugins.trackers.tools:Tools"},
}
"""kind -> name -> module:attribute."""


def load(kind: str, name: str) -> Any:
    """Import and return the plugin `name` of a kind of PLUGINS."""
    return imported(PLUGINS[kind][name])


def imported(place: str) -> Any:
    """Import and return module:attribute."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
