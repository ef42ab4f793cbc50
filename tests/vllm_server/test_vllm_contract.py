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
    subject = server_contract.Subject(server.url, copy.deepcopy(old), tmp_path, 1024, eos=1, long_prompt=128)
    asyncio.run(server_contract.run(check, subject))
