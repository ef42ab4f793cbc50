"""Members that fail and come back, and the calls that wait for one (pool.py)."""
