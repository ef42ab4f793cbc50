"""Examples of supervised training: which tokens of a row are trained, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from rollover.config import SftConfig, TasksConfig
from rollover.recipes.toy_model import character_tokenizer
from rollover.tasks.examples import Example, ExampleRows, chat_spans
from rollover.tasks.rows import TableLocation

CHATML = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
# As reasoning models': the thought of an answer is left out when another message follows.
FORGETFUL = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('#')[-1] }}{% endif %}"
    "{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "think#4"},
    {"role": "user", "content": "3+3"},
    {"role": "assistant", "content": "6"},
]


def rows(folder: Path, *lines: dict[str, Any], tokenizer: Any = None, chat: bool = True, **sft: Any) -> ExampleRows:
    path = folder / "examples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = TableLocation(str(path), table="sft")
    config = SftConfig.model_construct(**{**SftConfig().model_dump(), "path": str(path), **sft})
    return ExampleRows(place, config, TasksConfig(chat=chat), tokenizer or character_tokenizer(CHATML))


def shown(example: Example) -> list[tuple[str, bool]]:
    """The texts of the prompt and of each part, with whether they are trained."""
    decode = tiny.tokenizer().decode
    return [(decode(list(example.prompt.ids)), False), *((decode(list(p.token_ids)), p.trained) for p in example.spans)]


def test_messages_are_trained_where_the_assistant_speaks(tmp_path: Path) -> None:
    assert shown(rows(tmp_path, {"messages": TURNS}).example(0)) == [
        ("[user]2+2<eos>\n[assistant]", False),
        ("think#4<eos>", True),
        ("\n[user]3+3<eos>\n[assistant]", False),
        ("6<eos>", True),
    ]


def test_turns_last_trains_the_last_answer_alone(tmp_path: Path) -> None:
    example = rows(tmp_path, {"messages": TURNS}, tokenizer=character_tokenizer(FORGETFUL), turns="last").example(0)
    assert shown(example) == [("[user]2+2<eos>[assistant]4<eos>[user]3+3<eos>[assistant]", False), ("6<eos>", True)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "completion": "4"},
        {"question": "2+2", "answer": "4"},
        {"prompt": TURNS[:1], "completion": [{"role": "assistant", "content": "4"}]},
        {"messages": [*TURNS[:1], {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]},
    ],
    ids=["completion", "answer", "messages", "parts"],
)
def test_layouts_of_rows_are_one_conversation(row: dict[str, Any], tmp_path: Path) -> None:
    assert shown(rows(tmp_path, row).example(0)) == [("[user]2+2<eos>\n[assistant]", False), ("4<eos>", True)]


def test_plain_rows_end_with_eos(tmp_path: Path) -> None:
    example = rows(tmp_path, {"prompt": "2+2=", "completion": "4"}, chat=False).example(0)
    assert shown(example) == [("2+2=", False), ("4<eos>", True)]
    assert shown(rows(tmp_path, {"text": "2+2=4"}).example(0)) == [("2", False), ("+2=4<eos>", True)]


def test_a_template_without_end_of_turn_trains_eos(tmp_path: Path) -> None:
    example = rows(tmp_path, {"prompt": "2+2", "completion": "4"}, tokenizer=tiny.tokenizer()).example(0)
    assert shown(example) == [("u:2+2\na:", False), ("4<eos>", True)]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"messages": TURNS[:1]}, {}, "line 1: its messages do not end with one of the assistant"),
        ({"messages": TURNS[:3]}, {}, "line 1: its messages do not end with one of the assistant"),
        ({"prompt": "2+2"}, {}, "line 1: there is no completion: the column completion or response or answer"),
        ({"prompt": "2+2", "completion": ""}, {}, "there is no completion"),
        ({"prompt": "2+2", "completion": [1]}, {}, "neither a text nor a list of messages"),
        ({"messages": [*TURNS[:1], {"role": "assistant", "content": " "}]}, {}, "message of the assistant is empty"),
        ({"messages": TURNS[1:2]}, {}, "no message of the assistant after another one"),
        (
            {"a": "2+2"},
            {},
            "has no column messages, prompt, question, problem, text; its columns are a: set sft.prompt",
        ),
        ({"prompt": "2", "a": "4"}, {"completion_column": "b"}, "has no column b; its columns are"),
        ({"prompt": 3, "answer": "4"}, {}, "(set sft.prompt_column if another column has it)"),
    ],
)
def test_a_row_that_is_no_example_is_refused(
    row: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        rows(tmp_path, row, **options).example(0)
    assert message in str(error.value) and "tasks.sources" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "has no chat template"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "leaves out what the assistant says"),
        (FORGETFUL, "renders what came before message 4 otherwise when it follows (it may leave out earlier"),
        (tiny._TEMPLATE, "writes no special token at the end of an assistant's turn"),
        (
            CHATML.replace("'[assistant]'", "'[model]'"),
            "does not write message 2 between its prompt and the end of turn",
        ),
        ("{{ raise_exception('no') }}", "refuses its messages: no"),
    ],
)
def test_a_template_that_does_not_write_on_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        chat_spans(TURNS, character_tokenizer(template))
    assert message in str(error.value)


def test_an_answer_in_the_middle_of_a_token_is_refused() -> None:
    """A tokenizer with a token of two line breaks: the first is the prompt's."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = character_tokenizer(CHATML.replace("[assistant]", "[assistant]\n").replace("+ ']' +", "+ ']\n' +"))
    vocab = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[\s\S]"), behavior="isolated")
    assert "\n\n" not in vocab  # it becomes the unknown token
    with pytest.raises(ValueError, match="begins in the middle of a token"):
        chat_spans([TURNS[0], {"role": "assistant", "content": "\n4"}], tokenizer)
