"""The embedded engine in a process of its own.

engine (the contract, and which process is the present one), client (our end of one process), child (what runs in it),
messages (requests and segments as JSON).
"""
