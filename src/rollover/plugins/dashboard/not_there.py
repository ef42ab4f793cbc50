"""What a question asks for is not there: a matter of the question, and of no file of the run."""

from __future__ import annotations


class NotThere(KeyError):
    """Its one argument is the message."""
