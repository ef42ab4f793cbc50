"""Processors of image-text models: prompts with placeholders, pixels of one image, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import tiny
from rollover.models.chat_template import prompt_arguments
from rollover.models.processor import build_processor, takes_images
from rollover.tasks.prompts import encode_prompt, encoder
from rollover.types import Prompt, Task
from vision.families import FAMILIES, write

SOURCE = {"trust_remote_code": False}
SIZES = {"a": (16, 16), "b": (40, 10), "c": (30, 40)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = write(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return of


@pytest.fixture
def images(tmp_path):
    draw = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    return tmp_path


def processor(folder, **kwargs):
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    found = build_processor(str(folder), SOURCE, kwargs, tokenizer, config)
    assert found is not None
    return found


def part(images, name):
    return {"type": "image", "image": str(images / f"{name}.png"), "sha256": name}


def text(said):
    return {"type": "text", "text": said}


def conversation(images):
    content = [
        part(images, "a"),
        text("What "),
        part(images, "b"),
        text(" is it? "),
        part(images, "a"),
        part(images, "c"),
    ]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]


def prompt_of(found, messages):
    messages, options = prompt_arguments(messages)
    return found.prompt(messages, **options)


def features(model, pixels):
    with torch.no_grad():
        out = model.get_image_features(**pixels, return_dict=True).pooler_output
    return torch.cat([of.reshape(-1, of.shape[-1]) for of in out])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_pixels_are_those_of_the_family(folders, images, family):
    folder = folders(family)
    found, messages = processor(folder), conversation(images)
    prompt = prompt_of(found, messages)

    # The ids of transformers' own way, with the images in one call.
    own = AutoProcessor.from_pretrained(folder)
    inline = [
        {**m, "content": [p if p["type"] == "text" else p | {"image": Image.open(p["image"])} for p in m["content"]]}
        if isinstance(m["content"], list)
        else m | {"content": [text(m["content"])] if family in ("smolvlm", "idefics3") else m["content"]}
        for m in messages
    ]
    whole = own.apply_chat_template(
        inline, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    assert list(prompt.ids) == whole["input_ids"][0].tolist()

    # The images lie one behind the other, and all placeholders are in them.
    assert [m.source for m in prompt.media] == [str(images / f"{name}.png") for name in ("a", "b", "a", "c")]
    assert [m.size for m in prompt.media] == [SIZES[name] for name in ("a", "b", "a", "c")]
    is_place = [i == found.placeholder_id for i in prompt.ids]
    inside = [m for m in prompt.media if is_place[m.offset] and is_place[m.offset + m.count - 1]]
    assert len(inside) == 4
    assert sum(is_place) == sum(sum(is_place[m.offset : m.offset + m.count]) for m in prompt.media)
    assert all(a.offset + a.count <= b.offset for a, b in zip(prompt.media, prompt.media[1:], strict=False))
    assert (prompt.media[0].grid != ()) == family.startswith("qwen")

    # Each image by itself has the features that it has among the others.
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    alone = [features(model, found.pixels(m)) for m in prompt.media]
    assert [len(of) for of in alone] == [sum(is_place[m.offset : m.offset + m.count]) for m in prompt.media]
    of_images = {k: v for k, v in whole.items() if k.startswith(("pixel", "image"))}
    assert torch.equal(torch.cat(alone), features(model, of_images))

    assert Prompt.of(prompt.ids, json.loads(json.dumps(prompt.media_to_json())).get("media")) == prompt


def test_images_of_one_size_have_equal_ids_and_other_media(folders, images):
    found = processor(folders("qwen2_5_vl"))
    Image.new("RGB", SIZES["a"]).save(images / "d.png")
    a, d = (prompt_of(found, [{"role": "user", "content": [part(images, name)]}]) for name in "ad")
    assert a.ids == d.ids and a != d and a.media[0].digest != d.media[0].digest


def test_processor_kwargs_change_the_size(folders, images):
    messages = [{"role": "user", "content": [part(images, "c")]}]
    counts = [
        prompt_of(processor(folders("qwen2_5_vl"), **kwargs), messages).media[0].count
        for kwargs in ({}, {"max_pixels": 256})
    ]
    assert counts[0] > counts[1] > 0
    media = prompt_of(processor(folders("qwen2_5_vl")), messages).media[0]
    with pytest.raises(
        ValueError, match="c.png has .* tokens and the grid .*model.processor_kwargs, has changed since"
    ):
        processor(folders("qwen2_5_vl"), max_pixels=256).pixels(media)


def test_changed_and_missing_images_are_named(folders, images):
    found = processor(folders("internvl"))
    media = prompt_of(found, [{"role": "user", "content": [part(images, "a")]}]).media[0]
    assert found.pixels(media)["pixel_values"].shape[-2:] == (16, 16)
    Image.new("RGB", SIZES["a"]).save(images / "a.png")
    with pytest.raises(ValueError, match="image .*a.png has changed since it was put into a prompt"):
        found.pixels(media)
    (images / "a.png").unlink()
    with pytest.raises(ValueError, match="there is no file .*a.png"):
        found.pixels(media)


@pytest.mark.parametrize(
    ("family", "token"),
    [
        ("smolvlm", "<image>"), ("qwen3_vl", "<|image_pad|>"), ("gemma3", "<start_of_image>"),
        ("gemma3", "<image_soft_token>"), ("internvl", "<IMG_CONTEXT>"), ("mistral3", "[IMG]"),
    ],
)  # fmt: skip
def test_text_like_an_image_token_is_refused(folders, images, family, token):
    content = [part(images, "a"), text(f"Write {token} down.")]
    task = Task("data/3", "data", "r", messages=({"role": "user", "content": content},))
    found = processor(folders(family))
    with pytest.raises(
        ValueError, match="task 'data/3' of data: the text of its user message has .*, which stands for"
    ):
        encode_prompt(task, found.tokenizer, found)


def test_template_that_leaves_an_image_out_is_refused(folders, images):
    found = processor(folders("mistral3"))
    found.tokenizer.chat_template = "{{ bos_token }}[INST]{{ messages[0]['content'][-1]['text'] }}[/INST]"
    with pytest.raises(ValueError, match="the chat template shows 0 of its 1 images"):
        prompt_of(found, [{"role": "user", "content": [part(images, "a"), text("What?")]}])


def test_image_that_the_processor_refuses_is_named_by_its_size(folders, images):
    Image.new("RGB", (800, 1)).save(images / "a.png")
    task = Task("data/0", "data", "r", messages=({"role": "user", "content": [part(images, "a")]},))
    found = processor(folders("qwen3_vl"))
    with pytest.raises(ValueError, match=r"task 'data/0'.*processor refuses its images \(800 x 1\): .*aspect ratio"):
        encode_prompt(task, found.tokenizer, found)


def test_truncated_image_names_the_task(folders, images):
    content = (images / "c.png").read_bytes()
    (images / "c.png").write_bytes(content[:200])
    task = Task("data/5", "data", "r", messages=({"role": "user", "content": [part(images, "c")]},))
    found = processor(folders("gemma3"))
    with pytest.raises(ValueError, match="task 'data/5' of data: .*c.png cannot be read as an image: "):
        encode_prompt(task, found.tokenizer, found)


def test_model_of_text_refuses_images(images):
    task = Task("data/0", "data", "r", messages=({"role": "user", "content": [part(images, "a")]},))
    with pytest.raises(ValueError, match="task 'data/0' of data: it shows images, and the model.*takes text alone"):
        encoder(tiny.tokenizer())(task)


def test_text_alone_loads_no_processor(folders, monkeypatch):
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda path, **kwargs: 1 / 0)
    found = processor(folders("qwen3_vl"))
    task = Task("data/0", "data", "r", messages=({"role": "user", "content": "Hello!"},))
    assert encode_prompt(task, found.tokenizer, found) == encode_prompt(task, found.tokenizer)


def test_models_of_text_have_no_processor():
    config = tiny.model().config
    assert not takes_images(config)
    assert build_processor("none", SOURCE, {}, tiny.tokenizer(), config) is None


@pytest.mark.parametrize(
    ("missing", "said"),
    [("torchvision", "pip install 'rollover.vision.' .*torchvision"), ("num2words", "pip install 'rollover.vision.'")],
)
def test_missing_packages_are_named(folders, images, missing, said, monkeypatch):
    import transformers.models.smolvlm.processing_smolvlm as module

    if missing == "num2words":
        monkeypatch.setattr(module, "num2words", None)
    else:

        def absent(*args, **kwargs):
            raise ImportError("AutoVideoProcessor requires the Torchvision library but it was not found")

        monkeypatch.setattr(AutoProcessor, "from_pretrained", absent)
    with pytest.raises(ValueError, match=said):
        prompt_of(processor(folders("smolvlm")), [{"role": "user", "content": [part(images, "a")]}])


def test_folder_without_an_image_processor_is_named(folders, images, tmp_path):
    folder = tmp_path / "gemma3"
    shutil.copytree(folders("gemma3"), folder)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="gemma3': its processor cannot be loaded|it has no image processor"):
        prompt_of(processor(folder), [{"role": "user", "content": [part(images, "a")]}])


def test_kwargs_cannot_trust_code(folders, images, monkeypatch):
    given = {}
    own = AutoProcessor.from_pretrained
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda path, **kwargs: given.update(kwargs) or own(path))
    untrusted = processor(folders("gemma3"), trust_remote_code=True, image_seq_length=4)
    with pytest.raises(ValueError, match=r"model.processor_kwargs.trust_remote_code: \w+ has no such argument"):
        prompt_of(untrusted, [{"role": "user", "content": [part(images, "a")]}])
    assert given == {"trust_remote_code": False, "image_seq_length": 4}


def test_template_of_the_processor_alone_is_used(folders, images, tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(folders("qwen2_5_vl"), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    messages = [{"role": "user", "content": [part(images, "a")]}]
    assert prompt_of(processor(folder), messages) == prompt_of(processor(folders("qwen2_5_vl")), messages)
