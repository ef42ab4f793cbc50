"""The OpenAI API's endpoints of a served engine, against transformers; and a benchmark of lm-evaluation-harness.

lm-evaluation-harness is no dependency: the last test runs where it is installed (pip install 'rollover[benchmarks]').
The data are local: nothing is fetched.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import tiny
from contract.server_client import Client
from contract.test_embedded_server import folder, served
from rollover.engine.server.service import Service

__all__ = ["folder"]
TOKENIZER = tiny.tokenizer()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PROMPTS = ["count to 12", "and then stop"]


def asked(folder: Path, path: str, *bodies: dict[str, Any]) -> list[tuple[int, Any]]:
    """The answers to these requests, made at the same time."""

    async def body(url: str, service: Service) -> list[tuple[int, Any]]:
        async with Client(url) as client:
            return await asyncio.gather(*(client.post(path, {"model": str(folder)} | of) for of in bodies))

    return served(folder, body, texts=True)


@torch.no_grad()
def rows_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """By transformers: the log-probs after each of these tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)


@torch.no_grad()
def greedy(folder: Path, text: str, num: int) -> list[int]:
    """By transformers: the tokens that follow."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = TOKENIZER(text)["input_ids"]
    start = len(ids)
    for _ in range(num):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def test_completions_match_transformers(folder: Path) -> None:
    of = {"max_tokens": 5, "temperature": 0, "logprobs": 1}
    ids = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
    texts, tokens, two, drawn = asked(
        folder,
        "/v1/completions",
        {"prompt": PROMPTS} | of,
        {"prompt": ids} | of,
        {"prompt": ids[0], "n": 2} | of,
        {"prompt": ids[0]} | of | {"temperature": 1.0, "seed": 3},
    )
    assert texts[0] == 200 and texts[1]["choices"] == tokens[1]["choices"]
    for choice, prompt in zip(texts[1]["choices"], PROMPTS, strict=True):
        assert "".join(choice["logprobs"]["tokens"]) == TOKENIZER.decode(greedy(folder, prompt, 5))
        assert choice["finish_reason"] == "length" and choice["logprobs"]["text_offset"] == list(range(5))
        assert choice["logprobs"]["token_logprobs"] == [0.0] * 5, "of what they were drawn from: nothing else could be"
    assert [c["text"] for c in two[1]["choices"]] == [texts[1]["choices"][0]["text"]] * 2
    assert two[1]["usage"] == {"prompt_tokens": len(ids[0]), "completion_tokens": 10,
                               "total_tokens": len(ids[0]) + 10}  # fmt: skip
    found = drawn[1]["choices"][0]["logprobs"]
    whole = ids[0] + [TOKENIZER.convert_tokens_to_ids(token) for token in found["tokens"]]
    rows, start = rows_of(folder, whole), len(ids[0])
    expected = [float(rows[i - 1, whole[i]]) for i in range(start, len(whole))]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_log_probs_of_a_prompt_are_those_of_transformers(folder: Path, max_tokens: int) -> None:
    of = {"prompt": PROMPTS, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    [(status, answer)] = asked(folder, "/v1/completions", of)
    assert status == 200
    for choice, prompt in zip(answer["choices"], PROMPTS, strict=True):
        ids = TOKENIZER(prompt)["input_ids"]
        rows, found = rows_of(folder, ids), choice["logprobs"]
        assert choice["text"].startswith(prompt) and len(found["tokens"]) == len(ids) + max_tokens
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for i in range(1, len(ids)):
            assert found["token_logprobs"][i] == pytest.approx(float(rows[i - 1, ids[i]]), abs=1e-4)
            top = found["top_logprobs"][i]
            assert max(top.values()) == pytest.approx(float(rows[i - 1].max()), abs=1e-4)
            assert (max(top.values()) == found["token_logprobs"][i]) == (int(rows[i - 1].argmax()) == ids[i])


def test_chat_uses_template_stop_strings_and_seed(folder: Path) -> None:
    message = {"messages": [{"role": "user", "content": "count"}]}
    plain = {"prompt": "u:count\na:", "max_tokens": 12, "temperature": 0}
    [(_, whole)] = asked(folder, "/v1/completions", plain)
    text = whole["choices"][0]["text"]
    stop = text[3:5]
    of = message | {"max_completion_tokens": 12, "temperature": 0}
    drawn = message | {"max_tokens": 12, "n": 3, "seed": 7, "logprobs": True}
    (_, chat), (_, stopped), (_, first), (_, again) = asked(
        folder, "/v1/chat/completions", of, of | {"stop": [stop, ""]}, drawn, drawn
    )
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    end = stopped["choices"][0]
    assert end["message"]["content"] == text[: text.index(stop)] and end["finish_reason"] == "stop"
    assert first["choices"] == again["choices"]
    assert len({c["message"]["content"] for c in first["choices"]}) == 3, "each of them has a seed of its own"
    content = first["choices"][0]["logprobs"]["content"]
    text = "".join(part["token"] for part in content).removesuffix("<eos>")
    assert text == first["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": "a", "best_of": 2}, 400, "best_of"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs"),
        ("completions", {"prompt": "a", "temprature": 1.0}, 400, "temprature"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [9999], "max_tokens": 0, "echo": True, "logprobs": 1}, 400, "prompt"),
        ("completions", {"prompt": ["a", "b" * 2000]}, 400, "token_ids"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("chat/completions", {"messages": [], "max_tokens": 3}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}, 400, "tools"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    folder: Path, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    [(found, answer)] = asked(folder, f"/v1/{path}", body)
    assert found == status and answer["error"]["param"] == param, answer


TASK = """
task: tiny_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
{more}
"""
CHOICE = "output_type: multiple_choice\ndoc_to_choice: choices\nmetric_list: [{metric: acc}]\n"
UNTIL = ('output_type: generate_until\ngeneration_kwargs: {until: ["z"], max_gen_toks: 6, temperature: 0.0}\n'
         'metric_list: [{metric: exact_match}]\n')  # fmt: skip


@pytest.mark.slow
def test_lm_evaluation_harness_matches_transformers(folder: Path, tmp_path: Path, monkeypatch) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    questions, choices = [f"count to {i}:" for i in range(6)], [" 7", " ab", " xyz"]

    def logprob(question: str, choice: str) -> float:
        ids, start = TOKENIZER(question + choice)["input_ids"], len(question)
        rows = rows_of(folder, ids)
        return float(sum(rows[i - 1, ids[i]] for i in range(start, len(ids))))

    best = [max(range(3), key=lambda i, q=q: logprob(q, choices[i])) for q in questions]
    rows = [{"question": q, "choices": [c.strip() for c in choices], "answer": int(b if i % 3 else (b + 1) % 3)}
            for i, (q, b) in enumerate(zip(questions, best, strict=True))]  # fmt: skip
    (tmp_path / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [str(TOKENIZER.decode(greedy(folder, q, 6), skip_special_tokens=True)).partition("z")[0] for q in questions]
    rows = [
        {"question": q, "answer": t if i % 2 else "no"} for i, (q, t) in enumerate(zip(questions, texts, strict=True))
    ]
    (tmp_path / "until.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, more in (("choice", CHOICE), ("until", UNTIL)):
        text = TASK.format(kind=kind, data=tmp_path / f"{kind}.jsonl", more=more)
        (tmp_path / f"{kind}.yaml").write_text(text)

    def evaluate(url: str) -> Any:
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={"model": str(folder), "base_url": f"{url}/v1/completions", "tokenizer": str(folder),
                        "num_concurrent": 1, "max_retries": 1, "tokenized_requests": True},
            tasks=["tiny_choice", "tiny_until"],
            task_manager=manager(include_path=str(tmp_path), include_defaults=False),
            log_samples=True,
        )  # fmt: skip

    async def body(url: str, service: Service) -> Any:
        return await asyncio.to_thread(evaluate, url)

    found = served(folder, body, texts=True)
    for sample in found["samples"]["tiny_choice"]:
        for (value, _), choice in zip(sample["filtered_resps"], choices, strict=True):
            assert float(value) == pytest.approx(logprob(sample["doc"]["question"], choice), abs=1e-3)
    assert found["results"]["tiny_choice"]["acc,none"] == pytest.approx(4 / 6)
    exact = sum(t.strip() == row["answer"].strip() for t, row in zip(texts, rows, strict=True)) / 6
    assert found["results"]["tiny_until"]["exact_match,none"] == pytest.approx(exact, abs=0.01)
    assert os.environ["OPENAI_API_KEY"] == "none"


def test_what_cannot_be_answered_is_refused_with_its_field(folder: Path) -> None:
    """And not with the server's own error, which says nothing."""
    found = asked(
        folder,
        "/v1/completions",
        *({"prompt": prompt} for prompt in ([-1], [[5], [-1]], [10**9], "a\ud800", ["a", "\udfff"])),
        {"prompt": ["a"] * 33, "n": 128},
        {"prompt": "a", "user": "\ud800"},
        {"prompt": "a\u00e9", "max_tokens": 1},
    )
    assert [status for status, _ in found] == [400] * 7 + [200]
    said = [answer["error"]["message"] for _, answer in found[:-1]]
    assert all(text.startswith("prompt") for text in said[:2]) and "4,224 answers" in said[5]
    assert all("no Unicode" in text for text in (*said[3:5], said[6]))


def test_images_of_messages_are_refused(folder: Path) -> None:
    """A template would leave them out without a word."""
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    contents = ([text, image], ["a"], [text], "a")
    bodies = ({"messages": [{"role": "user", "content": content}]} for content in contents)
    found = asked(folder, "/v1/chat/completions", *(body | {"max_tokens": 1, "temperature": 0} for body in bodies))
    assert [status for status, _ in found] == [400, 400, 200, 200]
    assert "a list of parts of type text" in found[0][1]["error"]["message"]
    assert found[2][1]["choices"] == found[3][1]["choices"], "a part of text is its text"


def test_the_openai_client_reads_answers_streams_and_errors(folder: Path) -> None:
    openai = pytest.importorskip("openai")

    async def body(url: str, service: Service) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ask: Any = client.chat.completions.create
            of = {"model": str(folder), "messages": [{"role": "user", "content": "count"}], "max_tokens": 6, "seed": 1}
            done = await ask(**of, extra_body={"return_token_ids": True})
            assert len(done.choices[0].model_dump()["token_ids"]) == done.usage.completion_tokens
            stream = await ask(**of, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == done.choices[0].message.content and chunks[-1].usage == done.usage
            with pytest.raises(openai.NotFoundError) as missing:
                await ask(**of | {"model": "other"})
            assert missing.value.code == "model_not_found"

    served(folder, body, texts=True)
