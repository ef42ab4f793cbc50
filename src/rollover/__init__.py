"""Rollover: reinforcement learning of language models with resumable rollouts."""

__version__ = "0.1.0"
