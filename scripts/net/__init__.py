"""The net under a redesign: golden runs, resuming across commits, and a kill matrix (docs: CONTRIBUTING.md)."""
