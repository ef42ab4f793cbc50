"""[backend], and the rules about it."""

from rollover.alike import did_you_mean
from rollover.config.table import Refused, Rule, Table, is_own, option

# The function of a `BackendSetup` that makes each, loaded when it is called: the names alone load nothing heavy.
BACKENDS = {"local": "rollover.trainer.build:make_local"}


class BackendConfig(Table):
    """[backend]: what holds the weights and trains them (docs/backends.md)."""

    type: str = option(
        "local",
        "local: this machine. Or your own function (module:function or path.py:function), which makes a trainer's"
        " backend.",
    )


RULES: tuple[Rule, ...] = (
    Refused(
        ("backend.type",),
        lambda c: c.backend.type not in BACKENDS and not is_own(c.backend.type),
        lambda c: (
            f'backend.type = "{c.backend.type}" is none of {", ".join(BACKENDS)}, and no function (module:function or'
            f" path.py:function){did_you_mean(c.backend.type, BACKENDS)}"
        ),
    ),
)
