from __future__ import annotations

import base64
import io
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from pega_omni_plugin.audio import recording
from pega_omni_plugin.audio.recording import Limits, RecordingError, decode_data, read_recording, trim
from pega_omni_plugin.audio.wav import wav_header

RATE = 24_000
LIMITS = Limits()
KINDS = [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS")]
TAIL = round(recording.TAIL_SECONDS * RATE)
MARGIN = round(recording.MARGIN_SECONDS * RATE)

Array = npt.NDArray[Any]


def tone(seconds: float, rate: int = RATE, hz: float = 220.0, peak: float = 0.5) -> Array:
    return (peak * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def silence(seconds: float, rate: int = RATE) -> Array:
    return np.zeros(round(seconds * rate), dtype=np.float32)


def encode(samples: Array, rate: int = RATE, container: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def refusal(data: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(RecordingError) as caught:
        read_recording(data, RATE, limits)
    return str(caught.value)


@pytest.mark.parametrize(("container", "subtype"), KINDS)
def test_every_format_becomes_the_same_mono_speech_with_silence_after_it(container: str, subtype: str | None) -> None:
    speech = tone(2.0)
    samples = read_recording(encode(speech, RATE, container, subtype), RATE, LIMITS)
    assert samples.dtype == np.float32
    assert abs(len(samples) - len(speech) - TAIL) <= 0.02 * RATE
    assert not samples[-TAIL:].any()
    # Lossy codecs ring at the edges.
    middle = slice(RATE // 2, RATE)
    assert np.abs(samples[middle] - speech[middle]).max() < 0.05


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000, 96_000, 192_000])
def test_every_rate_is_resampled_to_the_wanted_one(rate: int) -> None:
    samples = read_recording(encode(tone(1.5, rate), rate), RATE, LIMITS)
    assert abs(len(samples) - round(1.5 * RATE) - TAIL) <= 1
    # Away from the edges, where a filter has no neighbours, it is the same tone.
    assert np.abs(samples[2_400:33_600] - tone(1.5)[2_400:33_600]).max() < 1e-3


def test_channels_are_averaged() -> None:
    left, right = tone(1.5), tone(1.5, hz=330.0)
    samples = read_recording(encode(np.stack([left, right], axis=1), subtype="FLOAT"), RATE, LIMITS)
    assert np.allclose(samples[:-TAIL], (left + right) / 2, atol=1e-6)


def test_a_recording_over_full_scale_is_scaled_down_and_a_quiet_one_is_left() -> None:
    loud = read_recording(encode(tone(1.5, peak=1e30), subtype="FLOAT"), RATE, LIMITS)
    assert 0.99 < np.abs(loud).max() <= 1
    quiet = read_recording(encode(tone(1.5, peak=0.05), subtype="FLOAT"), RATE, LIMITS)
    assert np.abs(quiet).max() == pytest.approx(0.05, rel=1e-3)


def test_full_scale_stays_within_one_after_resampling() -> None:
    square = np.sign(tone(1.5, 44_100) + 1e-6)
    assert np.abs(read_recording(encode(square, 44_100, subtype="FLOAT"), RATE, LIMITS)).max() <= 1


def test_silence_around_is_trimmed_and_silence_inside_kept() -> None:
    speech = np.concatenate([tone(1.0), silence(2.0), tone(1.0)])
    samples = read_recording(encode(np.concatenate([silence(20), speech, silence(20)])), RATE, LIMITS)
    assert len(samples) == len(speech) + 2 * MARGIN + TAIL
    assert not samples[:MARGIN].any() and samples[MARGIN : MARGIN + 100].any()


def test_noise_far_below_the_speech_and_an_offset_are_silence() -> None:
    noise = 1e-4 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    wave = np.concatenate([noise, tone(2.0), noise]) + np.float32(0.01)
    samples = read_recording(encode(wave, subtype="FLOAT"), RATE, LIMITS)
    assert len(samples) == 2 * RATE + 2 * MARGIN + TAIL


@given(
    before=st.integers(0, 30_000),
    after=st.integers(0, 30_000),
    length=st.integers(481, 20_000),
    rate=st.sampled_from([8_000, 24_000, 44_100]),
)
@settings(max_examples=50, deadline=None)
def test_trimming_keeps_all_that_sounds_and_little_else(before: int, after: int, length: int, rate: int) -> None:
    speech = np.random.default_rng(length).uniform(-0.5, 0.5, length).astype(np.float32)
    samples = np.concatenate([np.zeros(before, np.float32), speech, np.zeros(after, np.float32)])
    kept = trim(samples, rate)
    start = samples.tobytes().find(kept.tobytes()) // 4
    allowed = round((recording.MARGIN_SECONDS + recording.FRAME_SECONDS) * rate)
    frame = round(recording.FRAME_SECONDS * rate)
    # A frame at the edge may hold a few samples of sound only, and be silent by its energy.
    assert np.count_nonzero(kept) >= np.count_nonzero(speech) - 2 * frame
    assert len(kept) <= length + 2 * allowed
    assert start >= 0


def test_a_recording_of_a_tenth_of_a_second_names_found_and_allowed() -> None:
    message = refusal(encode(tone(0.1)))
    assert "too short: 0.10 seconds" in message and "1 to 30 seconds" in message


def test_silence_does_not_make_a_short_recording_long() -> None:
    assert "too short" in refusal(encode(np.concatenate([silence(5), tone(0.1), silence(5)])))


def test_a_recording_of_ninety_seconds_names_found_and_allowed() -> None:
    message = refusal(encode(tone(90, 8_000), 8_000))
    assert "too long: 90.0 seconds" in message and "1 to 30 seconds" in message


def test_a_recording_a_little_too_long_names_its_trimmed_length() -> None:
    message = refusal(encode(np.concatenate([silence(5), tone(31)])))
    assert "too long: 31.10 seconds without the silence" in message


def test_limits_are_those_given() -> None:
    short = encode(tone(0.5))
    assert len(read_recording(short, RATE, Limits(0.2, 0.6))) == RATE // 2 + TAIL
    assert "0.2 to 0.4 seconds are allowed" in refusal(short, Limits(0.2, 0.4))


def flac_of(frames: int) -> bytes:
    """Two seconds whose header tells of this many frames: 36 bits that end with byte 25 of the file (RFC 9639, 8.2)."""
    data = bytearray(encode(tone(2.0), container="FLAC"))
    data[21] = data[21] & 0xF0 | frames >> 32
    data[22:26] = (frames & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


def test_ten_hours_are_refused_by_the_header_alone() -> None:
    assert "too long: 36000.0 seconds by its header; 1 to 30 seconds" in refusal(flac_of(36_000 * RATE))


def test_a_file_that_holds_more_than_its_header_says_takes_no_more_memory() -> None:
    # The first of twenty tells of its own 20 seconds.
    data = encode(tone(20, 8_000), 8_000, "MP3") * 20
    tracemalloc.start()
    try:
        assert "too long" in refusal(data, Limits(max_seconds=5.0))
        assert tracemalloc.get_traced_memory()[1] < 8 * 36 * 8_000 * 4
    finally:
        tracemalloc.stop()


def test_decoding_stops_soon_after_the_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        """A file that decodes for ever."""

        samplerate, channels, format, frames, extra_info = 8_000, 1, "FLAC", 0, ""
        reads = 0

        def __enter__(self) -> Endless:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, out: Array) -> Array:
            self.reads += 1
            out[:] = 0.5
            return out

    endless = Endless()
    monkeypatch.setattr(recording.soundfile, "SoundFile", lambda _: endless)
    message = refusal(b"any")
    assert "61.0 seconds and more" in message and "1 to 30 seconds" in message
    assert endless.reads == 61


def test_a_wav_header_that_promises_ten_hours_is_refused_for_what_is_missing() -> None:
    message = refusal(wav_header(RATE, 36_000 * RATE * 2) + tone(2.0).tobytes())
    assert "cut off" in message and "36000.00 seconds that its header promises" in message


@pytest.mark.parametrize(("container", "subtype"), [*KINDS, ("WAVEX", "PCM_16"), ("RF64", "PCM_16")])
@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused_with_that_reason(container: str, subtype: str | None, part: float) -> None:
    data = encode(tone(5.0), RATE, container, subtype)
    assert "cut off or damaged" in refusal(data[: int(len(data) * part)])


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_stream_whose_header_knows_no_length_is_read_to_its_end(size: int) -> None:
    pcm = (tone(2.0) * 32_767).astype("<i2").tobytes()
    header = bytearray(wav_header(RATE))
    header[40:44] = size.to_bytes(4, "little")
    assert len(read_recording(bytes(header) + pcm, RATE, LIMITS)) == 2 * RATE + TAIL


def test_a_flac_stream_without_a_length_is_refused_with_the_fix() -> None:
    assert "convert it to a file" in refusal(flac_of(0))


def test_a_flac_file_that_promises_more_than_there_is_is_cut_off() -> None:
    assert "cut off or damaged" in refusal(flac_of(10 * RATE))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    samples = tone(2.0)
    samples[30_000] = value
    assert "NaN or infinite" in refusal(encode(samples, subtype="FLOAT"))


@pytest.mark.parametrize("level", [0.0, 1e-4, 0.25])
def test_a_recording_without_sound_is_silent(level: float) -> None:
    wave = np.full(3 * RATE, level, dtype=np.float32)
    assert "is silent (3.00 seconds)" in refusal(encode(wave, subtype="FLOAT"))


def test_a_file_without_samples_is_silent() -> None:
    assert "is silent" in refusal(encode(silence(0)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"%PDF-1.7\n" + b"obj " * 500, "a PDF"),
        (b"<!doctype html><html>" * 50, "no audio file"),
        (bytes(5_000), "no audio file"),
        (b"\xff\xfb\x90\x00" + bytes(3_000), "no audio file"),
        (b"RIFF\xff\xff\xff\xffWAVE", "no audio file"),
    ],
)
def test_what_is_no_audio_is_refused_with_what_is_allowed(data: bytes, reason: str) -> None:
    message = refusal(data)
    assert reason in message and "wav, flac, mp3" in message


def test_other_containers_are_refused_by_name() -> None:
    assert "is AIFF" in refusal(encode(tone(2.0), container="AIFF"))


@pytest.mark.parametrize("rate", [4_000, 384_000])
def test_rates_out_of_bounds_are_refused(rate: int) -> None:
    assert f"has {rate} samples per second; 8000 to 192000" in refusal(encode(tone(0.1, rate), rate))


def test_too_many_channels_are_refused() -> None:
    assert "9 channels; 1 to 8" in refusal(encode(np.zeros((RATE, 9), dtype=np.float32)))


SMALL = [encode(tone(1.2, 8_000), 48_000 if sub == "OPUS" else 8_000, kind, sub) for kind, sub in KINDS]


@given(
    data=st.sampled_from(SMALL),
    changes=st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 255)), min_size=1, max_size=12),
    end=st.integers(0, 40_000),
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    data: bytes, changes: list[tuple[int, int]], end: int
) -> None:
    damaged = bytearray(data[: max(1, end)])
    for position, value in changes:
        damaged[position % len(damaged)] = value
    try:
        samples = read_recording(bytes(damaged), RATE, LIMITS)
    except RecordingError:
        return
    assert np.isfinite(samples).all() and np.abs(samples).max() <= 1
    assert RATE <= len(samples) - TAIL <= 30 * RATE


@given(data=st.binary(min_size=1, max_size=200), kind=st.sampled_from(["audio/wav", "AUDIO/mpeg; codecs=mp3"]))
def test_data_comes_back_from_base64_and_data_urls(data: bytes, kind: str) -> None:
    text = base64.b64encode(data).decode()
    assert decode_data(text) == data
    assert decode_data(f"data:{kind};base64,{text}") == data
    assert decode_data(base64.encodebytes(data).decode()) == data


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("data:audio/wav;base64,", "empty"),
        ("data:audio/wav,abcd", "without base64"),
        ("data:audio/wav;base64", "without base64"),
        ("data:" + "a" * 1_000 + ",abcd", "without base64"),
        ("data:text/html;base64,YWJj", "of text/html"),
        ("data:;base64,YWJj", "of no type"),
        ("https://example.com/voice.wav", "not base64"),
        ("file:///etc/passwd", "not base64"),
        ("../../etc/passwd", "not base64"),
        ("abc", "not base64"),
        ("é" * 8, "not base64"),
        ("YWJj\0", "not base64"),
    ],
)
def test_text_that_is_no_data_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RecordingError, match=reason):
        decode_data(text)


def test_bytes_without_a_type_may_be_audio() -> None:
    assert decode_data("data:application/octet-stream;base64,YWJj") == b"abc"


@given(text=st.text(max_size=60))
def test_any_text_is_decoded_or_refused(text: str) -> None:
    try:
        assert decode_data(text)
    except RecordingError as error:
        assert "base64" in str(error) or "allowed" in str(error)
