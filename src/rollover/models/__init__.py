"""The policy network as engine and trainer both see it: loading, attention over packed rows, token log-probs."""
