"""The embedded engine in a child process.

engine.py (the contract, restarts, the client of one process, and the messages), child.py (main of the process).
"""
