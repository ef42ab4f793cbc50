"""`python -m rollover`: the same as the command `rollover`."""

import sys

from rollover.cli import main

if __name__ == "__main__":
    sys.exit(main())
