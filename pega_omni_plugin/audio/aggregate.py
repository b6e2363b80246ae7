"""One request's audio out of what an upstream pipeline yields for it.

Pipelines differ in what a yield holds: *delta* ones yield what is new, *cumulative* ones yield a snapshot of everything
so far, again and again. Which one it is, the pipeline declares; taking one for the other repeats or loses audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Mode = Literal["delta", "cumulative"]
"""What a yield holds: only what is new, or everything so far."""

Samples = npt.NDArray[Any]
"""Mono audio, float32 or int16, shape ``[samples]``."""

Entry = torch.Tensor | npt.NDArray[Any]
"""A run of mono samples, shape ``[samples]`` or that with axes of length 1; any float type, or int16."""


class AudioAggregate:
    """The audio of one request. Its handler makes it, feeds it every yield in order and drops it in the end.

    ``add`` is for a handler that streams, ``audio`` for one that answers with a whole file; both see every sample once.
    Arrays handed out are the caller's own. Floats of any width come out as float32.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._pieces: list[Samples] = []  # delta: what was added; cumulative: the longest snapshot alone
        self._length = 0
        self._dtype: np.dtype[Any] | None = None

    def add(self, piece: Entry | Sequence[Entry]) -> Samples:
        """Take one yield, its entries (if it is a list) in order; returns the samples that are new, maybe none.

        A snapshot that is no longer than an earlier one (a duplicate, a truncated or an empty last one) has nothing
        new and changes nothing.

        Raises:
            ValueError: the entry has several channels, is no audio by its type, or not of the type of those before.
        """
        samples = self._flat(piece)
        if self.mode == "delta":
            new = samples
            if len(new):
                self._pieces.append(samples)
        else:
            new = samples[self._length :]
            if len(new):
                self._pieces = [samples]
        self._length += len(new)
        return new.copy()

    def audio(self) -> Samples:
        """Everything so far. In cumulative mode that is the longest snapshot, as it came."""
        return np.concatenate(self._pieces) if self._pieces else self._nothing()

    def _flat(self, piece: Entry | Sequence[Entry]) -> Samples:
        """The yield as one array of its own, shape ``[samples]``: pipelines may reuse their buffers."""
        entries = [piece] if isinstance(piece, torch.Tensor | np.ndarray) else piece
        runs = [run for run in map(self._run, entries) if len(run)]
        return np.concatenate(runs) if runs else self._nothing()

    def _run(self, entry: Entry) -> Samples:
        if isinstance(entry, torch.Tensor):
            # NumPy has no bfloat16.
            array: Samples = (entry.float() if entry.is_floating_point() else entry).detach().cpu().numpy()
        else:
            array = entry
        if array.size == 0:  # has no audio, so its shape and type say nothing
            return self._nothing()
        if array.size != max(array.shape, default=1):
            raise ValueError(f"audio must be mono, shape [samples], got shape {list(array.shape)}")
        if np.issubdtype(array.dtype, np.floating):
            array = array.astype(np.float32, copy=False)
        elif array.dtype != np.int16:
            raise ValueError(f"audio must be of a float type or int16, got {array.dtype}")
        if self._dtype is None:
            self._dtype = array.dtype
        elif array.dtype != self._dtype:
            raise ValueError(f"audio of this request was {self._dtype} so far, got {array.dtype}")
        return array.reshape(-1)

    def _nothing(self) -> Samples:
        return np.zeros(0, dtype=self._dtype or np.float32)
