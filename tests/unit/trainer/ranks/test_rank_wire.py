"""What is sent to a rank arrives as it was, bit for bit, and nothing of it is a pickle."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollover.models.flops import ModelFlops
from rollover.trainer.objective import Counts
from rollover.trainer.ranks import wire
from rollover.types import Media, Sample
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
    counts = dataclasses.replace(Counts.from_samples(samples), divided=False)
    (message,) = passed(ends, wire.to_plain({"samples": samples, "counts": counts}))
    assert wire.from_plain(Counts, message["counts"]) == counts
    for ours, theirs in zip(wire.from_plain(list[Sample], message["samples"]), samples, strict=True):
        for field in dataclasses.fields(theirs):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert type(a) is type(b), field.name
            if isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), field.name
            elif field.name != "streams":
                assert a == b, field.name
        assert ours.streams.keys() == theirs.streams.keys()
        for name, values in theirs.streams.items():
            assert ours.streams[name].dtype == values.dtype and ours.streams[name].tobytes() == values.tobytes(), name


class Target:
    def sizes(self, flops: list[ModelFlops], meta: dict[str, Any], limit: int | None = None) -> dict[str, Any]:
        return {"flops": flops, "meta": meta, "limit": limit}


def test_a_method_is_called_with_what_was_sent(ends: tuple[Channel, Channel]) -> None:
    flops, meta = [ModelFlops(1.0, 2.0, 3.0, 4.0, {None: 5, 7: 6})], {"deep": {"list": [1]}}
    (message,) = passed(ends, wire.to_plain({"flops": flops, "meta": meta}))
    (found,) = passed(ends, wire.call(Target(), "sizes", message))
    assert wire.from_plain(list[ModelFlops], found.pop("flops")) == flops
    assert found == {"meta": meta, "limit": None}


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
