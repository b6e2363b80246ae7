from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Sequence

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.bench.streams import AudioStream, EventParser, EventStream, SpeechStream, StreamError
from tests.bench.virtual_time import MS


def wav_header(rate: int = 24000, channels: int = 1, bits: int = 16, coding: int = 1, data: bytes = b"data") -> bytes:
    block = channels * bits // 8
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, coding, channels, rate, rate * block, block, bits)
    return b"RIFF\xff\xff\xff\xffWAVE" + fmt + data + b"\xff\xff\xff\xff"


def delta(audio: bytes) -> bytes:
    return orjson.dumps({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})


DONE = b'{"type":"speech.audio.done"}'


def sse(*payloads: bytes, end: bytes = b"\n") -> bytes:
    return b"".join(b"data: " + payload + end + end for payload in payloads)


def pieces_of(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(edges)]


def feed(stream: SpeechStream, *pieces: bytes) -> SpeechStream:
    """The i-th piece arrives at i ms."""
    for at_ms, piece in enumerate(pieces):
        stream.write(at_ms * MS, piece)
    stream.finish()
    return stream


cuts = st.lists(st.integers(0, 2000), max_size=12)
audio = st.binary(min_size=2, max_size=400).map(lambda data: data[: len(data) // 2 * 2])


@given(audio, cuts)
def test_wav_header_is_skipped_wherever_it_is_cut(pcm: bytes, where: list[int]) -> None:
    pieces = pieces_of(wav_header() + pcm, where)
    playback = feed(AudioStream("wav", 24000), *pieces).playback
    ends, total = [], 0
    for piece in pieces:
        ends.append(total := total + len(piece))
    assert playback.audio_bytes == len(pcm)
    assert playback.started_ns == next(index for index, end in enumerate(ends) if end > 44) * MS


@given(audio, cuts)
def test_pcm_counts_from_its_first_byte(pcm: bytes, where: list[int]) -> None:
    pieces = pieces_of(pcm, where)
    playback = feed(AudioStream("pcm", 24000), *pieces).playback
    assert playback.audio_bytes == len(pcm)
    assert playback.started_ns == next(index for index, piece in enumerate(pieces) if piece) * MS


def test_wav_tells_its_own_sample_rate() -> None:
    playback = feed(AudioStream("wav", 24000), wav_header(16000) + bytes(32000)).playback
    assert playback.audio_ns == 1_000_000_000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"ID3" + bytes(60), "no RIFF header"),
        (wav_header(channels=2) + bytes(8), "mono"),
        (wav_header(bits=8) + bytes(8), "16 bit"),
        (wav_header(coding=3) + bytes(8), "PCM"),
        (wav_header(rate=0) + bytes(8), "WAV header"),
        (wav_header(data=b"LIST") + bytes(8), "44 bytes"),
        (wav_header(), "no audio"),
        (wav_header()[:20], "no audio"),
        (wav_header() + bytes(3), "inside a sample, after 3 bytes"),
    ],
)
def test_wrong_wav_fails(body: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        feed(AudioStream("wav", 24000), body)


@pytest.mark.parametrize(("body", "message"), [(b"", "no audio"), (bytes(5), "after 5 bytes")])
def test_wrong_pcm_fails(body: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        feed(AudioStream("pcm", 24000), body)


@given(st.lists(audio, min_size=1, max_size=5), cuts, st.sampled_from([b"\n", b"\r\n"]))
def test_event_audio_arrives_with_the_end_of_its_event_wherever_the_stream_is_cut(
    parts: list[bytes], where: list[int], end: bytes
) -> None:
    first = sse(delta(parts[0]), end=end)
    body = first + sse(*(delta(part) for part in parts[1:]), DONE, end=end)
    pieces = pieces_of(body, where)
    playback = feed(EventStream(AudioStream("pcm", 24000)), *pieces).playback
    ends, total = [], 0
    for piece in pieces:
        ends.append(total := total + len(piece))
    assert playback.audio_bytes == sum(map(len, parts))
    assert playback.started_ns == next(index for index, at in enumerate(ends) if at >= len(first)) * MS


def test_wav_header_inside_the_first_event_is_no_audio() -> None:
    body = [sse(delta(wav_header())), sse(delta(bytes(480))), sse(DONE)]
    playback = feed(EventStream(AudioStream("wav", 24000)), *body).playback
    assert (playback.started_ns, playback.audio_bytes) == (1 * MS, 480)


payloads = st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=5)


@given(payloads, cuts, st.sampled_from([b"\n", b"\r\n"]))
def test_events_come_out_whole_and_in_order_wherever_the_stream_is_cut(
    texts: list[str], where: list[int], end: bytes
) -> None:
    events = [text.encode() for text in texts]
    body = b": a comment" + end + b"".join(b"event: x" + end + b"data: " + e + end + end for e in events)
    parser = EventParser()
    assert [event for piece in pieces_of(body, where) for event in parser.feed(piece)] == events


def test_event_fields() -> None:
    parser = EventParser()
    body = b"retry: 5\ndata:no space\n\n\n\nid: 1\ndata: two\ndata:  lines\ndata\n\ndata: unfinished\n"
    assert list(parser.feed(body)) == [b"no space", b"two\n lines\n"]
    assert list(parser.feed(b"\n")) == [b"unfinished"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (sse(delta(bytes(4))), "ended without speech.audio.done"),
        (sse(delta(bytes(4))) + b"data: " + DONE + b"\n", "ended without speech.audio.done"),
        (b"", "ended without speech.audio.done"),
        (sse(DONE), "no audio"),
        (sse(delta(bytes(3)), DONE), "inside a sample"),
        (sse(delta(bytes(4)), DONE, delta(bytes(4))), "'speech.audio.delta' after speech.audio.done"),
        (sse(b'{"type":"error","error":{"message":"engine stopped"}}'), "error event: engine stopped"),
        (sse(b'{"type":"speech.audio.error","error":{"message":"gone"}}'), "error event: gone"),
        (sse(b'{"type":"error","message":"flat"}'), "error event: flat"),
        (sse(b"{not json"), "not JSON"),
        (sse(b"[1]"), "list, expected an object"),
        (sse(b'{"type":"speech.audio.delta"}'), "expected base64, got None"),
        (sse(b'{"type":"speech.audio.delta","audio":"!!!!"}'), "expected base64, got '!!!!'"),
    ],
)
def test_wrong_event_stream_fails(body: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        feed(EventStream(AudioStream("pcm", 24000)), body)


def test_unknown_events_and_the_done_marker_of_other_servers_are_skipped() -> None:
    body = sse(b'{"type":"speech.audio.info"}', delta(bytes(4)), DONE, b"[DONE]")
    assert feed(EventStream(AudioStream("pcm", 24000)), body).playback.audio_bytes == 4
