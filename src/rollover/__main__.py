"""`python -m rollover`: the same as the command `rollover`."""

import sys

from rollover import cli


def main(*words: str) -> None:
    """Run one verb in a child that is bound to its parent (processes.child_command), and end the process."""
    sys.exit(cli.main(words))


if __name__ == "__main__":
    sys.exit(cli.main())
