"""The command line: verbs, overrides, exit codes.

Parses arguments, and turns errors into messages and exit codes. The verbs are in commands/. Exit codes:

    0  done            1  failed (traceback, or a message: full disk, dead engine)
    2  your input      130  Ctrl-C

Set ROLLOVER_TRACEBACK=1 to see the traceback of an exit 2.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import rollover
from rollover import system
from rollover.commands import (
    VERBS,
    Overrides,
    Verb,
    conflict_notice,
    installed_verbs,
    load_verb,
    our_verbs,
    shared_arguments,
)
from rollover.files import paths_begin_in
from rollover.logs import set_format, terminal

# --table.key, --table.key=VALUE. Everything else is argparse's.
_DOTTED = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
_OVERRIDES = "Any key of the configuration can be set as --table.key VALUE, for instance --train.num_steps 5."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. argparse itself exits (0 for --help, 2 for wrong arguments).

    `argv`: None for the command line of this process, which then ends in bounded time.
    """
    if argv is not None:
        return run_verb(argv)
    try:
        code = run_verb(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    if threading.active_count() > 1:
        from rollover.shutdown import bound_end

        bound_end(code)
    return code


def run_verb(argv: Sequence[str]) -> int:
    """Run the verb of these words; raise errors other than those of the user and of the system."""
    if reason := system.refusal():
        _print_error(reason)
        return 2
    try:
        parser = build_parser(argv)
        rest, overrides = split_overrides(argv, parser)
        args = parser.parse_args(rest)
        if overrides and not args.verb.keys:
            raise ValueError(f"{args.prog} reads no configuration: leave out --{overrides[0][0]}")
        if args.log_format:
            set_format(args.log_format)
        with paths_begin_in(os.getcwd()):
            return args.verb.run(args, overrides)
    except KeyboardInterrupt:
        terminal.warning("interrupted")
        return 130
    except BrokenPipeError:
        # The reader (head, less) has ended: the exit must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        if os.environ.get("ROLLOVER_TRACEBACK"):
            traceback.print_exc()
        _print_error(_message_of(error))
        return 2
    except (OSError, RuntimeError) as error:
        if not _is_system_error(error):
            raise
        _print_error(error)
        return 1


def split_overrides(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], Overrides]:
    """Split off `--table.key VALUE` and `--table.key=VALUE`: (the other arguments, overrides in order)."""
    rest, found = _split(argv)
    overrides: Overrides = []
    for key, value in found:
        if value is None:
            parser.error(f"--{key} needs a value: --{key} VALUE (or --{key}=VALUE if the value starts with --)")
        overrides.append((key, value))
    return rest, overrides


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Split off overrides; one without a value has None."""
    rest: list[str] = []
    found: list[tuple[str, str | None]] = []
    tokens = iter(argv)
    for token in tokens:
        match = _DOTTED.fullmatch(token)
        if match is None:
            rest.append(token)
            continue
        value = match[2]
        if value is None:
            following = next(tokens, "--")
            value = None if following.startswith("--") else following
        found.append((match[1], value))
    return rest, found


class _VerbParser(argparse.ArgumentParser):
    """The arguments of one verb. Reports an unknown option before a missing argument, which it may have meant."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        options = [*re.findall(r"--[a-z-]+", self.format_usage()), "--help"]
        words = list(itertools.takewhile(lambda word: word != "--", args or ()))
        flags = [word.partition("=")[0] for word in words if word.startswith("--") and " " not in word]
        unknown = [flag for flag in flags if flag not in options]
        if not unknown:
            namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from rollover.config.suggest import unknown_flags

            self.error(unknown_flags(unknown, options, keys=self.epilog == _OVERRIDES))
        return namespace, unknown


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of all verbs and their options. It sets `args.verb`, and `args.prog` to its name.

    Verbs of other packages are loaded only where `argv` names one, or for `--help` of all. ValueError where the named
    one cannot be loaded.
    """
    parser = argparse.ArgumentParser(
        prog="rollover",
        description="Train language models by reinforcement learning with resumable rollouts.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rollover {rollover.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_VerbParser)
    for name, verb in our_verbs().items():
        _add(verbs, name, verb)
    words, _ = _split(argv)
    name_given = next((word for word in words if not word.startswith("-")), "")
    if name_given not in VERBS and (name_given or {"-h", "--help"} & set(words)):
        for name, points in installed_verbs().items():
            if not name_given or name == name_given:
                if len(points) > 1:
                    terminal.info(conflict_notice(points))
                try:
                    _add(verbs, name, load_verb(points[0]))
                except ValueError as error:
                    if name_given:
                        raise
                    verbs.add_parser(name, help=_literal(str(error)))
    return parser


def _add(verbs: argparse._SubParsersAction[_VerbParser], name: str, verb: Verb) -> None:
    """Add the parser of a verb."""
    epilog = _OVERRIDES if verb.keys else None
    sub = verbs.add_parser(name, help=_literal(verb.about), description=verb.about, epilog=epilog, allow_abbrev=False)
    sub.set_defaults(verb=verb, prog=sub.prog)
    if verb.files:
        text = "configuration, or the name of a recipe (rollover init --list); later ones override earlier ones"
        sub.add_argument("files", nargs=verb.files, metavar="FILE.toml", type=Path, help=text)
    verb.arguments(sub)
    shared_arguments(sub)


def _literal(text: str) -> str:
    """Escape a help text for formatting by %."""
    return text.replace("%", "%%")


# Errors


def _is_system_error(error: Exception) -> bool:
    """Return whether the message is enough for the user: a full disk, a failed checkpoint, engine or service."""
    from rollover.checkpoint.store import CheckpointWriteError
    from rollover.engine.protocol import EngineDied, ServiceError
    from rollover.trainer.backend import BackendLost

    if isinstance(error, BackendLost | CheckpointWriteError | EngineDied | ServiceError):
        return True
    of_disk = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return isinstance(error, OSError) and error.errno in of_disk


def _message_of(error: ValueError) -> str:
    """Return the message. An error of a library names neither our file nor key: add the modules."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    if modules[-1].partition(".")[0] == __package__ and not isinstance(error, UnicodeError):
        return str(error)
    ours = next((name for name in reversed(modules) if name.partition(".")[0] == __package__), __name__)
    return f"{ours}: {type(error).__name__} of {modules[-1]}: {error}. Set ROLLOVER_TRACEBACK=1 for the traceback"


def _print_error(error: Exception | str) -> None:
    terminal.error(str(error))
