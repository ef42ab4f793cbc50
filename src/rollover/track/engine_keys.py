"""The metric keys of engines: a part of the table in metric_keys.py."""

from __future__ import annotations

from rollover.track.metric import Metric

ENGINE: list[Metric] = [
    Metric("engine/decode_steps", "counter", "steps", "Decode steps; of servers and services: tokens."),
    Metric(
        "engine/prefill_tokens",
        "counter",
        "tokens",
        "Tokens prefilled for the first time; of servers: sent, cached ones included.",
    ),
    Metric("engine/reprefill_tokens", "counter", "tokens", "Tokens prefilled again (a cost)."),
    Metric("engine/prefill_s", "counter", "s", "Time in prefill. Not on a GPU, where it is not known without waiting."),
    Metric("engine/flops", "counter", "FLOP", "Model FLOPs computed; what a step added is perf/generate_flops."),
    Metric("engine/decode_s", "counter", "s", "Time in decode steps. Not on a GPU, as engine/prefill_s."),
    Metric("engine/decode_thread_s", "counter", "thread s", "The time of each decode step times its CPU threads."),
    Metric("engine/threads", "mean", "threads", "Mean CPU threads of this step's decode steps, by time."),
    Metric("engine/restarts", "counter", "processes", "Engine processes that died and were started again."),
    # Of servers (engine.kind = "remote")
    Metric("engine/servers", "last", "servers", "Servers of a remote engine that serve now."),
    Metric("engine/ejections", "counter", "servers", "Servers given up: failed, silent, or restarted."),
    Metric("engine/lost_requests", "counter", "requests", "Requests that broke off; the rollout went on elsewhere."),
    Metric("engine/abandoned_requests", "counter", "requests", "Requests that no abort ended: disconnected."),
    Metric("engine/resumed_in_place", "counter", "rollouts", "Resumed on the server that has their tokens."),
    Metric("engine/resumed_elsewhere", "counter", "rollouts", "Resumed on another one, as theirs had no room."),
    Metric("engine/surplus_tokens", "counter", "tokens", "Sampled after a rollout's end, and cut off."),
    Metric("engine/span_mismatches", "counter", "requests", "Whose versions the server told otherwise."),
    Metric("engine/refused_weights", "counter", "", "New weights that a server refused."),
    Metric("engine/weights_paused_s", "counter", "s", "Time that servers stood still for new weights."),
    # Of all
    Metric("engine/empty_answers", "counter", "", "Answers without a token to rollouts that nobody interrupted."),
    Metric("engine/failed_extends", "counter", "", "Extensions that ended in an error, each tried again or given up."),
    Metric("engine/preemptions", "counter", "rollouts", "Rollouts preempted for KV memory."),
    Metric("engine/{name}", "counter", "", "What an engine of your own counts besides (its `stats`)."),
    Metric("kv/stale_prefix_tokens", "counter", "tokens", "Tokens served from KV of older weights."),
    Metric("kv/kept_tokens", "counter", "tokens", "Tokens of resumed rollouts with reused KV."),
    Metric("kv/shared_prompt_tokens", "counter", "tokens", "Prompt tokens shared with a sibling."),
    Metric("kv/bytes", "last", "bytes", "Memory of the KV cache now."),
    Metric(
        "engine/kernels",
        "last",
        "",
        "1: compiled kernels do the small operations on the CPU; 0: torch does, more slowly (the start says why).",
    ),
]
