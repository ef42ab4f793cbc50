"""Transports of new weights from the trainer to an engine: protocol.py has what they share."""
