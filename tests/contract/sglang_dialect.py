"""An example of a ServerDialect: SGLang's native API, as far as a run needs it. Tested against a fake server alone.

    engine.kind = "remote"
    engine.urls = ["http://127.0.0.1:30000"]
    engine.dialect = "sglang_dialect.py:SglangDialect"
    engine.weights_dir = "/a/folder/that/both/see"

The server: `python -m sglang.launch_server --enable-deterministic-inference ...`, as otherwise it ignores seeds.
Its events are cumulative: each has all tokens of the request so far. New weights end its requests, which the run asks
for again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from rollover.engine.remote.client import ServerClient, ServerFailed, ServerRefused
from rollover.engine.remote.dialect import Chunk, GenerateRequest, ServerDialect


class SglangDialect(ServerDialect):
    """See ServerDialect. It shows no images."""

    processes_logits = True

    # Tokens

    async def generate(self, client: ServerClient, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        num, events = 0, client.events("/generate", request_body(request))
        async with contextlib.aclosing(events):
            async for data in events:
                if data == "[DONE]":
                    return
                chunk = parse_event(data, num)
                num += len(chunk.token_ids)
                yield chunk

    async def abort(self, client: ServerClient, request_id: str, limit_s: float) -> None:
        await client.post("/abort_request", {"rid": request_id}, limit_s=limit_s)

    # State

    async def check(self, client: ServerClient, limit_s: float) -> None:
        await self.weights_label(client, limit_s)

    async def longest_rollout(self, client: ServerClient, limit_s: float) -> int:
        info = await client.get_object("/get_server_info", limit_s=limit_s)
        try:
            return int(info["max_req_input_len"])
        except (LookupError, TypeError, ValueError) as error:
            raise ServerFailed("/get_server_info does not say max_req_input_len") from error

    async def weights_label(self, client: ServerClient, limit_s: float) -> str:
        await client.get("/health_generate", limit_s=limit_s)  # the engine behind the server answers this
        return str((await client.get_object("/get_model_info", limit_s=limit_s)).get("weight_version"))

    # Weights

    async def load_weights(
        self, client: ServerClient, weights: Mapping[str, Any], label: str, *, clear_cache: bool, limit_s: float
    ) -> None:
        body = {"model_path": self._folder_of(weights["path"]), "weight_version": label, "flush_cache": clear_cache}
        answer = await client.post("/update_weights_from_disk", body, limit_s=limit_s)
        if not answer.get("success"):
            raise ServerRefused(str(answer.get("message")))

    def _folder_of(self, file: str) -> str:
        """It loads folders of models: this one has the weights, and the configuration of the run's model."""
        folder = Path(file).with_suffix("")
        if not folder.exists():
            folder.mkdir()
            for name in Path(self.config.model.path).glob("*.json"):
                if name.name != "model.safetensors.index.json":
                    shutil.copy(name, folder)
            os.link(file, folder / "model.safetensors")
        return str(folder)


def request_body(request: GenerateRequest) -> dict[str, Any]:
    """Return the body of POST /generate."""
    asked, sampling, processing = request.extend, request.extend.sampling, request.extend.processing
    num_answer = request.num_generated - asked.text_start
    body = {
        "rid": request.request_id,
        "input_ids": list(request.token_ids),
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": request.seed % 2**31,
            "ignore_eos": True,  # the stop tokens are those of the request
            "stop_token_ids": sorted(asked.stop.token_ids),
            "repetition_penalty": processing.repetition_penalty,
            "min_new_tokens": min(max(0, processing.min_new_tokens - num_answer), request.max_tokens),
            "logit_bias": {str(token): max(bias, -100.0) for token, bias in processing.logit_bias},
        },
    }
    return body if request.cache_salt is None else body | {"extra_key": request.cache_salt}


def parse_event(data: str, num: int) -> Chunk:
    """Return what an event brought after the first `num` tokens of its request. ServerFailed for what is none."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServerFailed(f"it failed: {event['error']}")
        info, ids = event["meta_info"], event["output_ids"]
        found = info["output_token_logprobs"]
        if [entry[1] for entry in found] != ids:
            raise ValueError("the log-probs are of other tokens")
        reason = info["finish_reason"]
        return Chunk(
            tuple(ids[num:]),
            tuple(entry[0] for entry in found[num:]),
            None if reason is None else str(reason["type"]),
            cached_tokens=None if reason is None else info.get("cached_tokens"),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as failure:
        raise ServerFailed(f"it sent what is no event of tokens ({failure!r}): {data[:200]}") from failure
