"""Supervised child processes: `Worker` in the parent (worker.py), `Calls` in the child (child.py). pool.py restarts
members that fail, and queues calls for them."""
