"""Buckets, and the order in which their graphs are captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.nn.graphs import BUCKETS, BucketedGraph, bucket, buckets, current

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@given(st.integers(1, 300), st.data())
def test_a_bucket_is_the_smallest_that_holds_the_rows(most: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, most))
    found = bucket(rows, most)
    assert found in buckets(most)
    assert rows <= found <= most
    assert not [size for size in buckets(most) if rows <= size < found]


def test_the_last_bucket_is_what_the_program_has() -> None:
    assert buckets(1) == (1,)
    assert buckets(10) == (1, 2, 4, 8, 10)
    assert buckets(128) == BUCKETS
    assert buckets(200) == (*BUCKETS, 200)


@pytest.mark.parametrize("rows", [0, -1, 17])
def test_rows_that_no_bucket_holds_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="rows: expected 1 to 16"):
        bucket(rows, 16)
    with pytest.raises(ValueError, match="rows: expected 1 to 16"):
        BucketedGraph(lambda rows: None, buckets(16), CPU, capture=False).run(rows)


def test_a_program_has_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="most"):
        buckets(0)


def test_without_graphs_the_same_padded_rows_are_computed() -> None:
    given_, doubled = torch.arange(8.0), torch.zeros(8)

    def double(rows: int) -> None:
        torch.mul(given_[:rows], 2, out=doubled[:rows])

    graph = BucketedGraph(double, buckets(8), CPU, capture=False)
    assert not doubled.any()
    assert graph.run(3) == 4
    assert doubled.tolist() == [0, 2, 4, 6, 0, 0, 0, 0]
    given_[0] = 5
    assert graph.run(1) == 1
    assert doubled.tolist() == [10, 2, 4, 6, 0, 0, 0, 0]


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="turn graphs off"):
        BucketedGraph(lambda rows: None, buckets(4), CPU, capture=True)


@dataclass
class Device:
    """As much of ``torch.cuda`` as capturing uses, with its rules: work that was not run before on the stream cannot be
    captured, a capture does no work, and a stream that was not waited for is a race."""

    stream: str = "main"
    current: torch.device | None = None
    capturing: Graph | None = None
    ran: list[tuple[str, int]] = field(default_factory=list)  # (stream, rows) of work that was done
    waited: list[tuple[str, str]] = field(default_factory=list)
    captured: list[Graph] = field(default_factory=list)

    def work(self, rows: int) -> None:
        """A kernel of the program."""
        if self.capturing is not None:
            assert (self.stream, rows) in self.ran, "compiles or allocates while capturing"
            self.capturing.rows = rows
        else:
            self.ran.append((self.stream, rows))


@dataclass
class Graph:
    device: Device
    rows: int | None = None
    pool: object = None

    def replay(self) -> None:
        assert self.rows is not None
        self.device.ran.append(("replay", self.rows))


@dataclass
class Stream:
    device: Device
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.device.waited.append((self.name, other.name))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    state = Device()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, state.stream = state.stream, stream.name
        yield
        state.stream = before

    @contextmanager
    def capture(graph: Graph, pool: object, stream: Stream) -> Iterator[None]:
        assert state.waited[-2:] == [("side", "main"), ("main", "side")]
        graph.pool, state.capturing = pool, graph
        state.captured.append(graph)
        with on(stream):
            yield
        state.capturing = None

    @contextmanager
    def chosen(chosen: torch.device) -> Iterator[None]:
        assert chosen == CUDA
        before, state.current = state.current, chosen
        yield
        state.current = before

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(state, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(state, state.stream))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(state))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return state


def test_every_bucket_is_warmed_up_and_captured_once_largest_first_in_one_pool(device: Device) -> None:
    BucketedGraph(device.work, (1, 2, 4), CUDA, capture=True)
    assert device.ran == [("side", 4), ("side", 2), ("side", 1)]
    assert [graph.rows for graph in device.captured] == [4, 2, 1]
    assert len({id(graph.pool) for graph in device.captured}) == 1


def test_a_run_replays_the_bucket_and_calls_nothing(device: Device) -> None:
    graph = BucketedGraph(device.work, (4, 1, 2), CUDA, capture=True)
    device.ran.clear()
    assert [graph.run(rows) for rows in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert device.ran == [("replay", 1), ("replay", 2), ("replay", 4), ("replay", 4)]


def test_kernels_run_on_the_device_of_their_tensors(device: Device) -> None:
    """Without a capture too: the fixture's ``torch.cuda.device`` says which was made current."""
    graph = BucketedGraph(lambda rows: device.ran.append((str(device.current), rows)), (1, 2), CUDA, capture=False)
    graph.run(2)
    with current(CPU):
        graph.run(1)
    assert device.ran == [("cuda:0", 2), ("cuda:0", 1)]
    assert device.current is None
