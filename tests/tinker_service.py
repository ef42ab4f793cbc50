"""A Tinker-compatible service on this machine, over the tiny model: HTTP, JSON and the SDK's own protobuf, no network.

It computes at once, in the request, so that a result is there when it is asked for. `faults` makes requests fail.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

import tiny
from rollover.config import LoraConfig, TrainConfig
from rollover.models.attention import hidden_states
from rollover.models.flex import packed_attention
from rollover.models.logprobs import TrainedHead, chunked_logprobs
from rollover.trainer.lora import add_lora
from rollover.trainer.optimizer import Optimizer

KEY = "tml-" + "0" * 8
PROTOBUF = "application/x-protobuf"
DROP = "drop"


def logprobs_of(plain: Any, ids: list[int], targets: list[int]) -> torch.Tensor:
    """Of each target after the tokens up to it [N], with a gradient where the parameters want one."""
    device, num = torch.device("cpu"), len(ids)
    attention = packed_attention([num], [None], device)
    hidden_NE = hidden_states(plain, torch.tensor(ids), torch.arange(num), attention)
    ones = torch.ones(num)
    return chunked_logprobs(hidden_NE, TrainedHead(plain).now(), torch.tensor(targets), ones, unit=True)[0]


class Adapted:
    """A model in training: adapters over the tiny model."""

    def __init__(self, rank: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank, self.module = rank, add_lora(tiny.loaded().model, LoraConfig(rank=rank))
        self.plain = self.module.get_base_model()
        self.optimizer: Optimizer | None = None
        self.params: dict[str, float] = {}

    def pass_over(self, data: Any, *, backward: bool) -> list[np.ndarray]:
        """The log-probs of each datum. Cross-entropy: -sum(weight * logprob)."""
        found = []
        for datum in data:
            ids = [int(t) for chunk in datum.model_input for t in np.frombuffer(chunk.encoded_text.tokens, np.int32)]
            targets = np.frombuffer(datum.loss_fn_inputs["target_tokens"].dense, np.int64).tolist()
            weights = np.frombuffer(datum.loss_fn_inputs["weights"].dense, np.float32).copy()
            with torch.set_grad_enabled(backward):
                logprobs = logprobs_of(self.plain, ids, targets)
            if backward:
                (-(torch.from_numpy(weights) * logprobs).sum()).backward()
            found.append(logprobs.detach().numpy())
        return found

    def step(self, params: dict[str, float]) -> dict[str, float]:
        self.params = params
        self._make_optimizer()
        assert self.optimizer is not None
        update = self.optimizer.step(params["learning_rate"])
        return {"unclipped_grad_l2:mean": update["grad_norm"]}

    def _make_optimizer(self) -> None:
        if self.optimizer is None and self.params:
            names = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps", "weight_decay": "weight_decay",
                     "grad_clip_norm": "max_grad_norm"}  # fmt: skip
            values: dict[str, Any] = {ours: self.params[theirs] for theirs, ours in names.items()}
            self.optimizer = Optimizer(self.module, TrainConfig(learning_rate=1.0, **values), 1, torch.float32)

    def state(self) -> Any:
        state = None if self.optimizer is None else self.optimizer.state()
        return copy.deepcopy((self.rank, self.params, self.module.state_dict(), state))

    @classmethod
    def of(cls, saved: Any) -> Adapted:
        rank, params, weights, state = copy.deepcopy(saved)
        adapted = cls(rank, 0)
        adapted.params = params
        adapted.module.load_state_dict(weights)
        adapted._make_optimizer()
        if state is not None:
            assert adapted.optimizer is not None
            adapted.optimizer.load_state(*state)
        return adapted


class FakeTinker:
    """The service. `faults`: (end of a path) -> what the next requests to it meet, one after the other: a status, DROP
    (the connection), or seconds to wait before it answers. `calls`: (path, its JSON, {} for protobuf)."""

    def __init__(self) -> None:
        self.logprob_error = np.float32(0.0)  # what it adds to each log-prob
        self.faults: dict[str, list[int | float | str]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.failing: list[str] = []  # errors that the next results of a pass are
        self.failing_scores: list[str] = []  # categories of the errors that the next log-probs of a prompt are
        self._lock, self._results = threading.RLock(), {}
        self._models: dict[str, Adapted] = {}
        self._states: dict[str, Any] = {}
        self._samplers: dict[str, Any] = {}  # path, or name of a base model -> plain module
        self._sessions: dict[str, str] = {}  # sampling session -> path or name
        self.open_sessions: set[str] = set()
        self.num_ended = 0  # sessions
        self._count = 0

    def serve_model(self, name: str, model: Any) -> None:
        """Sample and score with `model` as the base model `name`."""
        self._samplers[name] = model

    def number(self) -> int:
        with self._lock:
            self._count += 1
            return self._count

    def answer(self, path: str, body: bytes) -> tuple[Any, bytes | None]:
        """(JSON, None), or (None, protobuf)."""
        name = path.removeprefix("/api/v1/")
        if name == "forward_backward":
            return self._pass(body), None
        asked = json.loads(body) if body else {}
        self.calls.append((name, asked))
        if name == "retrieve_future":
            result = self._results[asked["request_id"]]
            return (None, result) if isinstance(result, bytes) else (result, None)
        if name.startswith("samplers/"):
            session = name.partition("/")[2]
            return {"sampler_id": session, "base_model": "tiny"}, None
        if name.startswith("sessions/"):
            with self._lock:
                self.open_sessions.discard(name.split("/")[1])  # sessions/ID/finish
                self.num_ended += 1
            return {}, None
        with self._lock:
            return getattr(self, name.partition("/")[0].replace("client/", ""))(asked), None

    def promise(self, result: Any, **more: Any) -> dict[str, Any]:
        request_id = f"request-{self.number()}"
        self._results[request_id] = result
        return {"request_id": request_id, **more}

    def client(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"use_pyqwest_transport": False}

    def create_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        session = f"session-{self.number()}"
        self.open_sessions.add(session)
        return {"type": "create_session", "session_id": session}

    def session_heartbeat(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"type": "session_heartbeat"}

    def cancel_future(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {}

    def create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["base_model"] != "tiny":
            return self.promise({"error": f"there is no model {asked['base_model']}", "category": "user"})
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        self._models[model_id] = Adapted(asked["lora_config"]["rank"], asked["lora_config"]["seed"])
        return self.promise({"type": "create_model", "model_id": model_id})

    def get_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"type": "get_info", "model_id": asked["model_id"], "model_data": {"model_name": "tiny"}}

    def _pass(self, body: bytes) -> dict[str, Any]:
        from tinker.proto import tinker_public_pb2 as pb

        asked = pb.ForwardBackwardRequest()
        asked.ParseFromString(body)
        self.calls.append(("forward" if asked.forward_only else "forward_backward", {}))
        if self.failing:
            return self.promise({"error": self.failing.pop(0), "category": "server"})
        with self._lock:
            found = self._models[asked.model_id].pass_over(asked.data, backward=not asked.forward_only)
        out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 0.0})
        record = out.loss_fn_outputs.add(num_datums=len(found))
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = b"".join(values.tobytes() for values in found)
        field.offsets = np.cumsum([0, *(values.nbytes for values in found)]).astype(np.int64).tobytes()
        return self.promise(out.SerializeToString())

    def optim_step(self, asked: dict[str, Any]) -> dict[str, Any]:
        return self.promise({"metrics": self._models[asked["model_id"]].step(asked["adam_params"])})

    def save_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{asked['model_id']}/weights/{asked['path']}"
        self._states[path] = self._models[asked["model_id"]].state()
        return self.promise({"path": path})

    def load_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["path"] not in self._states:
            return self.promise({"error": f"there is no {asked['path']}", "category": "user"})
        self._models[f"{asked['session_id']}:train:{asked['model_seq_id']}"] = Adapted.of(self._states[asked["path"]])
        return self.promise({"path": asked["path"]})

    def save_weights_for_sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{asked['model_id']}/sampler_weights/{asked['path']}"
        model = Adapted.of(self._models[asked["model_id"]].state())
        self._samplers[path] = model.plain
        return self.promise({"path": path})

    def create_sampling_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked.get("model_path") or asked["base_model"]
        if name == "tiny":
            self._samplers.setdefault(name, tiny.loaded().model)
        session = f"sampling-{self.number()}"
        self._sessions[session] = name
        return {"type": "create_sampling_session", "sampling_session_id": session}

    @torch.no_grad()
    def asample(self, asked: dict[str, Any]) -> dict[str, Any]:
        from tinker.proto import tinker_public_pb2 as pb

        if asked.get("prompt_logprobs") and self.failing_scores:
            error = {"error": "out of memory", "category": self.failing_scores.pop(0)}
            return self.promise(error, sample_sequence_ids=[])
        plain, params = self._samplers[self._sessions[asked["sampling_session_id"]]], asked["sampling_params"]
        ids = [t for chunk in asked["prompt"]["chunks"] for t in chunk["tokens"]]
        out, new, logprobs = pb.SampleResponse(), [], []
        if asked.get("prompt_logprobs"):
            of_prompt = logprobs_of(plain, ids[:-1], ids[1:]).numpy()
            out.prompt_logprobs = np.concatenate([[np.nan], of_prompt]).astype(np.float32).tobytes()
        generator, stops = torch.Generator().manual_seed(params.get("seed") or 0), set(params.get("stop") or ())
        while len(new) < params["max_tokens"] and not stops & set(new[-1:]):
            before, num = torch.tensor(ids + new), len(ids) + len(new)
            attention = packed_attention([num], [None], torch.device("cpu"))
            last_E = hidden_states(plain, before, torch.arange(num), attention)[-1]
            of_next = (plain.get_output_embeddings().weight @ last_E).log_softmax(-1)
            greedy = params["temperature"] == 0
            token = int(of_next.argmax() if greedy else torch.multinomial(of_next.exp(), 1, generator=generator))
            new.append(token)
            logprobs.append(float(of_next[token]))
        reason = pb.STOP_REASON_STOP if stops & set(new[-1:]) else pb.STOP_REASON_LENGTH
        out.sequences.add(
            stop_reason=reason,
            tokens=np.array(new, np.int32).tobytes(),
            logprobs=(np.array(logprobs, np.float32) + self.logprob_error).tobytes(),
        )
        return self.promise(out.SerializeToString(), sample_sequence_ids=[f"sequence-{self.number()}"])

    def named(self, name: str) -> list[dict[str, Any]]:
        return [asked for called, asked in self.calls if called == name]


@contextmanager
def serving() -> Iterator[tuple[FakeTinker, str]]:
    """The service, and its address. Whoever uses it ends the sessions that were opened."""
    fake = FakeTinker()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            fake.headers.append(dict(self.headers))
            met = next((left for end, left in fake.faults.items() if self.path.endswith(end) and left), None)
            fault = met.pop(0) if met else None
            if fault == DROP:
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(fault, int):
                self._send(fault, b'{"detail": "a fault"}', "application/json")
                return
            if isinstance(fault, float):
                threading.Event().wait(fault)
            said, binary = fake.answer(self.path, body)
            if binary is not None:
                self._send(200, binary, PROTOBUF)
            else:
                self._send(200, json.dumps(said).encode(), "application/json")

        do_GET = do_POST

        def _send(self, status: int, content: bytes, kind: str) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # whoever asked has gone

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake, f"http://127.0.0.1:{server.server_port}"
        assert not fake.open_sessions, "sessions that nobody has ended"
    finally:
        server.shutdown()
        server.server_close()
