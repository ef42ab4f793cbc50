"""Images that environments and agents show after the prompt: rows, engine, whole runs, kills, calls over HTTP."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from PIL import Image

from rollover.cli import main
from rollover.engine.protocol import ExtendRequest
from rollover.envs.chat import Chat
from rollover.envs.protocol import turn_error, written
from rollover.models.load import LoadedModel
from rollover.models.threads import Team
from rollover.models.vision import placeholder_ids
from rollover.tasks.image_parts import stored_of_program
from rollover.trainer.passes import Passes
from rollover.types import Prompt, Rollout, Sample, SamplingParams, Segment, StopReason, Task
from rollover.workflows.conversations import Call, CallRefused, Chats, Conversations, with_stored_images
from vision import families
from vision.test_image_rows import TOLERANCE, Case, engine, make, reference, reference_logprobs, sample, tokens, vision
from vision.test_vision_run import KILLED_AT, SYNCHRONOUS
from vision.test_vision_run import loaded as saved_weights
from vision.test_vision_run import write as write_run

NEW, TURNS = 6, 3
BY_DEFAULT = ("qwen3_vl", "gemma3")
SOME_FAMILIES = [pytest.param(f, marks=[] if f in BY_DEFAULT else pytest.mark.slow) for f in families.FAMILIES]


@pytest.fixture(scope="module", params=families.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def shown(case: Case, turn: int) -> list[dict[str, Any]]:
    """What an environment says to a turn: one image, or two, among texts."""
    images = [{"type": "image", "image": str(case.folder / name)} for name in ("square.png", "wide.png")]
    content = [{"type": "text", "text": f"now {turn}: "}, *images[: 1 + turn % 2], {"type": "text", "text": " ok?"}]
    return [{"role": "user", "content": content}]


def answered(case: Case, chat: Chat, rollout: Rollout) -> Rollout:
    """The rollout, with the environment's answer to its turn."""
    last = [int(token) for token in rollout.segments[-1].token_ids]
    answer = written(rollout, chat.continuation(last, shown(case, len(rollout.segments) // 2)))
    assert turn_error(answer, rollout, len(chat.tokenizer)) is None and answer.media
    rollout.add(answer)
    return rollout


def rollouts(case: Case, loaded: LoadedModel) -> list[Rollout]:
    """Of each prompt, with images and without, two of three turns, whose tokens are drawn at random."""
    random, chat = np.random.default_rng(1), Chat(loaded.tokenizer, processor=loaded.processor)
    never = (*placeholder_ids(loaded.model.config), chat.end_of_turn)
    allowed = np.setdiff1d(np.arange(loaded.vocab_size), never)
    out = []
    for group, prompt in enumerate(case.prompts):
        for sibling in range(2):
            rollout = Rollout(group, sibling, Task("t", "s", "r"), prompt=prompt)
            for turn in range(TURNS):
                ids = random.choice(allowed, 2 + sibling + turn).astype(np.int32)
                rollout.add(Segment(ids, np.zeros(len(ids), np.float32), 0, SamplingParams(), StopReason.LENGTH))
                if turn < TURNS - 1:
                    answered(case, chat, rollout)
            out.append(rollout)
    return out


def row(rollout: Rollout) -> Sample:
    made = sample(rollout.rollout_id, rollout.group_id, rollout.prompt, np.array(rollout.token_ids()))
    mask = np.concatenate([np.full(len(s), s.trainable) for s in rollout.segments])
    return replace(made, media=rollout.prompt.media + rollout.later_media, mask=mask)


def test_log_probs_and_gradients_are_those_of_transformers(case: Case) -> None:
    loaded, plain = case.load(vision="trained"), reference(case)
    rows = [row(rollout) for rollout in rollouts(case, loaded)]
    expected = {s.rollout_id: reference_logprobs(case, plain, loaded, s) for s in rows}
    torch.cat([expected[s.rollout_id][torch.from_numpy(s.mask)] for s in rows]).sum().backward()
    passes = Passes(loaded.model, Team(), 10_000, vision=vision(loaded))
    with torch.no_grad():
        got = passes.logprobs(rows)
    for s in rows:
        np.testing.assert_allclose(
            got[s.rollout_id], expected[s.rollout_id].detach()[torch.from_numpy(s.mask)], atol=TOLERANCE, rtol=0
        )
    passes.forward(passes.pack(rows))[0].sum().backward()
    others = dict(plain.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        gradient, other = (torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, others[name]))
        scale = max(float(other.abs().max()), 1e-2)
        assert float((gradient - other).abs().max()) < 1e-4 * scale, name


def extend(rollout: Rollout, name: str, pause_after: int = 0) -> ExtendRequest:
    return ExtendRequest(
        name, rollout.prompt, tuple(rollout.token_ids()), NEW, 7, SamplingParams(), pause_after=pause_after,
        may_continue=True, later_media=rollout.later_media,
    )  # fmt: skip


@pytest.mark.parametrize("chunk", [2048, 7], ids=["whole", "chunks of 7"])
@pytest.mark.parametrize("forget", [False, True], ids=["kept KV", "KV computed again"])
def test_the_engine_has_the_trainers_log_probs_over_turns(case: Case, chunk: int, forget: bool) -> None:
    loaded = case.load()
    chat = Chat(loaded.tokenizer, processor=loaded.processor)

    async def play() -> list[Rollout]:
        under_test = engine(case, prefill_chunk_tokens=chunk)
        out = [Rollout(group, s, Task("t", "s", "r"), prompt=p) for group, p in enumerate(case.prompts) for s in (0, 1)]
        for turn in range(TURNS):
            found = await asyncio.gather(*(under_test.extend(extend(rollout, rollout.rollout_id)) for rollout in out))
            for rollout, segments in zip(out, found, strict=True):
                for segment in segments:
                    rollout.add(segment)
                if turn < TURNS - 1:
                    answered(case, chat, rollout)
            if forget:
                under_test.drop_kv()
        assert under_test.stats()["kv/shared_prompt_tokens"] > 0
        await under_test.close()
        return out

    played = asyncio.run(play())
    got = Passes(loaded.model, Team(), 10_000, vision=vision(loaded)).logprobs([row(rollout) for rollout in played])
    for rollout in played:
        s = row(rollout)
        sampled = np.concatenate([segment.logprobs for segment in rollout.segments])
        assert s.mask.sum() == TURNS * NEW and len(rollout.later_media) == 3
        np.testing.assert_allclose(got[s.rollout_id], sampled[s.mask], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("forget", [False, True], ids=["kept KV", "KV computed again"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_interrupted_after_an_image_equals_uninterrupted(tmp_path: Path, family: str, forget: bool) -> None:
    case = make(family, tmp_path)
    loaded = case.load()
    before = rollouts(case, loaded)

    async def whole_and_cut() -> None:
        under_test = engine(case)
        for rollout in before:
            begun = Rollout(0, 0, rollout.task, prompt=rollout.prompt, segments=rollout.segments[:-1])
            whole, whole_logprobs = tokens(await under_test.extend(extend(begun, f"{rollout.rollout_id}-whole")))
            for cut in range(1, NEW):
                name = f"{rollout.rollout_id}-{cut}"
                first = await under_test.extend(extend(begun, name, pause_after=cut))
                assert first[-1].stop_reason is StopReason.PAUSED
                if forget:
                    under_test.drop_kv()
                resumed = Rollout(0, 0, rollout.task, prompt=rollout.prompt, segments=[*begun.segments, *first])
                rest = await under_test.extend(replace(extend(resumed, name), max_new_tokens=NEW - cut))
                ids, logprobs = tokens([*first, *rest])
                np.testing.assert_array_equal(ids, whole)
                np.testing.assert_allclose(logprobs, whole_logprobs, atol=TOLERANCE, rtol=0)
                under_test.release([name])
        await under_test.close()

    asyncio.run(whole_and_cut())


def test_an_answer_with_another_image_is_computed_again(tmp_path: Path) -> None:
    """Equal ids, as the images have one size: what the engine keeps of the first is not used for the second."""
    case = make("qwen3_vl", tmp_path)
    loaded = case.load()
    chat = Chat(loaded.tokenizer, processor=loaded.processor)
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / name)

    async def play(*names: str) -> list[np.ndarray]:
        under_test, out = engine(case), []
        for name in names:
            rollout = Rollout(0, 0, Task("t", "s", "r"), prompt=case.prompts[2])
            ids = np.array([1, 2, 3], np.int32)
            rollout.add(Segment(ids, np.zeros(3, np.float32), 0, SamplingParams(), StopReason.LENGTH))
            content = [{"type": "image", "image": str(tmp_path / name)}]
            rollout.add(written(rollout, chat.continuation([1, 2, 3], [{"role": "user", "content": content}])))
            out.append(tokens(await under_test.extend(extend(rollout, "0-0")))[1])
        await under_test.close()
        return out

    _, after_another = asyncio.run(play("a.png", "b.png"))
    [alone] = asyncio.run(play("b.png"))
    np.testing.assert_allclose(after_another, alone, atol=TOLERANCE, rtol=0)


GAME = """
import sys
from pathlib import Path
from PIL import Image
import rollover

HERE = Path(__file__).parent

class Game:
    def reset(self, answer):
        self.goal, self.turn = int(answer), 0
        return [{"type": "text", "text": " Begin: "}, {"type": "image", "image": HERE / f"{self.goal % 12}.png"}]

    def step(self, message):
        self.turn += 1
        if self.turn == 3:
            return rollover.Observation("", len(message) % 5 / 4, done=True)
        image = Image.new("RGB", (16 + 8 * self.turn, 24), (40 * self.turn, self.goal, len(message)))
        return rollover.Observation([{"type": "text", "text": "see "}, {"type": "image", "image": image}], 0.1)
"""

TOOL = """
from PIL import Image

class Camera:
    def reset(self, answer):
        self.goal = int(answer)

    def look(self, place: str):
        '''Looks somewhere.

        Args:
            place: where
        '''
        self.score = len(place) % 5 / 4
        return Image.new("RGB", (16, 16), (self.goal, 80, 120))

    def get_reward(self):
        return self.score
"""

EVERY_TURN = """
class EveryTurn:
    def definitions(self, schemas):
        return ""

    def read(self, text):
        from rollover.envs.tools import Call

        return [Call("look", {"place": text})]
"""


def write_game(folder: Path, family: str, *, steps: int, code: str = GAME, made: str = "Game", **tables: Any) -> Path:
    rollout = {"max_new_tokens": 150, "stop": ["e", "a", "0"], **tables.pop("rollout", {})}
    workflow = {"environment": f"{folder}/game.py:{made}", **tables.pop("workflow", {})}
    recipe = write_run(folder, family, steps=steps, rollout=rollout, workflow=workflow, **tables)
    (folder / "game.py").write_text(code)
    return recipe


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_killed_game_trains_what_it_would_have_trained(tmp_path: Path, family: str) -> None:
    exact: dict[str, Any] = {"rollout": SYNCHRONOUS, "checkpoint": {"every_steps": 2, "journal_s": 0.01}}
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert main(["train", str(write_game(alone, family, steps=4, **exact))]) == 0
    lines = runs.rows(alone)
    assert all(line["mismatch/logprob_abs_max"] < 1e-5 for line in lines) and lines[0]["grad_norm"] > 0
    shown_later = [image for record in runs.records(alone / "run") for image in record["later_media"] or ()]
    assert all(Path(i["source"]).parent == alone / "run" / "media" and i["offset"] >= 0 for i in shown_later)
    recipe = write_game(killed, family, steps=4, **exact)
    ended = runs.rollover("rollover.checkpoint.journal:Journal.sync", 4, "train", recipe, script=KILLED_AT)
    assert ended.returncode == -signal.SIGKILL
    assert main(["train", str(recipe), "--resume"]) == 0
    found = []
    for folder in (alone, killed):
        records = runs.records(folder / "run")
        found.append(
            [(r["rollout_id"], r["completion"], [m["digest"] for m in r["later_media"] or ()]) for r in records]
        )
    assert found[0] == found[1] and any(images for _, _, images in found[0])
    expected, got = saved_weights(alone / "run" / "model"), saved_weights(killed / "run" / "model")
    assert all(torch.allclose(got[name], weight, rtol=0, atol=1e-4) for name, weight in expected.items())


def test_a_tool_returns_an_image(tmp_path: Path) -> None:
    workflow = {"tool_format": f"{tmp_path}/game.py:EveryTurn", "max_turns": 2}
    recipe = write_game(tmp_path, "qwen3_vl", steps=1, code=TOOL + EVERY_TURN, made="Camera", workflow=workflow)
    assert main(["train", str(recipe)]) == 0
    assert any(record["later_media"] for record in runs.records(tmp_path / "run"))


WORKFLOW = """
from PIL import Image

async def play(task, episode):
    trajectory = episode.trajectory()
    messages = list(task.messages)
    for turn in range(2):
        reply = await trajectory.chat(messages, max_tokens=8)
        image = Image.new("RGB", (16, 16 + 8 * turn), (10, 20, int(task.columns["answer"])))
        messages += [reply.message, {"role": "user", "content": [{"type": "image", "image": image}]}]
    return len(reply.text) % 5 / 4
"""

OVER_HTTP = """
import base64, io
from PIL import Image

async def play(task, client):
    from openai import BadRequestError

    messages = [{"role": "user", "content": list(task.messages[0]["content"])}]
    for turn in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        out = io.BytesIO()
        Image.new("RGB", (16, 16 + 8 * turn), (10, 20, int(task.columns["answer"]))).save(out, "PNG")
        url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        messages += [said, {"role": "user", "content": [image]}]
    refused = 0
    for value in ("/etc/passwd", "http://127.0.0.1:1/a.png", "data:image/png;base64,AAAA"):
        bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": value}}]}]
        try:
            await client.chat.completions.create(model="policy", messages=bad)
        except BadRequestError as error:
            refused += "etc/passwd" not in value or "not on this machine" in str(error)
    assert refused == 3
    text = reply.choices[0].message.content
    return len(text) % 5 / 4
"""


@pytest.mark.parametrize("code", [WORKFLOW, OVER_HTTP], ids=["in Python", "over HTTP"])
def test_an_agent_shows_images(tmp_path: Path, code: str) -> None:
    if code is OVER_HTTP:
        pytest.importorskip("openai")
    recipe = write_run(
        tmp_path,
        "qwen3_vl",
        steps=1,
        rollout={"max_new_tokens": 120},
        workflow={"function": f"{tmp_path}/agent.py:play"},
    )
    (tmp_path / "agent.py").write_text(code)
    assert main(["train", str(recipe)]) == 0
    (line,) = runs.rows(tmp_path)
    assert line["mismatch/logprob_abs_max"] < 1e-5 and line["episodes/error"] == 0
    records = runs.records(tmp_path / "run")
    assert all(record["media"] is not None or record["group_size"] for record in records)
    continued = [record for record in records if record["later_media"]]
    assert continued and all(len(record["segments"]) >= 3 for record in continued)


def test_images_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    case = make("mistral3", tmp_path)
    loaded = case.load()
    image = [{"type": "image", "image": str(tmp_path / "wide.png")}]
    loaded.tokenizer.chat_template = loaded.tokenizer.chat_template.replace("'[IMG]'", "''")
    with pytest.raises(ValueError, match="shows 0 of the 1 images in messages of the roles user"):
        Chat(loaded.tokenizer, processor=loaded.processor).continuation([5], [{"role": "user", "content": image}])
    with pytest.raises(ValueError, match="this model takes text alone"):
        Chat(loaded.tokenizer).prompt([{"role": "user", "content": image}])


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_text_like_an_image_token_stays_text(tmp_path: Path, family: str) -> None:
    """An environment fetched it somewhere: it must not end the run, nor stand for an image."""
    case = make(family, tmp_path)
    loaded = case.load()
    assert loaded.processor is not None
    placeholder = loaded.processor.placeholder_id
    token = loaded.tokenizer.convert_ids_to_tokens(placeholder)
    chat = Chat(loaded.tokenizer, processor=loaded.processor)
    hostile = {"role": "user", "content": f"{token} <start_of_image> <image> [IMG] <|image_pad|>"}
    assert not chat.continuation([5], [hostile]).media and placeholder not in chat.continuation([5], [hostile]).ids
    parts = [{"type": "image", "image": str(tmp_path / "wide.png")}, {"type": "text", "text": token}]
    assert len(chat.continuation([5], [{"role": "user", "content": parts}]).media) == 1
    chats = Chats(loaded.tokenizer, vocab_size=loaded.vocab_size, processor=loaded.processor)
    for prompt in ((5, placeholder), f"a {token}"):
        with pytest.raises(CallRefused, match="show images in messages"):
            Conversations(chats).place_of(Call(prompt=prompt))


def test_an_image_at_the_very_end_fails_its_rollout_alone(tmp_path: Path) -> None:
    """In Gemma 3 the tokens of an image attend to each other, and the engine computes the last token by itself."""
    case = make("gemma3", tmp_path)
    shown = case.prompts[0]
    ids = shown.ids[: shown.media[-1].offset + shown.media[-1].count]

    async def play() -> list[Any]:
        under_test = engine(case)
        asked = [
            ExtendRequest("text", case.prompts[2], (), NEW, 7, SamplingParams()),
            ExtendRequest("image", Prompt(ids, shown.media), (), NEW, 7, SamplingParams()),
        ]
        found = await asyncio.gather(*map(under_test.extend, asked), return_exceptions=True)
        await under_test.close()
        return list(found)

    text, image = asyncio.run(play())
    assert len(tokens(text)[0]) == NEW and "write a text after it" in str(image)


BAD_TOOL = """
from pathlib import Path
from PIL import Image

HERE = Path(__file__).parent
BAD = [
    lambda: [{"type": "image", "image": str(HERE / "cut.png")}],
    lambda: [[{"type": "image", "image": Image.new("RGB", (8, 8))}]],
    lambda: [{"type": "video", "video": "a.mp4"}],
    lambda: ["here", Image.new("RGB", (8, 8))],
]

class Camera:
    def reset(self, answer):
        self.num = 0

    def look(self, place: str):
        '''Looks somewhere.

        Args:
            place: where
        '''
        self.num = len(place)
        return BAD[self.num % 4]()

    def get_reward(self):
        return self.num % 5 / 4
"""


def test_what_a_tool_returns_in_place_of_an_image_is_its_error(tmp_path: Path) -> None:
    workflow = {"tool_format": f"{tmp_path}/game.py:EveryTurn", "max_turns": 3}
    recipe = write_game(tmp_path, "qwen3_vl", steps=1, code=BAD_TOOL + EVERY_TURN, made="Camera", workflow=workflow)
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes()[:-40])
    assert main(["train", str(recipe)]) == 0
    (line,) = runs.rows(tmp_path)
    records = runs.records(tmp_path / "run")
    assert line["tools/errors"] > 0 and not any(record["later_media"] for record in records)
    assert not any("PIL" in record["completion"] or "mp4" in record["completion"] for record in records)


def test_a_full_disk_is_no_error_of_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    workflow = {"tool_format": f"{tmp_path}/game.py:EveryTurn", "max_turns": 2}
    recipe = write_game(tmp_path, "qwen3_vl", steps=1, code=TOOL + EVERY_TURN, made="Camera", workflow=workflow)
    monkeypatch.setattr("rollover.images.atomic_write_bytes", full)
    assert main(["train", str(recipe)]) == 2
    records = runs.records(tmp_path / "run")
    assert not any("No space" in record["completion"] for record in records)
    assert all("No space left on device" in record["error"] for record in records if record["error"])


def test_a_call_with_too_many_pixels_is_refused(tmp_path: Path) -> None:
    Image.new("1", (6000, 6000)).save(tmp_path / "large.png")
    content = [{"type": "image", "image": str(tmp_path / "large.png")}] * 2
    with pytest.raises(CallRefused, match="72,000,000 pixels in all"):
        asyncio.run(with_stored_images(Call(({"role": "user", "content": content},)), stored_of_program))
