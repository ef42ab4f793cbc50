"""The page of one rollout in a real browser: what training made of each token, why the answer got its advantage, and
the command that goes on from the chosen token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import served
from drawn_run import make_run
from tokenizers import Tokenizer, decoders, models
from watched import Watched

from recorded_run import group, recorded
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import RolloutRecorder
from rollover.track.token_stats import TokenStats
from rollover.track.tracker import RecordedCredit

pytestmark = pytest.mark.browser
VIEW = "rollout?step=20&id=90-0"
Opens = Callable[..., Watched]


def told_run(folder: Path) -> Path:
    """Beside the others a group whose first rollout has four tokens: one that did not come to the loss, one that was
    rejected, one that a clip left without a gradient, and one that is trained."""
    run = make_run(folder)
    stats = TokenStats(
        mask=np.array([False, True, True, True]),
        rejected=np.array([True, False, False]),
        advantages=np.full(3, -0.5, np.float32),
        importance_weights=np.array([9.0, 3.0, 0.75], np.float32),
        loss_weights=np.array([0.0, 0.0, 0.75], np.float32),
        entropies=np.array([np.nan, 1.5, 0.25], np.float32),
    )
    of = recorded(group(90, [0.0, 1.0], num_tokens=4), text="<script>alert(1)</script>")
    credits = [RecordedCredit(0, reward, {}) for reward in (0.0, 1.0)]
    of = replace(of, advantages=[-0.5, 0.5], credits=credits, tokens=[stats, None])
    RolloutRecorder(run / "rollouts").write(20, [of])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate("abcd")}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    (run / "model").mkdir()
    tokenizer.save(str(run / "model" / "tokenizer.json"))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return told_run(tmp_path_factory.mktemp("told") / "run")


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with served(run) as address:
        yield address


def hovered(watched: Watched, place: int) -> str:
    watched.page.locator(f".token[data-place='{place}']").hover()
    return watched.text(".hover")


def test_each_token_tells_what_training_made_of_it(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, VIEW)
    assert "not in the loss" in hovered(watched, 0)
    rejected = hovered(watched, 1)
    assert "rejected" in rejected and "importance weight 9 ·" in rejected and rejected.endswith("weight in the loss 0")
    assert "in the loss · advantage -0.5 · importance weight 3 · weight in the loss 0 · entropy 1.5" in hovered(
        watched, 2
    )
    assert "importance weight 0.75 · weight in the loss 0.75 · entropy 0.25" in hovered(watched, 3)
    assert watched.page.locator(".token.unmasked").count() == 1
    shades = {"entropies": 2, "importance_weights": 3, "loss_weights": 3, "advantages": 3, "plain": 0, "version": 4}
    for shade, painted in shades.items():
        watched.click(f"input[value={shade}]")
        found = watched.value("[...document.querySelectorAll('.token')].filter((of) => of.style.background).length")
        assert found == painted, shade
        for scheme in ("light", "dark"):
            watched.page.emulate_media(color_scheme=scheme)
            assert watched.value("checks.faint()") == [], f"{shade}, {scheme}"


def test_why_an_answer_got_its_advantage_is_said(url: str, open_page: Opens) -> None:
    watched = open_page()
    watched.show(url, VIEW)
    why = watched.text(".why")
    assert "Compared with its siblings, the rewards are 0, 1: mean 0.5, standard deviation 0.7071." in why
    assert "(0 - 0.5) / (0.7071 + 0.0001) = -0.707" in why
    assert "3 of its 4 tokens came to the loss" in why and "1 of these were rejected" in why


def test_the_command_goes_on_from_the_token_that_was_chosen_not_from_one_that_was_passed(
    url: str, run: Path, open_page: Opens
) -> None:
    watched = open_page()
    watched.show(url, VIEW)
    command = f"rollover sample --from {run} 20/90-0"
    assert watched.text(".command") == f"{command}:0"
    watched.click(".token[data-place='2']")
    assert watched.text(".command") == f"{command}:3"
    hovered(watched, 0)
    assert watched.text(".command") == f"{command}:3"
    watched.page.locator(".tokens").focus()
    watched.press("ArrowRight")
    assert watched.text(".command") == f"{command}:2", "from the token that was pointed at last, one further"


def test_a_report_has_it_too(run: Path, tmp_path: Path, open_page: Opens) -> None:
    path = tmp_path / "report.html"
    path.write_text(make_report([RunData(run)]), encoding="utf-8")
    watched = open_page()
    watched.show(path.as_uri(), VIEW)
    assert "importance weight 0.75" in hovered(watched, 3) and "Compared with its siblings" in watched.text(".why")
