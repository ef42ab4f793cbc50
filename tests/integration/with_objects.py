"""`rollover WORDS` in a process that knows the object store of tests/dying_store.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import dying_store  # noqa: E402, F401 - it registers the store
from rollover.cli import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
