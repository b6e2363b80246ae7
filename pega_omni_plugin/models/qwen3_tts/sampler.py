"""Which codes a frame gets: every slot's settings, its random numbers and what it has drawn, around ``nn.sampling``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pega_omni_plugin.models.qwen3_tts.config import Sampling
from pega_omni_plugin.nn import sampling
from pega_omni_plugin.nn.sampling import RowSettings, Uniforms

MIN_FRAMES = 2
"""Frames before speech may end: the official package's ``min_new_tokens``."""

_BLOCK = 64
"""Frames whose random numbers are made at a time."""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """One request's settings for both kinds of draw."""

    talker: Sampling
    predictor: Sampling
    repetition_penalty: float


class _Columns:
    """One kind of draw's settings, by slot."""

    def __init__(self, slots: int) -> None:
        self.temperature = np.zeros(slots + 1, np.float32)
        self.top_k = np.ones(slots + 1, np.int64)
        self.top_p = np.ones(slots + 1, np.float32)

    def set(self, slot: int, settings: Sampling) -> None:
        self.temperature[slot] = settings.temperature
        self.top_k[slot] = settings.top_k
        self.top_p[slot] = settings.top_p

    def pick(self, slots: npt.NDArray[np.int64]) -> RowSettings:
        return RowSettings(self.temperature[slots], self.top_k[slots], self.top_p[slots])


class SlotSettings:
    """Every slot's settings and random numbers. Slot 0 is for padding rows and takes the likeliest."""

    def __init__(self, slots: int, groups: int) -> None:
        self.talker = _Columns(slots)
        self.predictor = _Columns(slots)
        self.penalty = np.ones(slots + 1, np.float32)
        self._groups = groups
        self._uniforms: list[Uniforms | None] = [None] * (slots + 1)
        self._block = np.zeros((slots + 1, _BLOCK, groups), np.float32)
        self._block_number = np.zeros(slots + 1, np.int64)

    def admit(self, slot: int, settings: DrawSettings, seed: int) -> None:
        """A new request in ``slot``."""
        self.talker.set(slot, settings.talker)
        self.predictor.set(slot, settings.predictor)
        self.penalty[slot] = settings.repetition_penalty
        self._uniforms[slot] = Uniforms(seed, self._groups)
        self._block_number[slot] = -1

    def numbers(self, slots: Sequence[int], frames: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The numbers for the frames after so many, ``[rows, groups]``."""
        rows, blocks = np.asarray(slots), frames // _BLOCK
        for row in np.flatnonzero(self._block_number[rows] != blocks).tolist():
            uniforms, slot, block = self._uniforms[slots[row]], slots[row], int(blocks[row])
            if uniforms is not None:
                self._block[slot] = uniforms.frames(block * _BLOCK, _BLOCK)
            self._block_number[slot] = block
        numbers: npt.NDArray[np.float32] = self._block[rows, frames % _BLOCK]
        return numbers


class CpuSampler:
    """Draws on the CPU."""

    def __init__(self, slots: int, groups: int, allowed: int) -> None:
        self._end = allowed
        self._settings = SlotSettings(slots, groups)
        self._seen = np.zeros((slots + 1, allowed + 1), np.bool_)
        self._picked: list[int] = []

    def admit(self, slot: int, settings: DrawSettings, seed: int) -> None:
        """A new request in ``slot``."""
        self._settings.admit(slot, settings, seed)
        self._seen[slot] = False
        self._picked = []

    def begin(self, slots: Sequence[int], frames: npt.NDArray[np.int64]) -> None:
        """A step begins: ``slots`` are its rows (0 is padding), ``frames`` how many each has had, ``[rows]``."""
        settings = self._settings
        self._numbers = settings.numbers(slots, frames)
        early = frames < MIN_FRAMES
        self._early = early if early.any() else None
        if self._picked != slots:
            self._picked = list(slots)
            self._rows = np.asarray(slots)
            self._talker_rows = settings.talker.pick(self._rows)
            self._predictor_rows = settings.predictor.pick(self._rows)
            self._penalty_rows = settings.penalty[self._rows]

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the codes of group 0 from logits ``[rows, allowed + 1]``, the last of which is the end of speech."""
        scores = sampling.penalise_numpy(logits.numpy(), self._seen[self._rows], self._penalty_rows)
        if self._early is not None:
            scores[self._early, self._end] = -np.inf
        codes = sampling.draw_numpy(scores, self._numbers[:, 0], self._talker_rows)
        self._seen[self._rows, codes] = True
        return torch.from_numpy(codes)

    def next(self, group: int, logits: torch.Tensor) -> torch.Tensor:
        """Draw the codes of another group from logits ``[rows, code_vocab]``."""
        codes = sampling.draw_numpy(logits.float().numpy(), self._numbers[:, group], self._predictor_rows)
        return torch.from_numpy(codes)
