"""What is sent to a rank arrives as it was, bit for bit, and nothing of it is a pickle."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollover.trainer.objective import Counts
from rollover.trainer.ranks import wire
from rollover.types import Media
from rollover.workers.framing import Channel, encode
from samples import random_samples


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def passed(ends: tuple[Channel, Channel], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages as they arrive, sent while they are read: a socket holds little."""
    left, right = ends
    sending = threading.Thread(target=lambda: [left.send(encode(message)) for message in messages])
    sending.start()
    found = [right.receive() for _ in messages]
    sending.join()
    return found


def test_samples_counts_and_streams_arrive_as_they_were(ends: tuple[Channel, Channel]) -> None:
    samples, taught = random_samples(0), np.array([4, 5], np.int32)
    more = {"teacher_prompt_ids": taught, "sequence_id": "s", "role": "solver"}
    samples[0] = dataclasses.replace(samples[0], **more, media=(Media("a.png", "ab" * 32, (8, 6), 1, 2),))
    counts = dataclasses.replace(Counts.of(samples), divided=False)
    known = {"proximal": {s.rollout_id: s.behavior_logprobs[s.mask] for s in samples}}
    (message,) = passed(
        ends,
        {
            "samples": wire.samples_to_json(samples),
            "counts": wire.counts_to_json(counts),
            "known": wire.streams_of(samples[:4], known),
        },
    )
    assert wire.counts_from_json(message["counts"]) == counts
    for ours, theirs in zip(wire.samples_from_json(message["samples"]), samples, strict=True):
        for field in dataclasses.fields(theirs):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert type(a) is type(b), field.name
            if isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), field.name
            else:
                assert a == b, field.name
    assert message["known"]["proximal"].keys() == {s.rollout_id for s in samples[:4]}
    for rollout_id, values in message["known"]["proximal"].items():
        assert values.tobytes() == known["proximal"][rollout_id].tobytes()


def test_large_and_empty_arrays_arrive_between_others(ends: tuple[Channel, Channel]) -> None:
    large = np.random.default_rng(0).standard_normal((3, 400_000))
    first, second = passed(
        ends,
        {"large": large, "none": np.empty(0, np.int32), "some": [1, {"deep": np.array([True])}], "nan": float("nan")},
        {"next": np.float32(0.1)},
    )
    assert first["large"].shape == large.shape and first["large"].tobytes() == large.tobytes()
    assert first["none"].shape == (0,) and first["some"][1]["deep"].tolist() == [True] and np.isnan(first["nan"])
    assert second == {"next": float(np.float32(0.1))}


def test_what_is_no_array_is_not_sent(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="a set cannot be sent"):
        encode({"values": {1, 2}})


def test_an_end_that_is_closed_is_noticed_within_a_message(ends: tuple[Channel, Channel]) -> None:
    header, _ = encode({"array": np.ones(100)})
    ends[0].send([header, b"half"])
    ends[0].close()
    with pytest.raises(ConnectionError):
        ends[1].receive()
