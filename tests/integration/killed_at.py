"""`rollover` that gets SIGKILL at the Nth call of one of its public methods, before that does anything.

python killed_at.py rollover.track.jsonl:JsonlSink.write 3 train RECIPE ...
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from rollover import cli


def main() -> int:
    place, count = sys.argv[1], int(sys.argv[2])
    module, _, path = place.partition(":")
    name, _, method = path.partition(".")
    owner = getattr(importlib.import_module(module), name)
    original, calls = getattr(owner, method), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, method, counted)
    return cli.main(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
