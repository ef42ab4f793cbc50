"""The dashboard over HTTP: who may ask, what comes, and what a browser may do with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from recorded_run import HOSTILE, write_run
from rollover.http_guard import Guard
from rollover.plugins.dashboard.app import is_of_page, make_app
from rollover.plugins.dashboard.page_files import page_files
from rollover.plugins.dashboard.run_data import RunData


def client(*directories: Path, host: str = "127.0.0.1", token: str = "", **more) -> TestClient:
    """As HttpServer serves it."""
    app = Guard(make_app([RunData(of) for of in directories]), token, is_of_page)
    return TestClient(app, base_url=more.pop("base_url", f"http://{host}:8000"), **more)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, text=lambda step: HOSTILE["script"])


def test_page_files_have_content_types_and_a_csp(run: Path) -> None:
    asked = client(run)
    for name in ["", *page_files()]:
        answer = asked.get(f"/{name}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert asked.get("/").headers["content-type"].startswith("text/html")
    assert asked.get("/main.js").headers["content-type"].startswith("text/javascript")
    for name in ("/nothing.js", "/../run_data.py", "/%2e%2e/run_data.py", "/vendor", "/vendor/"):
        assert asked.get(name).status_code == 404


def test_runs_and_their_answers(run: Path) -> None:
    asked = client(run, run)
    assert [of["name"] for of in asked.get("/api/runs").json()] == ["told", "told"]
    rows = asked.get("/api/runs/1/rollouts", params={"score_from": "0.5", "limit": "2"}).json()["rows"]
    assert [row["id"] for row in rows] == ["3-0", "4-0"]
    told = asked.get("/api/runs/0/rollout", params={"step": "1", "id": "3-0"})
    assert told.headers["content-type"] == "application/json" and "<script>" in told.json()["completion"]
    curves = asked.get("/api/compare/metrics", params={"runs": "0,1", "keys": "reward/mean", "x": "tokens"}).json()
    assert [of["x"] for of in curves] == [[23, 42, 61]] * 2
    assert asked.get("/api/compare/config").json() == []
    assert len(asked.get("/api/compare/evaluations").json()) == 1


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/runs/2/state", 404, "there is no run 2"),
        ("/api/runs/0/secrets", 404, "there is no query secrets"),
        ("/api/runs/0/rollout?step=1&id=99-0", 404, "no rollout 99-0"),
        ("/api/runs/0/rollouts?score_from=x", 400, "score_from: 'x' is not a number"),
        ("/api/compare/metrics?runs=7", 404, "there is no run 7"),
        ("/api/compare/other", 404, "there is no query other"),
    ],
)
def test_what_is_not_there_is_said(run: Path, path: str, status: int, says: str) -> None:
    answer = client(run, run).get(path)
    assert answer.status_code == status and says in answer.json()["error"]["message"]


def test_nothing_can_be_changed(run: Path) -> None:
    asked = client(run)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert asked.request(method, "/api/runs").status_code == 405


def test_another_name_for_this_machine_is_refused(run: Path) -> None:
    """As where a page elsewhere has its own name point to 127.0.0.1."""
    asked = client(run)
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert asked.get("/api/runs", headers={"host": host}).status_code == 403, host
        assert asked.get("/", headers={"host": host}).status_code == 403
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000", "LOCALHOST:1"):
        assert asked.get("/api/runs", headers={"host": host}).status_code == 200, host


def test_a_page_of_another_site_may_not_ask(run: Path) -> None:
    """As a picture or a script in it would, which sends the right host."""
    asked = client(run)
    for site in ("cross-site", "same-site"):
        assert asked.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 403
        assert asked.get("/", headers={"sec-fetch-site": site}).status_code == 200, "a link may lead here"
    for site in ("same-origin", "none"):
        assert asked.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 200


def test_with_a_token_only_the_page_comes_without(run: Path) -> None:
    asked = client(run, host="10.0.0.1", token="open sesame")
    assert asked.get("/").status_code == 200 and asked.get("/main.js").status_code == 200
    for headers in ({}, {"authorization": "Bearer open"}, {"authorization": "open sesame"}):
        assert asked.get("/api/runs", headers=headers).status_code == 401
        assert asked.get("/api/runs?token=open+sesame", headers=headers).status_code == 401
    answer = asked.get("/api/runs/0/state", headers={"authorization": "Bearer open sesame"})
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"


def test_long_answers_are_packed(run: Path) -> None:
    answer = client(run).get("/api/runs/0/rollouts", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip" and len(answer.json()["rows"]) == 15
    assert json.loads(answer.text)["total"] == 15
