"""What runs inside the sandbox. Standard library only: it is sent to a bare Python (rewards/sandbox/launch.py)."""
