"""The text of /metrics in Prometheus' format: what a dashboard of vLLM's reads, by its names, and our own counters."""

from __future__ import annotations

from rollover.engine.server.service import Service


async def text(service: Service) -> str:
    """All figures of now."""
    under_way = list(service.streams)
    waiting = len(await service.engine.queued(under_way))
    stats = service.engine.stats()
    num_generated = service.num_ended_tokens + sum(s.num_tokens for s in service.streams.values())
    lines = [
        *_metric("vllm:num_requests_running", "gauge", len(under_way) - waiting, service),
        *_metric("vllm:num_requests_waiting", "gauge", waiting, service),
        *_metric("vllm:generation_tokens_total", "counter", num_generated, service),
        *_metric("vllm:prompt_tokens_total", "counter", service.num_prompt_tokens, service),
        *_metric("vllm:num_preemptions_total", "counter", stats["engine/preemptions"], service),
        *_metric("rollover:weight_updates_total", "counter", service.num_updates, service),
    ]
    for key, value in sorted(stats.items()):
        lines += _metric(f"rollover:{key.replace('/', '_')}", "untyped", value, service)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, value: float, service: Service) -> list[str]:
    model = service.model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return [f"# TYPE {name} {kind}", f'{name}{{model_name="{model}"}} {float(value):.17g}']
