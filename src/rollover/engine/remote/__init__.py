"""An engine over HTTP: servers of some kind (engine.dialect), each with its own weights."""
