"""Reports and the page: its application, its files, pictures, and the verbs."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from recorded_run import HOSTILE, group, recorded, write_run, written
from rollover import cli
from rollover.http_guard import Guard
from rollover.images import digest_of
from rollover.plugins.dashboard.app import is_of_page, make_app
from rollover.plugins.dashboard.page_files import modules, one_script, page_files
from rollover.plugins.dashboard.query import NotFound
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.rollout_detail import MOST_PIXELS
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import RolloutRecorder
from rollover.types import Media, Prompt

# A report: what is in it, how large it is, and that nothing in it runs but the page's own script


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_small_run_is_whole(tmp_path: Path) -> None:
    told = written(make_report([RunData(write_run(tmp_path))]))
    (run,) = told["runs"]
    assert run["answers"]["state"]["step"] == 3 and run["answers"]["metrics"]["columns"]["reward/mean"] == [
        0.1,
        0.2,
        0.3,
    ]
    assert len(run["records"]) == 15 and run["left_out"] == 0 and run["rollouts"]["total"] == 15
    assert run["records"]["1/3-0"]["completion"] == "the answer 0"
    columns = run["rollouts"]["columns"]
    assert columns["id"][:3] == ["3-0", "3-1", "4-0"] and {len(of) for of in columns.values()} == {15}
    assert set(run["axes"]) == {"step", "tokens", "samples", "time"} and told["compare"] == {}


def test_report_infinite_setting_is_strict_json(tmp_path: Path) -> None:
    (write_run(tmp_path) / "config.resolved.json").write_text('{"rewards": {"timeout_s": Infinity}}')
    (run,) = written(make_report([RunData(tmp_path)]))["runs"]
    assert run["answers"]["config"] == {"rewards": {"timeout_s": None}}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_texts_are_no_markup(tmp_path: Path, name: str) -> None:
    hostile = f"{HOSTILE[name]}</script><script>alert(1)</script><!--"
    text = make_report([RunData(write_run(tmp_path, text=lambda step: hostile))])
    tags = Tags(text).tags
    assert [tag for tag, _ in tags].count("script") == 3 and not {"img", "iframe", "link1"} & {tag for tag, _ in tags}
    assert "alert(1)" not in text
    text.encode("utf-8")
    if name != "long":
        assert written(text)["runs"][0]["records"]["1/3-0"]["completion"].endswith("<!-- 0")


def test_the_policy_lets_no_other_script_run_and_asks_nobody(tmp_path: Path) -> None:
    text = make_report([RunData(write_run(tmp_path))])
    (policy,) = [
        attrs["content"] for tag, attrs in Tags(text).tags if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src" not in policy
    assert policy.count("'sha256-") == 3
    assert not any("src" in attrs for tag, attrs in Tags(text).tags if tag == "script")


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    recorder = RolloutRecorder(write_run(tmp_path) / "rollouts")
    for step in range(4, 40):
        noise = random.Random(step).randbytes(10_000).hex()  # packed it has half of its length
        recorder.write(step, [recorded(group(100 + step, [0.5, 1.0]), text=noise)])
    most = 600_000
    text = make_report([RunData(tmp_path)], most)
    (run,) = written(text)["runs"]
    assert len(text.encode()) <= most and 0 < len(run["records"]) < 87
    assert run["left_out"] == 87 - len(run["records"]) and run["rollouts"]["total"] == 87
    assert len(run["rollouts"]["columns"]["id"]) == 87
    for name, record in run["records"].items():  # whole groups, but for the last
        assert name == f"{record['step']}/{record['rollout_id']}"


def test_beginnings_of_texts_have_room_of_their_own(tmp_path: Path) -> None:
    """In the file they do not stand beside the texts that they begin, and are not packed with them."""
    recorder, rng = RolloutRecorder(write_run(tmp_path) / "rollouts"), random.Random(0)
    for step in range(4, 204):
        recorder.write(step, [recorded(group(100 + step, [0.5, 1.0]), text=rng.randbytes(400).hex())])
    text = make_report([RunData(tmp_path)], 350_000)
    (run,) = written(text)["runs"]
    assert 300_000 < len(text) <= 350_000 and run["left_out"] > 0


def test_several_runs_share_the_room_and_are_compared(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
        write_run(place)
    (places[1] / "config.resolved.json").write_text('{"run": {"name": "other"}, "train": {"num_steps": 7}}')
    told = written(make_report([RunData(place) for place in places]))
    assert [run["answers"]["state"]["name"] for run in told["runs"]] == ["told", "other", "told"]
    assert told["compare"]["config"] == [{"key": "train.num_steps", "values": ["5", "7", "5"]}]
    assert len(told["compare"]["evaluations"]) == 2


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    (tmp_path / "run").mkdir()
    run = write_run(tmp_path / "run")
    assert cli.main(["report", str(run), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n" and out.read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(run), "-o", str(tmp_path / "none" / "out.html")]) == 2
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert cli.main(["report", *[str(run)] * 9]) == 2 and "9 runs, at most 8" in capsys.readouterr().err


# The dashboard over HTTP: who may ask, what comes, and what a browser may do with it


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


# `rollover view`: a process that says where it is, answers, and ends when it is told to


SRC = Path(__file__).parents[4] / "src"


@contextmanager
def view(*words: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, what its first line says)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollover", "view", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(SRC), **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def asked(url: str, token: str = "") -> object:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_answers_until_it_is_told_to_end(tmp_path: Path, number: int, code: int) -> None:
    with view(write_run(tmp_path)) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url), url
        (run,) = asked(f"{url}api/runs")  # type: ignore[misc]
        assert run["name"] == "told"
        process.send_signal(number)
        assert process.wait(60) == code


@pytest.mark.parametrize("given", ["", "a token of one's own"])
def test_elsewhere_than_on_this_machine_it_has_a_token(tmp_path: Path, given: str) -> None:
    with view(write_run(tmp_path), "--host", "0.0.0.0", ROLLOVER_SERVER_TOKEN=given) as (_, line):
        url, _, quoted = line.partition("#token=")
        token = urllib.parse.unquote(quoted)
        assert " " not in line
        assert token == given if given else len(token) > 20
        local = url.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(f"{local}api/runs")
        assert asked(f"{local}api/runs", token)


def test_what_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path))
    for words, says in (
        ([str(tmp_path / "none")], "is not the directory of a run"),
        ([run] * 9, "9 runs, at most 8"),
        ([run, "--port", "70000"], "no port"),
        ([run, "--host", ""], "--host: it is empty"),
        ([run, "--train.num_steps", "1"], "reads no configuration"),
    ):
        try:
            code = cli.main(["view", *words])
        except SystemExit as error:
            code = error.code
        assert code == 2 and says in capsys.readouterr().err, words


# The files of the page: what they may not do, and how they become one


NODE = shutil.which("node")


def test_no_text_becomes_markup_or_code() -> None:
    for name, content in page_files().items():
        if name.startswith("vendor/"):
            continue
        text = content.decode()
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert forbidden not in text.replace("no innerHTML anywhere", ""), f"{name} has {forbidden}"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{name} names another server"
    page = page_files()["index.html"].decode()
    assert not re.search(r"<script[^>]*>[^<]|\son\w+=|style=", page)  # the policy would refuse it


def test_the_vendored_library_comes_with_its_licence() -> None:
    files = page_files()
    assert b"MIT License" in files["vendor/LICENSE.uPlot.txt"] and b"uPlot" in files["vendor/uPlot.iife.min.js"]


def test_modules_come_after_those_that_they_import() -> None:
    seen: set[str] = set()
    for name, text in modules().items():
        assert {found for found in re.findall(r'from "\./([\w-]+\.js)"', text)} <= seen, name
        seen.add(name)
    assert seen == {name for name in page_files() if name.endswith(".js") and "/" not in name}, (
        "a module that nobody needs"
    )


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.js").write_text(text)


def test_one_script_is_all_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.plugins.dashboard.page_files.PAGE", tmp_path)
    write(
        tmp_path,
        main='import { a } from "./one.js";\nimport { b } from "./two.js";\n\nconsole.log(a() + b);\n',
        one='import { b } from "./two.js";\n\nexport function a() {\n  return b;\n}\n',
        two="export const b = 1;\n",
    )
    assert one_script() == (
        "// two.js\nconst b = 1;\n\n// one.js\n\nfunction a() {\n  return b;\n}\n\n"
        "// main.js\n\nconsole.log(a() + b);\n"
    )


@pytest.mark.parametrize(
    ("main", "says"),
    [
        ('import { a } from "./one.js";\nconst a1 = 1;\n', "both have a1: rename one"),
        ('import { a } from "./none.js";\n', "main.js imports none.js: a circle, or no module"),
        ('import { a } from "./two.js";\n', "main.js imports two.js imports main.js"),
        ('import a from "./one.js";\n', "cannot be joined"),
        ("export default 1;\n", "cannot be joined"),
    ],
)
def test_what_cannot_be_one_script_is_said(tmp_path: Path, monkeypatch, main: str, says: str) -> None:
    monkeypatch.setattr("rollover.plugins.dashboard.page_files.PAGE", tmp_path)
    write(tmp_path, main=main, one="export const a = 1;\nconst a1 = 2;\n", two='import { x } from "./main.js";\n')
    with pytest.raises(ValueError, match=says):
        one_script()


@pytest.mark.skipif(NODE is None, reason="no node")
def test_the_page_is_javascript_module_by_module_and_as_one(tmp_path: Path) -> None:
    assert NODE is not None
    for name, text in {**modules(), "one_script.js": one_script()}.items():
        file = (tmp_path / name).with_suffix(".mjs")
        file.write_text(text)
        done = subprocess.run([NODE, "--check", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


WORDS = """
import { decimal, short, count, percent, duration, versions, visible } from "./words.mjs";
console.log(JSON.stringify([
  decimal(null), short(0.123456), short(12345), short(3), short(1e-7), count(1234567), percent(0.034), percent(0.5),
  duration(75), duration(4000), duration(0.1234, 0.001), duration(4000.5, 0.1), duration(65, 0.5), versions(null, null),
  versions(2, 2), versions(2, 5),
  visible("a\\u001b[2J\\u202eb\\u200f\\n\\tc\\u0000\\u009b"),
  visible("\\u{e0041}\\u180e\\u3164\\u115f\\u034f\\u2800a\\ufe0f \\u2764\\ufe0f \\ud800 \\u00e9 \\u{e0100}"),
]));
"""


@pytest.mark.skipif(NODE is None, reason="no node")
def test_numbers_times_and_characters_that_are_not_seen(tmp_path: Path) -> None:
    assert NODE is not None
    (tmp_path / "words.mjs").write_bytes(page_files()["words.js"])
    (tmp_path / "ask.mjs").write_text(WORDS)
    done = subprocess.run([NODE, tmp_path / "ask.mjs"], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    import json

    assert json.loads(done.stdout) == [
        "–", "0.1235", "12.3k", "3", "1.00e-7", "1.23M", "3.4%", "50%", "1:15", "1:06:40", "0.123 s", "1:06:40.5",
        "1:05.0", "–", "2", "2 to 5", "a\u241b[2J⟨202E⟩b⟨200F⟩\n\tc\u2400⟨009B⟩",
        "⟨E0041⟩⟨180E⟩⟨3164⟩⟨115F⟩⟨034F⟩⟨2800⟩a⟨FE0F⟩ ❤\ufe0f \ud800 é ⟨E0100⟩",
    ]  # fmt: skip


# Images of prompts on the page: only those whose pixels a record names, drawn anew


PIXELS = np.random.default_rng(0).integers(0, 255, (30, 1300, 3), dtype=np.uint8)


def run_with(folder: Path, *media: Media) -> RunData:
    write_run(folder)
    of = group(50, [1.0])
    for rollout in of.rollouts:
        rollout.prompt = Prompt((1, 2, 3), media)
    RolloutRecorder(folder / "rollouts").write(4, [recorded(of)])
    return RunData(folder)


@pytest.fixture
def media(tmp_path: Path) -> Media:
    image = Image.fromarray(PIXELS)
    path = tmp_path / "a.png"
    image.save(path)
    return Media(str(path), digest_of(image), image.size, 0, 1)


def asked_for_picture(data: RunData, number: int = 0, of: str = "50-0") -> dict:
    return data.answer("picture", {"step": "4", "id": of, "number": str(number)})


def shown(answer: dict) -> Image.Image:
    kind, _, content = answer["url"].partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_image_is_drawn_anew_and_small(tmp_path: Path, media: Media) -> None:
    answer = asked_for_picture(run_with(tmp_path / "run", media, media), 1)
    assert shown(answer).size == (MOST_PIXELS, 15)


def test_what_is_not_recorded_is_not_shown(tmp_path: Path, media: Media) -> None:
    data = run_with(tmp_path / "run", media)
    for number, of in ((1, "50-0"), (0, "51-0")):
        with pytest.raises(NotFound):
            asked_for_picture(data, number, of)
    with pytest.raises(ValueError, match="give the id and the step of the rollout"):
        data.answer("picture", {"step": "4", "id": "50-0"})


def test_another_image_than_the_recorded_one_is_not_shown(tmp_path: Path, media: Media) -> None:
    data = run_with(tmp_path / "run", replace(media, digest="0" * 64))
    answer = asked_for_picture(data)
    assert answer["url"] is None and answer["why"].endswith("a.png has changed since it was in the rollout")


@pytest.mark.parametrize("source", ["/dev/zero", "/etc/hostname", "/none.png", "/etc"])
def test_other_files_are_not_shown(tmp_path: Path, media: Media, source: str) -> None:
    answer = asked_for_picture(run_with(tmp_path / "run", replace(media, source=source)))
    assert answer["url"] is None and re.search("cannot be read as an image|there is no file", answer["why"])


def test_kept_image_of_a_moved_run_is_shown(tmp_path: Path, media: Media) -> None:
    data = run_with(tmp_path / "run", replace(media, source="/elsewhere/media/3c.png"))
    (tmp_path / "run" / "media").mkdir()
    Path(media.source).rename(tmp_path / "run" / "media" / "3c.png")
    assert shown(asked_for_picture(data)).size == (MOST_PIXELS, 15)
