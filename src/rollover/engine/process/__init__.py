"""The embedded engine in a child process.

engine.py (the contract, restarts, and the client of one process), child.py (main of the process), messages.py (requests
and segments as JSON).
"""
