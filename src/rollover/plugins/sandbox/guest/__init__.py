"""Code inside the sandbox. Standard library only: launch.py sends it to a bare Python."""
