"""`python -m rollover`: the same as the command `rollover`."""

import sys

from rollover import cli


def main(*words: str) -> None:
    """A child that is bound to its parent (processes.child_command): one verb, and the end of the process."""
    sys.exit(cli.main(words))


if __name__ == "__main__":
    sys.exit(cli.main())
