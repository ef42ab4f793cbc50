"""`rollover view`: runs as pages of a browser, live."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rollover.commands import Overrides, Verb
from rollover.commands.serve import host, port

if TYPE_CHECKING:
    from rollover.plugins.dashboard.run_data import RunData

MOST_RUNS = 8


def add_run_dirs(parser: argparse.ArgumentParser) -> None:
    """Add the argument for `open_runs`."""
    text = f"a run's directory; {MOST_RUNS} at most"
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help=text)


def open_runs(run_dirs: Sequence[Path], patience_s: float = float("inf")) -> list[RunData]:
    """Open the runs in these directories; ValueError without a run, or for too many. `patience_s`: see RunData."""
    from rollover.plugins.dashboard.run_data import RunData

    if len(run_dirs) > MOST_RUNS:
        raise ValueError(f"RUN_DIR: {len(run_dirs)} runs, at most {MOST_RUNS} can be shown together")
    return [RunData(directory, patience_s=patience_s) for directory in run_dirs]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dirs(parser)
    add = parser.add_argument
    add(
        "--host",
        metavar="HOST",
        type=host,
        default="127.0.0.1",
        help="what it listens on (default: 127.0.0.1, this machine alone). Another needs a token: that of the"
        " environment variable ROLLOVER_SERVER_TOKEN, or one that is made and printed",
    )
    add("--port", metavar="N", type=port, default=0, help="its port; 0: a free one (default: 0)")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.http_guard import is_loopback, token
    from rollover.plugins.dashboard.run_data import PATIENCE_S
    from rollover.shutdown import GRACE_S, run_bounded

    runs = open_runs(args.run_dirs, PATIENCE_S)
    required = token() or ("" if is_loopback(args.host) else secrets.token_urlsafe(24))
    try:
        from rollover.plugins.dashboard.app import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ValueError(f"rollover view needs {error.name}: pip install 'rollover[view]'") from error

    def ready(url: str) -> None:
        print(f"{url}/" + (f"#token={quote(required, safe='')}" if required else ""), flush=True)
        print(f"shows {', '.join(os.fspath(of) for of in args.run_dirs)}; Ctrl-C ends it", flush=True)

    return run_bounded(serve(runs, args.host, args.port, required, ready), GRACE_S)


VERB = Verb("Show runs in a browser, live.", run, arguments, files="", keys=False)
