"""An engine over HTTP: servers that speak one dialect (engine.dialect), each with its own weights."""
