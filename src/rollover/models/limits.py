"""What a model can be given: token ids of its vocabulary, at positions that it has. Checked at the doors, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollover.models.load import max_positions


@dataclass(frozen=True)
class Limits:
    """`vocabulary`: ids are below it. `positions`: tokens of the longest sequence, None if the model does not say.

    An id outside of the vocabulary is another row's memory to a kernel; a position outside is one never trained.
    """

    vocabulary: int
    positions: int | None

    @classmethod
    def of(cls, model: Any) -> Limits:
        """Those of a Hugging Face causal LM."""
        rows = (len(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
        return cls(min(rows), max_positions(model.config.get_text_config()))

    def check(self, rollout_id: str, prompt_ids: npt.ArrayLike, token_ids: npt.ArrayLike) -> None:
        """ValueError naming the rollout where a token of its prompt or its answer is none, or where it is too long."""
        lengths = []
        for part, ids in (("prompt", np.asarray(prompt_ids)), ("answer", np.asarray(token_ids))):
            lengths.append(len(ids))
            if not len(ids):
                continue
            if ids.dtype.kind not in "iu":
                raise ValueError(f"rollout {rollout_id}: the token ids of its {part} are {ids.dtype}, not integers")
            if ids.min() < 0 or ids.max() >= self.vocabulary:
                place = int(np.flatnonzero((ids < 0) | (ids >= self.vocabulary))[0])
                raise ValueError(
                    f"rollout {rollout_id}: token {place} of its {part} is {ids[place]}, and the model's vocabulary has"
                    f" {self.vocabulary} ids, from 0 on. Was it made with another tokenizer?"
                )
        if not lengths[0]:
            raise ValueError(f"rollout {rollout_id} has an empty prompt: nothing predicts its first token")
        if self.positions is not None and sum(lengths) > self.positions:
            raise ValueError(
                f"rollout {rollout_id} has {sum(lengths)} tokens, its prompt included, and the model {self.positions}"
                " positions"
            )
