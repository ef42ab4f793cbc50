"""Images in a row of tokens: their features in place of the embeddings of placeholders, and their positions.

Shapes: N tokens of the row, P placeholders of its images, E hidden size of the language model.

A vision-language model here is its language model, whose attention is ours, behind one more input: the features of each
distinct image, computed once by the model's own tower and projector. Pixels come from models/processor.py. After its
last image a rollout is text alone, at the index of its token plus a constant.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from rollover.types import Media, Prompt

# Features that are kept of images that may come again, in all.
_KEPT_BYTES = 1 << 30
# Families in which all tokens of an image see each other (transformers adds this to the causal mask).
_BIDIRECTIONAL = ("gemma3",)
# Images of a batch of the tower, at most: their activations are kept for the backward pass.
_IMAGES_AT_ONCE = 64

# Of the pixels of an image, and of what else the tower is given of it.
Shapes = tuple[tuple[int, ...], ...]


class Pixels(Protocol):
    """Source of the pixels of an image, as arguments of the model's `get_image_features` (models/processor.py)."""

    def pixels(self, media: Media) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class ImagePlaces:
    """Placement of the images of a rollout in its first P tokens: the prompt, or more where later ones show images.

    `placeholders`: the indices of the placeholders of each image in `media`. `positions_3P`: positions of these tokens
    in time, height and width; None: the position is the index. `shift`: position minus index of every token after
    them. `bidirectional`: spans [start, end) of tokens
    that attend to each other, in families whose attention within an image is not causal.
    """

    media: tuple[Media, ...]
    placeholders: tuple[np.ndarray, ...]
    positions_3P: np.ndarray | None = None
    shift: int = 0
    bidirectional: tuple[tuple[int, int], ...] = ()

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens [start, end) of the rollout: [n], or [3, n] where they differ by axis."""
        if self.positions_3P is None:
            return np.arange(start, end)
        num = self.positions_3P.shape[1]
        after = np.arange(max(start, num), end) + self.shift
        if start >= num:
            return after
        return np.concatenate((self.positions_3P[:, start:end], np.broadcast_to(after, (3, len(after)))), 1)

    def tokens(self, start: int, end: int, at: int) -> list[ImageTokens]:
        """Return the image tokens among tokens [start, end), which begin at index `at` of a row."""
        found = []
        for image, places in zip(self.media, self.placeholders, strict=True):
            which = np.flatnonzero((places >= start) & (places < end))
            if len(which):
                found.append(ImageTokens(image, at + places[which] - start, which))
        return found

    def spans(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the bidirectional spans among tokens [start, end), counted from `start`."""
        return tuple(
            (first - start, min(last, end) - start) for first, last in self.bidirectional if start <= first < end
        )

    def check_text_follows(self, num_tokens: int) -> None:
        """Raise ValueError if the last of `num_tokens` is in a bidirectional span: the engine computes that token
        apart from those before it."""
        if self.bidirectional and self.bidirectional[-1][1] >= num_tokens:
            raise ValueError(f"image {self.media[-1].source} has the last token: write a text after it")

    def chunk_end(self, start: int, end: int) -> int:
        """Return the end, near `end`, of a chunk from `start` that cuts no bidirectional span."""
        for first, last in self.bidirectional:
            if first < end < last:
                return first if first > start else last
        return end


@dataclass(frozen=True)
class ImageTokens:
    """Placeholders of one image in a row: the row's token `at[i]` gets the image's feature number `which[i]`."""

    media: Media
    at: np.ndarray
    which: np.ndarray


@dataclass(frozen=True)
class RowImages:
    """Features of the images of a row: `features_PE` replace the embeddings of the tokens `at_P`, in order.

    `deepstack`: features that the first layers add to the hidden states of these tokens, [P, E] for each layer.
    """

    at_P: torch.Tensor
    features_PE: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    def embedded(self, embeddings_NE: torch.Tensor) -> torch.Tensor:
        """Return the row's embeddings with the features in place."""
        return embeddings_NE.index_copy(0, self.at_P, self.features_PE.to(embeddings_NE.dtype))

    def arguments(self, num_tokens: int) -> dict[str, Any]:
        """Return further arguments of the language model, for a row [1, N]."""
        if not self.deepstack:
            return {}
        mask_N = torch.zeros(num_tokens, dtype=torch.bool, device=self.at_P.device)
        mask_N[self.at_P] = True
        return {"visual_pos_masks": mask_N[None], "deepstack_visual_embeds": list(self.deepstack)}


@dataclass(frozen=True)
class _Features:
    features_PE: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.features_PE, *self.deepstack))


class Vision:
    """Image features and positions of one copy of a vision-language model.

    `keeps`: features are kept until `forget`, and have no gradient. `flops`: model FLOPs of all features so far, with
    their backward pass where they have a gradient.
    """

    def __init__(self, model: Any, processor: Pixels, *, keeps: bool) -> None:
        self.model, self.processor, self.keeps = model, processor, keeps
        self.flops = 0.0
        self._placeholder = model.config.image_token_id
        self._is_bidirectional = model.config.model_type in _BIDIRECTIONAL
        self._only_adapters = not any(p.requires_grad for n, p in tower_parameters(model) if "lora_" not in n)
        self._kept: OrderedDict[str, _Features] = OrderedDict()
        self._flops_of: dict[Shapes, float] = {}

    @classmethod
    def from_model(cls, model: Any, processor: Pixels | None) -> Vision | None:
        """Return the Vision of a model of the trainer, which keeps features unless their tower is trained."""
        if processor is None:
            return None
        return cls(model, processor, keeps=not trains_tower(model))

    def place_images(self, prompt: Prompt) -> ImagePlaces:
        """Return the placement of the images of `prompt`. ValueError if its ids do not fit its media."""
        ids = np.asarray(prompt.ids)
        media = tuple(sorted(prompt.media, key=lambda m: m.offset))
        places = []
        for image in media:
            span = ids[image.offset : image.offset + image.count]
            if len(span) < image.count or {span[0], span[-1]} != {self._placeholder}:
                raise ValueError(
                    f"image {image.source}: its placeholders are not tokens {image.offset} on of the prompt"
                )
            places.append(image.offset + np.flatnonzero(span == self._placeholder))
        self._check_places(ids, np.concatenate(places))
        positions_3P, shift = self._positions(ids, media, places)
        # Crops of an image may have text between them.
        runs = [run for of in places for run in np.split(of, np.flatnonzero(np.diff(of) != 1) + 1)]
        spans = tuple((int(run[0]), int(run[-1]) + 1) for run in runs) if self._is_bidirectional else ()
        return ImagePlaces(media, tuple(places), positions_3P, shift, spans)

    @torch.no_grad()
    def prepare(self, images: ImagePlaces) -> None:
        """Compute and keep the features of a prompt's images. ValueError if that fails, or their number differs from
        that of the placeholders."""
        features = self._features(list({image.digest: image for image in images.media}.values()))
        for image, places in zip(images.media, images.placeholders, strict=True):
            if (num := len(features[image.digest].features_PE)) != len(places):
                raise ValueError(f"image {image.source} has {num} features, and its prompt {len(places)} placeholders")

    def check_text(self, prompt: Prompt) -> None:
        """Raise ValueError if a prompt without images has a placeholder."""
        self._check_places(np.asarray(prompt.ids), np.empty(0, np.int64))

    def _check_places(self, ids: np.ndarray, places: np.ndarray) -> None:
        """Raise ValueError unless `places`, the placeholders of the images, are all placeholders in `ids`."""
        expected = np.flatnonzero(ids == self._placeholder)
        if not np.array_equal(np.sort(places), expected):
            raise ValueError(
                f"a prompt has {len(expected)} placeholders of images, and its images stand for {len(places)} of them:"
                " a text must not have the model's token for an image"
            )

    def row(self, tokens: Sequence[ImageTokens]) -> RowImages | None:
        """Return the features for the tokens of a row; each distinct image is computed once. None: no tokens."""
        if not tokens:
            return None
        device = next(self.model.parameters()).device
        features = self._features(list({t.media.digest: t.media for t in tokens}.values()))
        parts = [(features[t.media.digest], torch.from_numpy(t.which).to(device)) for t in tokens]
        at_P = torch.from_numpy(np.concatenate([t.at for t in tokens])).to(device)
        stacks = zip(*([x[which] for x in found.deepstack] for found, which in parts), strict=True)
        return RowImages(
            at_P,
            torch.cat([found.features_PE[which] for found, which in parts]),
            tuple(torch.cat(list(of_layer)) for of_layer in stacks),
        )

    def forget(self) -> None:
        """Discard all kept features: the weights of the tower have changed."""
        self._kept.clear()

    def _positions(
        self, ids: np.ndarray, media: Sequence[Media], places: Iterable[np.ndarray]
    ) -> tuple[np.ndarray | None, int]:
        """(positions [3, prompt], shift of what follows) in families with positions in time, height and width."""
        index = getattr(self.model.model, "get_rope_index", None)
        if index is None:
            return None, 0
        kinds = np.zeros(len(ids), np.int64)
        kinds[np.concatenate(list(places))] = 1
        grids = torch.tensor([m.grid for m in media])
        as_row = (torch.from_numpy(x.astype(np.int64))[None] for x in (ids, kinds))
        positions_31P, shift_11 = index(*as_row, image_grid_thw=grids)
        return positions_31P[:, 0].numpy(), int(shift_11.flatten()[0])

    def _features(self, images: Sequence[Media]) -> dict[str, _Features]:
        """Return the features by digest. Images whose pixels have one shape form one batch. ValueError if a file has
        changed."""
        found = {image.digest: self._kept[image.digest] for image in images if image.digest in self._kept}
        for digest in found:
            self._kept.move_to_end(digest)
        batches: dict[Shapes, dict[str, dict[str, torch.Tensor]]] = {}
        for image in images:
            if image.digest not in found:
                pixels = self.processor.pixels(image)
                batches.setdefault(tuple(tuple(x.shape) for x in pixels.values()), {})[image.digest] = pixels
        for shapes, batch in batches.items():
            digests = list(batch)
            for start in range(0, len(batch), _IMAGES_AT_ONCE):
                part = digests[start : start + _IMAGES_AT_ONCE]
                of_part = self._tower([batch[digest] for digest in part], shapes)
                found |= dict(zip(part, of_part, strict=True))
        if self.keeps:
            for digest in found.keys() - self._kept.keys():
                self._keep(digest, found[digest])
        return found

    def _tower(self, images: Sequence[dict[str, torch.Tensor]], shapes: Shapes) -> list[_Features]:
        """Run tower and projector over images whose pixels have these shapes. The FLOPs of one are counted once."""
        device = next(self.model.parameters()).device
        pixels = {name: torch.cat([image[name] for image in images]).to(device) for name in images[0]}
        counter = FlopCounterMode(display=False) if shapes not in self._flops_of else contextlib.nullcontext()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.keeps), counter:
            out = self.model.get_image_features(**pixels, return_dict=True)
            grad = torch.is_grad_enabled()
        if isinstance(counter, FlopCounterMode):
            self._flops_of[shapes] = float(counter.get_total_flops()) / len(images)
        passes = 1 if not grad else 2 if self._only_adapters else 3
        self.flops += self._flops_of[shapes] * len(images) * passes
        stacks = getattr(out, "deepstack_features", None) or ()
        features = _flat(out.pooler_output).chunk(len(images))
        by_layer = [_flat(stack).chunk(len(images)) for stack in stacks]
        return [_Features(of, tuple(layer[i] for layer in by_layer)) for i, of in enumerate(features)]

    def _keep(self, digest: str, found: _Features) -> None:
        self._kept[digest] = found
        self._kept.move_to_end(digest)
        while len(self._kept) > 1 and sum(f.num_bytes for f in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)


NO_IMAGES = ImagePlaces((), ())


def image_places(vision: Vision | None, prompt: Prompt) -> ImagePlaces:
    """Return the placement of the images of `prompt`. ValueError if it has some and the model takes none."""
    if not prompt.media:
        if vision is not None:
            vision.check_text(prompt)
        return NO_IMAGES
    if vision is None:
        raise ValueError(
            f"a prompt shows the image {prompt.media[0].source}, and this model takes text alone: set model.path to a"
            " vision-language model"
        )
    return vision.place_images(prompt)


def joined_positions(parts: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [N] of parts [n], or [3, N] where one part is [3, n]: text has the same position on all axes."""
    if all(part.ndim == 1 for part in parts):
        return np.concatenate(parts).astype(np.int64)
    return np.concatenate([np.broadcast_to(part, (3, part.shape[-1])) for part in parts], 1).astype(np.int64)


def _flat(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """[P, E] of the features of one image, whose tiles may be apart."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def takes_images(config: Any) -> bool:
    """Return whether transformers loads a model of this configuration as an image-text (vision-language) model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    has_tower = getattr(config, "vision_config", None) is not None and hasattr(config, "image_token_id")
    return has_tower and config.model_type in NAMES


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the token ids of image and video placeholders. Their probability is 0."""
    if not takes_images(config):
        return ()
    names = ("image_token_id", "video_token_id")
    return tuple(sorted({i for name in names if isinstance(i := getattr(config, name, None), int)}))


def trains_tower(model: Any) -> bool:
    """Return whether weights or adapters of the tower or the projector are trained."""
    return any(parameter.requires_grad for _, parameter in tower_parameters(model))


def tower_modules(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the names and modules of tower and projector; nothing for a text model."""
    if not takes_images(model.config):
        return
    text = (model.get_decoder(), model.get_output_embeddings())
    of_text = {id(m) for part in text for m in part.modules()}
    for name, module in model.named_modules():
        if id(module) not in of_text and not any(m is part for m in module.modules() for part in text):
            yield name, module


def tower_parameters(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the names and parameters of tower and projector: all but the language model's."""
    of_text = {id(p) for m in (model.get_decoder(), model.get_output_embeddings()) for p in m.parameters()}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in of_text]
