from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.audio.wav import HEADER_BYTES, wav_header


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 48000])
def test_every_header_field_is_where_the_specification_has_it(rate: int) -> None:
    header = wav_header(rate, 100)
    assert len(header) == HEADER_BYTES == 44
    assert header[:4] == b"RIFF"
    assert struct.unpack_from("<I", header, 4) == (36 + 100,)
    assert header[8:16] == b"WAVEfmt "
    length, coding, channels, sample_rate, byte_rate, block, bits = struct.unpack_from("<IHHIIHH", header, 16)
    assert (length, coding, channels, sample_rate) == (16, 1, 1, rate)
    assert (byte_rate, block, bits) == (rate * 2, 2, 16)
    assert header[36:40] == b"data"
    assert struct.unpack_from("<I", header, 40) == (100,)


def test_header_of_a_stream_says_unknown_in_both_sizes_and_nothing_else_differs() -> None:
    streaming, known = wav_header(24000), wav_header(24000, 0)
    assert streaming[4:8] == streaming[40:44] == b"\xff\xff\xff\xff"
    assert streaming[8:40] == known[8:40]


@given(rate=st.sampled_from([8000, 22050, 24000]), samples=st.lists(st.integers(-32768, 32767), max_size=50))
def test_readers_get_the_samples_back(rate: int, samples: list[int]) -> None:
    pcm = np.array(samples, dtype="<i2")
    file = wav_header(rate, pcm.nbytes) + pcm.tobytes()
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (rate, 1, 2)
        assert reader.readframes(reader.getnframes()) == pcm.tobytes()


def test_streamed_file_is_read_up_to_its_end() -> None:
    pcm = np.arange(-500, 500, dtype="<i2")
    audio, rate = soundfile.read(io.BytesIO(wav_header(24000) + pcm.tobytes()), dtype="int16")
    assert rate == 24000
    assert audio.tolist() == pcm.tolist()
