"""How new weights get from the trainer to an engine: protocol.py says what a transport does, build.py names them."""
