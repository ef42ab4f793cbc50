"""`rollover serve`: an engine behind the endpoints of vLLM's server, for engine/remote.

requests (what is asked, checked), stream (one request under way), service (the verbs; no HTTP), metrics (Prometheus'
text), app (the routes), guard (the token), embedded (our engine behind them, in this process).
"""
