"""Rows with images as tasks: every spelling of a part and a column, what is kept, and what is refused."""

import base64
import io
import json

import datasets
import pytest
from PIL import Image

from rollover.config import TasksConfig, TaskSourceConfig
from rollover.images import media_kept_in
from rollover.tasks.dataset import DatasetSource
from rollover.tasks.image_parts import with_images_of_program
from rollover.tasks.rows import LiveTable, StoredRows, TableLocation
from rollover.tasks.source import SourceSetup, build_source, problems_of
from rollover.tasks.split import problem_text
from rollover.tasks.stream import decorated
from rollover.types import Task


def png(colour="red", size=(6, 4)):
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in ("red", "blue"):
        (tmp_path / f"{name}.png").write_bytes(png(name))
    with media_kept_in(tmp_path / "media"):
        yield tmp_path


def source(folder, *rows, **options):
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return of_table(TableLocation("data.jsonl", base_dir=folder), **options)


def of_table(table, chat=True, **columns):
    return DatasetSource(SourceSetup(TaskSourceConfig(**columns), "data", "own.py:score", 0, chat=chat), table)


def task(folder, row, **options):
    return source(folder, row, **options).problem(0)


def shown(found):
    """The contents of the messages of a task, with the colour of each image."""
    contents = [m["content"] for m in found.messages]
    return [c if isinstance(c, str) else [_shown(part) for part in c] for c in contents]


def _shown(part):
    if part["type"] == "text":
        return part["text"]
    with Image.open(part["image"]) as image:
        return image.convert("RGB").getpixel((0, 0))


RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "red.png"},  # TRL's, and Qwen's
        {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
        {"type": "image_url", "image_url": {"url": "red.png"}},  # OpenAI's
        {"type": "image_url", "image_url": "red.png"},
        {"type": "input_image", "image_url": "red.png"},
        {"type": "image", "url": "red.png"},  # Hugging Face's
        {"type": "image", "path": "red.png", "text": None},
        {"type": "image", "base64": base64.b64encode(png()).decode()},
    ],
)
def test_every_spelling_of_a_part_is_one(folder, part):
    found = task(folder, {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]})
    assert shown(found) == [[RED, "What?"]]
    assert found.messages[0]["content"][0].keys() == {"type", "image", "sha256"}
    assert Task.from_json(json.loads(json.dumps(found.to_json()))).to_json() == found.to_json()


def test_several_images_and_texts_keep_their_order(folder):
    parts = [
        {"type": "text", "text": "a"}, {"type": "image", "image": "red.png"}, {"type": "text", "text": "b"},
        {"type": "text", "text": "c"}, {"type": "image", "image": "blue.png"}, {"type": "image", "image": "red.png"},
    ]  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    found = task(folder, {"prompt": messages})
    assert shown(found) == ["Be brief.", ["a", RED, "bc", BLUE, RED]]
    assert found.images == [str(folder / f"{name}.png") for name in ("red", "blue", "red")]
    assert found.content == "system: Be brief.\nuser: a[image: red.png]bc[image: blue.png][image: red.png]"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "<image>What <image>?", "images": ["red.png", "blue.png"]}, [[RED, "What ", BLUE, "?"]]),  # verl
        ({"problem": "What?", "image": "red.png"}, [[RED, "What?"]]),
        ({"prompt": "What?", "images": ["red.png", "blue.png"]}, [[RED, BLUE, "What?"]]),
        (
            {
                "prompt": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "What?"},
                    {"role": "assistant", "content": "It"},
                ],
                "images": ["red.png"],
            },
            ["s", [RED, "What?"], "It"],
        ),
        (  # TRL's
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image"}]}],
                "images": ["blue.png"],
            },
            [["What?", BLUE]],
        ),
        ({"prompt": [{"role": "user", "content": "a <image> b"}], "image": "red.png"}, [["a ", RED, " b"]]),
    ],
)
def test_column_fills_placeholders_or_comes_first(folder, row, expected):
    found = task(folder, row)
    assert shown(found) == expected
    name = next(name for name in ("image", "images") if name in row)
    assert found.columns[name] == found.images


def test_named_image_column(folder):
    assert shown(task(folder, {"prompt": "What?", "figure": "red.png"}, image_column="figure")) == [[RED, "What?"]]
    with pytest.raises(ValueError, match="has no image column 'figures'.*set tasks.sources.image_column"):
        task(folder, {"prompt": "What?", "figure": "red.png"}, image_column="figures")


def test_rows_of_text_stay_as_they_were(folder):
    rows = source(
        folder, {"prompt": "What?", "images": []}, {"prompt": "Is <image> a tag?"}, {"prompt": "What?", "image": None}
    )
    assert [rows.problem(i).prompt for i in (0, 2)] == ["What?", "What?"]
    assert task(folder, {"prompt": "Is <image> a tag?"}).prompt == "Is <image> a tag?"


def test_plain_prompt_gives_rewards_a_text(folder):
    found = decorated(
        task(folder, {"prompt": "<image>What?", "images": ["red.png"]}), TasksConfig(instruction="Think.")
    )
    assert found.reward_prompt == "[image: red.png]What?\nThink."
    assert shown(found) == [[RED, "What?\nThink."]]
    last = decorated(task(folder, {"prompt": "What?<image>", "images": ["red.png"]}), TasksConfig(instruction="Think."))
    assert shown(last) == [["What?", RED, "\nThink."]]


def test_images_make_problems_different(folder):
    same = {"prompt": "What?", "images": ["red.png"]}
    (folder / "copy.png").write_bytes(png("red"))
    texts = [problem_text(task(folder, same | {"images": [name]})) for name in ("red.png", "copy.png", "blue.png")]
    assert texts[0] == texts[1] != texts[2]
    assert problem_text(Task("t", "s", "r", prompt="What?")) not in texts


# Data sets of the library


GEOMETRY = datasets.Features(
    {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string"), "answer": datasets.Value("string")}
)


def geometry():
    rows = {
        "images": [[{"bytes": png("red"), "path": None}], [{"bytes": png("blue"), "path": None}]],
        "problem": ["<image>Find x.", "<image>Find y."],
        "answer": ["1", "2"],
    }
    return datasets.Dataset.from_dict(rows, features=GEOMETRY)


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_with_bytes(folder, streaming):
    geometry().to_parquet(folder / "data.parquet")
    table = TableLocation("data.parquet", streaming=streaming, base_dir=folder)
    found = of_table(table).problem(1)
    assert shown(found) == [[BLUE, "Find y."]]
    assert found.columns["answer"] == "2"
    with open(found.images[0], "rb") as file:
        assert file.read() == png("blue")  # as it was encoded


def test_live_rows_with_images_of_pillow(folder):
    rows = [{"prompt": "What?", "image": Image.new("RGB", (3, 3), "blue")}]
    for of in (LiveTable(rows), geometry()):
        with_rows = StoredRows(of)
        assert with_rows.fingerprint(with_rows.columns[0]) == StoredRows(of).fingerprint(with_rows.columns[0])
    assert isinstance(StoredRows(geometry())[0]["images"][0]["bytes"], bytes)


def test_looking_at_all_rows_writes_no_image(folder):
    geometry().to_parquet(folder / "data.parquet")
    rows = of_table(TableLocation("data.parquet", base_dir=folder))
    looked = list(problems_of(rows))
    assert not (folder / "media").exists()
    assert looked == [rows.problem(i) for i in (0, 1)]
    assert len(list((folder / "media").iterdir())) == 2


def test_messages_of_a_program(folder, monkeypatch):
    monkeypatch.chdir(folder)
    message = {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (2, 2), "red")}, "What?"]}
    assert shown(Task("t", "s", "r", messages=with_images_of_program([message]))) == [[RED, "What?"]]
    plain = [{"role": "user", "content": "What?"}]
    assert with_images_of_program(plain) == tuple(plain)


OWN = """
from rollover.types import Task

class Source:
    def __len__(self):
        return 1

    def problem(self, index):
        return Task("own/0", "own", "exact_match", messages=({"role": "user", "content": [PART]},))

def make(setup):
    return Source()
"""


def test_own_source_gives_images(folder):
    def of(name):
        part = {"type": "image", "image": str(folder / name)}
        (folder / f"own_{name[:-4]}.py").write_text(f"PART = {part!r}\n{OWN}")
        config = TaskSourceConfig(kind=f"{folder}/own_{name[:-4]}.py:make")
        return build_source(SourceSetup(config, "own", "exact_match", 0)).problem(0)

    assert shown(of("red.png")) == [[RED]]
    with pytest.raises(ValueError, match="number 0 with an image that cannot be used: .*there is no file"):
        of("green.png")


# What is refused, with data file, row and column


def of_parts(*parts):
    return {"prompt": [{"role": "user", "content": list(parts)}]}


IMAGE = {"type": "image", "image": "red.png"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p", "images": ["red.png", "green.png"]}, "column 'images', image 2: there is no file .*green.png"),
        ({"prompt": "p", "image": "green.png"}, "column 'image': there is no file .*green.png"),
        ({"prompt": "<image><image>", "images": ["red.png"]}, "column 'images' has 1 image, and its messages have 2"),
        ({"prompt": "<image>", "images": ["red.png"] * 2}, "column 'images' has 2 images, and its messages have 1 pl"),
        ({"prompt": "<image>", "images": []}, "column 'images' has 0 images, and its messages have 1 placeholder"),
        ({"prompt": "<image>", "image": None}, "column 'image' has 0 images, and its messages have 1 placeholder"),
        ({"prompt": "p", "images": [["red.png"]]}, "column 'images' holds lists in a list"),
        ({"prompt": "p", "images": ["red.png", None]}, "column 'images' holds a list with an empty value"),
        ({"prompt": "p", "images": 7}, "column 'images': a int is no image"),
        ({"prompt": "p", "images": "https://example.org/a.png"}, "set tasks.allow_image_urls = true"),
        ({"prompt": "p", "images": "data:image/png;base64,!"}, "column 'images': a data URL's base64 is damaged"),
        (of_parts({"type": "image"}), "a part {\"type\": \"image\"} without an image, and there is no column images"),
        (of_parts({"type": "image", "image": ["red.png"]}), "a part of type image has a list as its image"),
        (of_parts({"type": "image", "image": "red.png", "url": "b"}), "a part of type 'image' has image and url"),
        (of_parts({"type": "video", "video": "a.mp4"}), "a part of type 'video': text and image are the ones"),
        (of_parts({"type": "input_audio", "input_audio": {}}), "a part of type 'input_audio'"),
        (of_parts(IMAGE, {"type": "text"}), "a message has a part {'type': 'text'}: expected"),
        (of_parts(IMAGE, 7), "a message has a part 7: expected a table with type and text"),
        (of_parts({"type": "image", "image": "green.png"}), "an image of a message: there is no file .*green.png"),
        (of_parts(IMAGE) | {"images": ["red.png"]}, "its messages have images, and column 'images' has 1 more"),
        ({"prompt": [{"role": "system", "content": "s"}], "image": "red.png"}, "there is no user message to show"),
        ({"prompt": "p", "videos": ["a.mp4"]}, "column 'videos' holds what a prompt shows"),
        ({"prompt": "p", "audio": "a.wav"}, "column 'audio' holds what a prompt shows"),
        ({"prompt": [], "image": "red.png"}, "there is no user message"),
        ({"prompt": ["text"], "image": "red.png"}, "'text' in 'prompt' is not a message"),
        ({"prompt": 7, "image": "red.png"}, "column 'prompt' holds 7; expected a text"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_with_file_row_and_column(folder, row, said):
    with pytest.raises(ValueError, match=said) as caught:
        source(folder, {"prompt": "p"}, row).problem(1)
    assert str(caught.value).startswith("dataset 'data.jsonl', line 2: ")
    assert "\n" not in str(caught.value)


def test_images_without_a_chat_template_are_refused(folder):
    with pytest.raises(ValueError, match="line 1: it shows images.*set tasks.chat = true"):
        task(folder, {"prompt": "p", "image": "red.png"}, chat=False)
