"""`rollover serve`: an engine behind the endpoints of vLLM's server, for engine/remote.

app.py (process, routes, metrics), requests.py (validated bodies), service.py (requests in flight, pause, weights; no
HTTP), texts.py (OpenAI's text endpoints), vllm.py (vLLM's own server as a child process).
"""
