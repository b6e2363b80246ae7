from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.audio.aggregate import AudioAggregate, Mode, Samples

FORMS = ("float32", "float16", "float64", "int16", "tensor", "bfloat16", "int16 tensor", "row", "column")
"""How upstream may hold the same samples."""


def signal(length: int) -> Samples:
    """Whole numbers up to 256, every one exact in every form, no two neighbours the same."""
    return (np.arange(length) * 7 % 257).astype(np.float32)


def in_form(samples: Samples, form: str) -> Any:
    match form:
        case "tensor":
            return torch.from_numpy(samples.copy())
        case "bfloat16":
            return torch.from_numpy(samples.copy()).to(torch.bfloat16)
        case "int16 tensor":
            return torch.from_numpy(samples.astype(np.int16))
        case "row":
            return torch.from_numpy(samples.copy())[None, :]
        case "column":
            return samples[:, None]
        case _:
            return samples.astype(form)


def given_out(aggregate: AudioAggregate, pieces: Sequence[Any]) -> Samples:
    return np.concatenate([aggregate.add(piece) for piece in pieces])


def cut(samples: Samples, cuts: Sequence[int]) -> list[Samples]:
    edges = [0, *sorted(cut % (len(samples) + 1) for cut in cuts), len(samples)]
    return [samples[start:end] for start, end in pairwise(edges)]


lengths = st.integers(0, 200)
cuts = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(length=lengths, cuts=cuts, form=st.sampled_from(FORMS), lists=st.lists(st.booleans(), min_size=13, max_size=13))
def test_delta_gives_every_sample_once_however_it_is_split(
    length: int, cuts: list[int], form: str, lists: list[bool]
) -> None:
    whole = signal(length)
    aggregate = AudioAggregate("delta")
    pieces: list[Any] = []
    for piece, as_list in zip(cut(whole, cuts), lists, strict=False):
        half = len(piece) // 2
        entries = [in_form(piece[:half], form), in_form(piece[half:], form)]
        pieces.append(entries if as_list else in_form(piece, form))

    streamed = given_out(aggregate, pieces)

    np.testing.assert_array_equal(streamed, whole)
    np.testing.assert_array_equal(aggregate.audio(), whole)


@given(
    length=lengths,
    snapshots=st.lists(st.integers(0, 1 << 16), max_size=12),
    cuts=cuts,
    form=st.sampled_from(FORMS),
    as_lists=st.booleans(),
)
def test_cumulative_gives_every_sample_once_whatever_the_order_of_snapshots(
    length: int, snapshots: list[int], cuts: list[int], form: str, as_lists: bool
) -> None:
    """Snapshots of any lengths in any order: grown, repeated, truncated, empty."""
    ends = [end % (length + 1) for end in snapshots]
    whole = signal(length)
    aggregate = AudioAggregate("cumulative")
    pieces = [
        [in_form(entry, form) for entry in cut(whole[:end], cuts)] if as_lists else in_form(whole[:end], form)
        for end in ends
    ]

    streamed = given_out(aggregate, [*pieces, []])

    heard = whole[: max(ends, default=0)]
    np.testing.assert_array_equal(streamed, heard)
    np.testing.assert_array_equal(aggregate.audio(), heard)


@given(st.data())
def test_interleaved_requests_do_not_mix(data: st.DataObject) -> None:
    modes: list[Mode] = data.draw(st.lists(st.sampled_from(["delta", "cumulative"]), min_size=2, max_size=4))
    aggregates = [AudioAggregate(mode) for mode in modes]
    sent = [0] * len(modes)
    heard: list[list[Samples]] = [[] for _ in modes]
    for request in data.draw(st.lists(st.integers(0, len(modes) - 1), max_size=20)):
        begin, sent[request] = sent[request], sent[request] + data.draw(st.integers(0, 9))
        whole = signal(sent[request]) + 1000 * request
        piece = whole[begin:] if modes[request] == "delta" else whole
        heard[request].append(aggregates[request].add(piece))
    for request, aggregate in enumerate(aggregates):
        whole = signal(sent[request]) + 1000 * request
        np.testing.assert_array_equal(aggregate.audio(), whole)
        np.testing.assert_array_equal(np.concatenate([*heard[request], whole[:0]]), whole)


def test_empty_snapshot_before_the_first_audio_gives_nothing_and_loses_nothing() -> None:
    aggregate = AudioAggregate("cumulative")
    for empty in (torch.zeros(0), np.zeros((1, 0), np.int64), [], [torch.zeros(0), np.zeros(0)]):
        assert len(aggregate.add(empty)) == 0
    assert aggregate.add(signal(5)).tolist() == signal(5).tolist()


def test_truncated_last_snapshot_loses_no_audio() -> None:
    aggregate = AudioAggregate("cumulative")
    aggregate.add(signal(100))
    assert len(aggregate.add(signal(60))) == 0
    assert aggregate.audio().tolist() == signal(100).tolist()


def test_duplicate_snapshot_gives_nothing_again() -> None:
    aggregate = AudioAggregate("cumulative")
    assert len(aggregate.add(signal(100))) == 100
    assert len(aggregate.add(signal(100))) == 0
    assert aggregate.audio().tolist() == signal(100).tolist()


def test_equal_deltas_are_both_audio() -> None:
    aggregate = AudioAggregate("delta")
    streamed = given_out(aggregate, [signal(4), signal(4)])
    assert streamed.tolist() == aggregate.audio().tolist() == [*signal(4), *signal(4)]


def test_multi_entry_lists_under_delta_keep_every_head() -> None:
    """Each list stands for itself: nothing is skipped for entries of lists before."""
    aggregate = AudioAggregate("delta")
    first = aggregate.add([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    second = aggregate.add([torch.tensor([4.0]), torch.tensor([5.0])])
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])
    assert aggregate.audio().tolist() == [1, 2, 3, 4, 5]


def test_whole_file_in_cumulative_mode_is_the_longest_snapshot_as_it_came() -> None:
    """Pipelines that decode anew may differ in the last bits of the overlap; a whole file has no seam from that."""
    aggregate = AudioAggregate("cumulative")
    aggregate.add(np.float32([0.1, 0.2]))
    assert aggregate.add(np.float32([0.11, 0.21, 0.3])).tolist() == np.float32([0.3]).tolist()
    assert aggregate.audio().tolist() == np.float32([0.11, 0.21, 0.3]).tolist()


@pytest.mark.parametrize("mode", ["delta", "cumulative"])
def test_audio_is_safe_from_reused_buffers_and_from_its_caller(mode: Mode) -> None:
    aggregate = AudioAggregate(mode)
    buffer = torch.tensor([1.0, 2.0])
    new = aggregate.add(buffer)
    buffer.zero_()
    new[:] = 9
    aggregate.audio()[:] = 9
    assert aggregate.audio().tolist() == [1, 2]


@pytest.mark.parametrize(("form", "dtype"), [("int16", np.int16), ("float64", np.float32), ("bfloat16", np.float32)])
def test_int16_stays_and_floats_become_float32(form: str, dtype: type) -> None:
    aggregate = AudioAggregate("delta")
    assert aggregate.add(in_form(signal(3), form)).dtype == dtype
    assert aggregate.add([]).dtype == dtype
    assert aggregate.audio().dtype == dtype


def test_gradients_are_dropped() -> None:
    assert AudioAggregate("delta").add(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([np.zeros((2, 5), np.float32)], r"mono.*\[2, 5\]"),
        ([np.zeros(5, np.int32)], "int32"),
        ([torch.zeros(5, dtype=torch.bool)], "bool"),
        ([np.zeros(5, np.int16), np.zeros(5, np.float32)], "was int16 so far, got float32"),
        ([[np.zeros(5, np.float32), np.zeros(5, np.int16)]], "was float32 so far, got int16"),
    ],
)
def test_what_is_no_mono_audio_is_refused_by_name(pieces: list[Any], said: str) -> None:
    aggregate = AudioAggregate("delta")
    with pytest.raises(ValueError, match=said):
        given_out(aggregate, pieces)


def test_nothing_so_far_is_empty_audio() -> None:
    audio = AudioAggregate("cumulative").audio()
    assert audio.shape == (0,)
    assert audio.dtype == np.float32
