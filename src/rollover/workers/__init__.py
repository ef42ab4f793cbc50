"""Child processes of this project that answer calls: `Worker` in the parent (worker.py), `Calls` in the child
(child.py), one framing between them (framing.py)."""
