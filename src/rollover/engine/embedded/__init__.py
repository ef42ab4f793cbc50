"""The embedded engine: continuous batching in process, over transformers' own modules.

sequence (what is being continued), kv_cache (where its keys and values are), batcher (who runs, in which memory),
runner (the forward passes), sampler (the draw), engine (the contract). Preemption is "drop KV, go back to waiting".
"""
