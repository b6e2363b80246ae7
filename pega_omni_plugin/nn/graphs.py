"""One CUDA graph for each number of rows that a step may have.

Launching the kernels of a step one by one takes longer than running them. A graph launches all at once, but always
the same kernels on the same memory: so its inputs stand in buffers of the caller, and a step of ``n`` rows runs the
graph of the next larger bucket, with padding in the rows beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a step: close enough together that padding costs little, few enough to capture at load."""


def buckets(most: int) -> tuple[int, ...]:
    """The buckets of a program of at most ``most`` rows; ``most`` itself is the last."""
    if most < 1:
        raise ValueError(f"most: expected at least 1 row, got {most}")
    return (*(size for size in BUCKETS if size < most), most)


def bucket(rows: int, most: int) -> int:
    """The smallest of ``buckets(most)`` that holds ``rows``.

    Raises:
        ValueError: ``rows`` is not within 1 … ``most``.
    """
    return _smallest(rows, buckets(most))


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A block whose kernels run on ``device``: Triton launches on the current GPU, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class BucketedGraph:
    """Runs ``function(rows)`` for padded numbers of rows, as CUDA graphs if ``capture``, else by calling it.

    ``function`` reads and writes the caller's own buffers ``[:rows]``, which live as long as this object. While
    capturing it is called twice for each bucket, so every row of its inputs must be valid padding by then. It must not
    wait for the device, copy from pageable host memory, or choose by values. Randomness must come from its inputs.
    """

    def __init__(
        self, function: Callable[[int], None], buckets: Sequence[int], device: torch.device, capture: bool
    ) -> None:
        if capture and device.type != "cuda":
            raise ValueError(f"graphs: need a CUDA device, got {device}; turn graphs off")
        self._function = function
        self._buckets = tuple(sorted(buckets))
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if capture:
            with torch.cuda.device(device):
                self._capture()

    def run(self, rows: int) -> int:
        """Run the bucket for ``rows`` rows; returns its size. Does not wait for the device.

        Raises:
            ValueError: ``rows`` is less than 1 or more than the largest bucket.
        """
        size = _smallest(rows, self._buckets)
        with current(self._device):
            if self._graphs:
                self._graphs[size].replay()
            else:
                self._function(size)
        return size

    def _capture(self) -> None:
        # One pool for all: graphs run one at a time, and what the largest took serves the others.
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for size in reversed(self._buckets):
            # Kernels are compiled, and libraries allocate, in a first run: neither may happen in a capture.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._function(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._function(size)
            self._graphs[size] = graph


def _smallest(rows: int, sizes: Sequence[int]) -> int:
    for size in sizes:
        if 1 <= rows <= size:
            return size
    raise ValueError(f"rows: expected 1 to {sizes[-1]}, got {rows}")
