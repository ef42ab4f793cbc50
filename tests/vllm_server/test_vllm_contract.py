"""vLLM's server passes the checks that the embedded one does (contract/server_contract.py)."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from contract import server_contract
from vllm_server.serving import VllmServer

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("check", server_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any, server: VllmServer, old: Any, tmp_path: Path) -> None:
    subject = server_contract.Subject(server.url, copy.deepcopy(old), tmp_path, 1024, 1, 128, server.token)
    asyncio.run(server_contract.run(check, subject))


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/weight_info", "/metrics", "/docs"])
def test_every_path_wants_the_token(server: VllmServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own key would leave those open by which weights are changed."""
    assert server.status("GET", path) == 200
    monkeypatch.setattr(server, "token", "wrong")
    assert server.status("GET", path) == 401
