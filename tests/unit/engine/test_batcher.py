"""Who runs and who waits: arrival order is kept whatever happens, and short memory costs the youngest its cache."""

from __future__ import annotations

import random

import torch

from rollover.engine.embedded.batch import Batcher, Sequence
from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.protocol import ExtendRequest
from rollover.types import Prompt, SamplingParams

ROW = 64  # tokens of the shortest row


def batcher(max_tokens: int, max_running: int = 100) -> Batcher:
    layers = 4
    cache = KVCache(layers, 1, 1, torch.float32, torch.device("cpu"), max_bytes=2 * 4 * layers * max_tokens)
    return Batcher(cache, max_running)


def arrive(of: Batcher, *names: int, num_tokens: int = ROW) -> list[Sequence]:
    sequences = [
        Sequence(ExtendRequest(f"{name}-0", Prompt((1,) * 5), (), 1000, 0, SamplingParams()), None, [1] * num_tokens)
        for name in names
    ]
    of.waiting.extend(sequences)
    return sequences


def prefill(of: Batcher) -> None:
    for seq in of.running:
        seq.kv_len = len(seq.tokens) - 1


def names(sequences) -> list[str]:
    return [seq.request.rollout_id[0] for seq in sequences]


def test_nothing_is_preempted_as_long_as_all_fit() -> None:
    of = batcher(100 * ROW)
    arrive(of, 0, 1, 2)
    of.admit()
    prefill(of)
    assert names(of.make_room()) == ["0", "1", "2"] and of.num_preemptions == 0


def test_the_youngest_is_preempted_and_is_the_next_to_run() -> None:
    of = batcher(8 * ROW)
    first, second, third, fourth = arrive(of, 0, 1, 2, 3)
    of.admit()
    assert names(of.running) == ["0", "1", "2", "3"]
    prefill(of)
    for seq in of.running:
        seq.tokens.append(1)  # now all of them need a longer row
        seq.kv_len += 1
    decoding = of.make_room()
    assert of.num_preemptions > 0 and decoding, "this memory holds some of them, not all"
    assert decoding == of.running == [first, second, third, fourth][: len(decoding)]
    assert names(of.waiting) == names([first, second, third, fourth][len(decoding) :])
    assert of.num_preemptions == len(of.waiting)
    for seq in of.waiting:
        assert seq.bucket is None and seq.kv_len == 0 and seq.computed == len(seq.tokens) - 1
    (late,) = arrive(of, 9)
    of.retire(first, keep_kv=False)
    of.admit()
    assert of.running[-1] is not late, "who was preempted goes before who comes"


def test_what_is_kept_loses_its_cache_before_anything_that_runs() -> None:
    """The one that was kept first goes first, and no more of them than must."""
    of = batcher(6 * ROW)
    *others, last = arrive(of, 0, 1, 2, 3)
    of.admit()
    prefill(of)
    for seq in others:
        of.retire(seq, keep_kv=True)
    seen = [names(of.kept.values())]
    while len(last.tokens) < 3 * ROW:
        last.tokens.append(1)
        last.kv_len += 1
        assert of.make_room() == [last]
        if names(of.kept.values()) != seen[-1]:
            seen.append(names(of.kept.values()))
    assert seen == [["0", "1", "2"], ["1", "2"], []] and of.num_preemptions == 0


def test_arrival_order_is_kept_under_any_pressure() -> None:
    assert sum(random_run(seed) for seed in range(20)) > 20, "memory was hardly ever short"


def random_run(seed: int) -> int:
    """Sequences that come, grow and go at random; returns how many were preempted."""
    rng = random.Random(seed)
    of = batcher(rng.randint(6, 12) * ROW, max_running=rng.randint(1, 6))
    alive: list[Sequence] = []
    for name in range(60):
        if len(alive) < 8 and rng.random() < 0.5:
            alive += arrive(of, name, num_tokens=rng.randint(6, 2 * ROW))
        of.admit()
        prefill(of)
        before, preempted = list(of.running), of.num_preemptions
        for seq in before:
            if rng.random() < 0.9:
                seq.tokens.append(1)
                seq.kv_len += 1
        decoding = of.make_room()
        assert of.running == decoding == before[: len(decoding)], "only the youngest are preempted"
        assert of.num_preemptions - preempted == len(before) - len(decoding)
        assert all(seq.bucket is not None and seq.bucket.row_tokens >= len(seq.tokens) for seq in decoding)
        assert [*of.active()] == alive, "those that run and those that wait stand in the order of their arrival"
        assert len(of.running) <= of.max_running and of.cache.num_bytes <= of.cache.max_bytes
        for seq in list(of.running):
            if len(seq.tokens) >= of.cache.max_tokens or rng.random() < 0.03:
                of.retire(seq, keep_kv=False)
                alive.remove(seq)
        if rng.random() < 0.1:
            of.drop_all_kv()
            assert not of.running and [*of.waiting] == alive and of.cache.num_bytes == 0
    return of.num_preemptions
