"""The embedded engine: continuous batching in process, over transformers' own modules.

Read engine.py (step loop) first, then batch.py (sequences and queues), kv_cache.py, runner.py (forward passes) and
sampling.py (logits to token). Preemption is "drop KV, go back to waiting".
"""
