"""An engine over HTTP: servers that speak vLLM's `/inference/v1/generate`, each with its own weights."""
