"""The embedded engine behind the endpoints passes the servers' contract. In this process, over a real connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import tiny
from contract import server_contract
from rollover.config import Config
from rollover.engine.server.app import make_app
from rollover.engine.server.embedded import make_service
from rollover.engine.server.guard import TokenGuard
from rollover.engine.server.service import Service
from rollover.http_server import HttpServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), head_dim=32)


def config(folder: Path, **engine: float) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
        "engine": {"kv_memory_gb": 0.05, "max_running": 8} | engine,
        "run": {"threads": 1},
    }
    return Config.model_validate(values)


def served(folder: Path, body, token: str = "", **engine: float) -> Service:
    """Run `body(url, service)` beside a server."""

    async def main() -> Service:
        service = make_service(config(folder, **engine))
        server = HttpServer(TokenGuard(make_app(service), token))
        await server.start()
        try:
            await body(server.url, service)
        finally:
            service.abort_all()
            await server.close()
            await service.engine.close()
        return service

    return asyncio.run(main())


def subject(folder: Path, url: str, files: Path) -> server_contract.Subject:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return server_contract.Subject(url, model, files, max_model_len=1024, eos=1)


@pytest.mark.parametrize("check", server_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, folder: Path, tmp_path: Path) -> None:
    async def body(url: str, service: Service) -> None:
        await server_contract.run(check, subject(folder, url, tmp_path))

    served(folder, body)
