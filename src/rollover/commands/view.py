"""`rollover view`: runs as pages of a browser, live."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path
from urllib.parse import quote

from rollover.commands.serve import port
from rollover.commands.verb import Overrides, Verb

MOST_RUNS = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help=f"a run's directory; {MOST_RUNS} at most")
    add(
        "--host",
        metavar="HOST",
        default="127.0.0.1",
        help="what it listens on (default: 127.0.0.1, this machine alone). Another needs a token: that of the"
        " environment variable ROLLOVER_SERVER_TOKEN, or one that is made and printed",
    )
    add("--port", metavar="N", type=port, default=0, help="its port; 0: a free one (default: 0)")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    if len(args.run_dirs) > MOST_RUNS:
        raise ValueError(f"rollover view takes {MOST_RUNS} runs at most, and these are {len(args.run_dirs)}")
    from rollover.ending import GRACE_S, run_bounded
    from rollover.engine.server.guard import is_loopback, token
    from rollover.view.run_data import RunData

    runs = [RunData(directory) for directory in args.run_dirs]
    asked = token() or ("" if is_loopback(args.host) else secrets.token_urlsafe(24))
    try:
        from rollover.view.serving import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ValueError(f"rollover view needs {error.name}: pip install 'rollover[view]'") from error

    def ready(url: str) -> None:
        print(f"{url}/" + (f"#token={quote(asked, safe='')}" if asked else ""), flush=True)
        print(f"shows {', '.join(os.fspath(of) for of in args.run_dirs)}; Ctrl-C ends it", flush=True)

    return run_bounded(serve(runs, args.host, args.port, asked, ready), GRACE_S)


VERB = Verb("Show runs in a browser, live.", run, arguments, files="", keys=False)
