"""`rollover serve`: one engine behind an HTTP server, for runs with engine.kind = "remote"."""

from __future__ import annotations

import argparse
import json
import os

from rollover.commands import Overrides, Verb, load

ENGINES = ("embedded", "vllm")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="embedded", help="embedded: ours. vllm: what `make vllm` installs")
    add(
        "--host",
        metavar="HOST",
        type=host,
        default="127.0.0.1",
        help="what it listens on (default: 127.0.0.1, this machine alone). Another needs a token, in the environment"
        " variable ROLLOVER_SERVER_TOKEN of server and clients",
    )
    add("--port", metavar="N", type=port, default=8000, help="its port; 0: a free one (default: 8000)")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.processes import die_with

    die_with(os.getppid())
    config = load(args.files, overrides, require_sources=False).config
    from rollover.config.backend import is_tinker
    from rollover.http_guard import check_open_to

    check_open_to(args.host)
    if is_tinker(config):
        raise ValueError('backend.type = "tinker": the service samples, and there is no engine to serve. Remove it')
    if args.engine == "vllm":
        from rollover.engine.server.vllm import run_vllm

        return run_vllm(config, host=args.host, port=args.port, ready=ready)
    from rollover.shutdown import run_bounded

    try:
        from rollover.engine.server.app import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ValueError(f"rollover serve needs {error.name}: pip install 'rollover[remote]'") from error
    return run_bounded(serve(config, args.host, args.port, ready), config.watchdog.grace_s)


def ready(url: str) -> None:
    """Print the URL in the first line of the standard output, for a parent process."""
    print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)


def host(text: str) -> str:
    """Parse an argument: the address that a server listens on."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give an address, such as 0.0.0.0 for each that this machine has")
    return text


def port(text: str) -> int:
    """Parse an argument: a port, or 0."""
    number = int(text)
    if not 0 <= number < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return number


VERB = Verb("Serve one engine over HTTP, for runs on other processes or machines.", run, arguments)
