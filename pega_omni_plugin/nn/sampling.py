"""Drawing codes from logits, in Hugging Face's order: repetition penalty, temperature, top-k, top-p, softmax, draw.

A draw takes its uniform number from outside: the code is the first in vocabulary order at which the cumulated
probability passes it. So draws are a function of logits and numbers only, whatever shares the batch and wherever the
step runs. ``Uniforms`` makes the numbers from a request's seed.

There are two implementations: ``draw`` in PyTorch, for devices and graphs; ``draw_numpy`` for the CPU, where most of
the time of small operations is their dispatch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Uniforms:
    """The random numbers of one request: ``count`` for each frame, in ``[0, 1)``.

    They are the counter-based generator Philox 4x64 (Salmon et al. 2011), keyed by the seed, read at the frame: a pure
    function of (seed, frame, index). NumPy keeps its raw stream stable.
    """

    def __init__(self, seed: int, count: int) -> None:
        if count % 4:
            raise ValueError(f"count must be a multiple of 4, the numbers that one step of Philox gives; got {count}")
        self._seed = seed
        self._count = count

    def frames(self, first: int, frames: int) -> Floats:
        """Numbers of ``frames`` frames from ``first`` on, ``[frames, count]``: 24 bits each, as float32 can hold."""
        generator = np.random.Philox(key=self._seed, counter=first * self._count // 4)
        raw = generator.random_raw(frames * self._count) >> np.uint64(40)
        return (raw.astype(np.float32) * np.float32(2.0**-24)).reshape(frames, self._count)


class RowSettings:
    """The settings of a step's rows, each ``[rows]``, and what follows from them for all draws of the step.

    ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 keep every code.
    """

    def __init__(self, temperature: Floats, top_k: Ints, top_p: Floats) -> None:
        greedy = temperature <= 0
        self.top_k = top_k
        self.top_p = top_p
        self.greedy = greedy if greedy.any() else None
        self.all_greedy = bool(greedy.all())
        self.divisor = np.where(greedy, np.float32(1), temperature)[:, None]
        self.nucleus = bool((top_p < 1).any())
        self.one_k = int(top_k[0]) if (top_k == top_k[0]).all() else None
        self.rows = np.arange(len(top_k))


def penalise_numpy(logits: Floats, seen: npt.NDArray[np.bool_], penalty: Floats) -> Floats:
    """Lower the logits of codes already drawn (arXiv 1909.05858): positive ones divided, negative ones multiplied.

    ``logits`` and ``seen`` are ``[rows, vocabulary]``, ``penalty`` ``[rows]``.
    """
    factor = penalty[:, None]
    return np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)


def draw_numpy(logits: Floats, uniforms: Floats, settings: RowSettings) -> Ints:
    """Draw one code a row from logits ``[rows, vocabulary]`` with numbers ``[rows]``.

    Codes with the same logit as the ``top_k``-th are kept, as Hugging Face's processor keeps them.
    """
    if settings.all_greedy:
        return logits.argmax(axis=1)
    scores, codes = _top_numpy(logits, settings)
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)) / settings.divisor)
    if settings.nucleus:
        weights = np.where(_nucleus_numpy(weights, settings.top_p), weights, np.float32(0))
    total = weights.cumsum(axis=1)
    picked: Ints = (total > uniforms[:, None] * total[:, -1:]).argmax(axis=1)
    drawn = picked if codes is None else codes[settings.rows, picked]
    return drawn if settings.greedy is None else np.where(settings.greedy, logits.argmax(axis=1), drawn)


def _top_numpy(logits: Floats, settings: RowSettings) -> tuple[Floats, Ints | None]:
    """The likeliest codes of each row in vocabulary order: their logits, and which they are (``None``: all of them)."""
    rows, vocabulary = logits.shape
    if settings.one_k is None:
        places = vocabulary - np.where(
            (settings.top_k <= 0) | (settings.top_k > vocabulary), vocabulary, settings.top_k
        )
        limits = np.take_along_axis(np.partition(logits, np.unique(places), axis=1), places[:, None], axis=1)
        return np.where(logits >= limits, logits, -np.inf), None
    kept = settings.one_k
    if not 0 < kept < vocabulary:
        return logits, None
    is_kept = logits >= np.partition(logits, vocabulary - kept, axis=1)[:, vocabulary - kept, None]
    (places,) = is_kept.ravel().nonzero()
    if places.size != rows * kept:  # a row has several codes at its limit
        return np.where(is_kept, logits, -np.inf), None
    return logits.ravel()[places].reshape(rows, kept), places.reshape(rows, kept) - vocabulary * settings.rows[:, None]


def _nucleus_numpy(weights: Floats, top_p: Floats) -> npt.NDArray[np.bool_]:
    """The fewest likeliest codes that hold ``top_p`` of the probability, at least one (arXiv 1904.09751)."""
    order = np.argsort(weights, axis=1, kind="stable")
    rising = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1)
    dropped = rising <= (1 - top_p)[:, None] * rising[:, -1:]
    dropped[:, -1] = False
    keep = np.empty_like(dropped)
    np.put_along_axis(keep, order, ~dropped, axis=1)
    return keep | (top_p >= 1)[:, None]


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """``penalise_numpy`` on tensors."""
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def draw(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    most_k: int,
    nucleus: bool,
) -> torch.Tensor:
    """``draw_numpy`` on tensors, without a look at any value, so that it can be captured.

    ``most_k`` bounds ``top_k`` of every row that has one; rows with ``top_k`` 0 keep every code only if ``most_k`` is
    the vocabulary. ``nucleus`` says whether any row may have ``top_p`` below 1.
    """
    greedy = temperature <= 0
    ranked = torch.topk(logits, most_k, dim=1).values
    places = torch.where((top_k <= 0) | (top_k > most_k), most_k, top_k) - 1
    scores = logits.masked_fill(logits < ranked.gather(1, places[:, None]), -torch.inf)
    scores = scores / torch.where(greedy, 1.0, temperature)[:, None]
    weights = torch.softmax(scores, dim=1)
    if nucleus:
        rising, order = torch.sort(weights, dim=1, stable=True)
        rising = rising.cumsum(dim=1)
        dropped = rising <= (1 - top_p)[:, None] * rising[:, -1:]
        dropped[:, -1] = False
        dropped &= (top_p < 1)[:, None]
        weights = weights.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), 0.0)
    total = weights.cumsum(dim=1)
    picked = (total > uniforms[:, None] * total[:, -1:]).int().argmax(dim=1)
    return torch.where(greedy, logits.argmax(dim=1), picked)


def draw_first(
    logits: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    penalty: torch.Tensor,
    early: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Draw the first code of a frame, whose last column ends the speech.

    ``seen`` ``[slots + 1, vocabulary]`` marks what each slot has drawn, which ``penalty`` ``[rows]`` makes less likely;
    the code drawn is marked. Rows that are ``early`` do not end. The others as in ``draw``.
    """
    scores = penalise(logits, seen.index_select(0, slots), penalty)
    scores[:, -1].masked_fill_(early, -torch.inf)
    codes = draw(scores, uniforms, temperature, top_k, top_p, most_k=logits.shape[1], nucleus=True)
    seen.index_put_((slots, codes), torch.ones_like(codes, dtype=torch.bool))
    return codes
