"""Whether audio says what it should: transcription by pocketsphinx, which carries its English model."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import cache

import numpy as np
import numpy.typing as npt
import soxr
from pocketsphinx import Decoder

_LISTENS_AT = 16_000


@cache
def _decoder() -> Decoder:
    return Decoder(samprate=_LISTENS_AT, loglevel="FATAL")


def words_heard(pcm: npt.NDArray[np.int16], sample_rate: int) -> list[str]:
    """The words in mono 16-bit ``pcm``, in lower case; none when nothing is understood."""
    heard = soxr.resample(pcm, sample_rate, _LISTENS_AT).astype(np.int16)
    decoder = _decoder()
    # Level and channel are learned over an utterance; start afresh, so that the order of calls does not matter.
    decoder.reinit_feat()
    decoder.start_utt()
    decoder.process_raw(heard.tobytes(), full_utt=True)
    decoder.end_utt()
    hypothesis = decoder.hyp()
    return hypothesis.hypstr.lower().split() if hypothesis else []


def share_heard(text: str, heard: list[str]) -> float:
    """Share of the words of ``text`` that were heard, in their order; from 0 to 1."""
    words = re.findall(r"[a-z']+", text.lower())
    blocks = SequenceMatcher(a=words, b=heard, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(words)
