"""Child processes that answer calls: `Worker` in the parent (worker.py), `Calls` in the child (child.py). Members that
fail and come back, and the calls that wait for one: pool.py."""
