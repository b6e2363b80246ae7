from __future__ import annotations

import asyncio
import hashlib
import io
import threading
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from pega_omni_plugin.api import prompts
from pega_omni_plugin.api.errors import InvalidRequest, ModelNotFound
from pega_omni_plugin.api.fetch import FetchError
from pega_omni_plugin.api.prompts import MAX_RECORDING_BYTES, Preparer
from pega_omni_plugin.api.requests import SpeechCall
from pega_omni_plugin.api.voices import StoredVoice, VoiceStore, VoicesUnwritable
from pega_omni_plugin.audio.recording import Limits, decode_data, read_recording
from pega_omni_plugin.engine.errors import EngineBusy, EngineDead, EngineError
from pega_omni_plugin.engine.program import Option, Prompt, Recording, RequestError, Speech, Voice
from tests.api.fake_engine import INFO, MODEL, FakeEngine, FakeFront

CLONING = replace(
    INFO,
    voices=(Voice("clone", "Clone"),),
    default_voice="clone",
    options={
        "language": Option("text", "language"),
        "ref_audio": Option("text", "recording"),
        "ref_text": Option("text", "words", maximum=100),
    },
    clones="recording",
    recording_seconds=(0.5, 3.0),
)
DESIGNING = replace(
    INFO, voices=(Voice("designed", "D"),), default_voice="designed", clones="description", instructions=True
)


def tone(seconds: float, rate: int = 24_000) -> npt.NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * 220 / rate * np.arange(round(seconds * rate)))).astype(np.float32)


def wav(seconds: float, rate: int = 24_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate), rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:audio/wav;base64,{b64encode(data).decode()}"


def samples_of(data: bytes) -> npt.NDArray[np.float32]:
    """What the front is given of a file."""
    return read_recording(data, CLONING.sample_rate, Limits(*CLONING.recording_seconds))


@pytest.fixture
def front() -> FakeFront:
    return FakeFront()


@pytest.fixture
async def engine(front: FakeFront) -> FakeEngine:
    return FakeEngine(info=CLONING, front=front)


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore(tmp_path)


async def prepare(engine: FakeEngine, store: VoiceStore | None = None, **fields: Any) -> tuple[SpeechCall, Prompt]:
    return await Preparer(engine, store).prepare({"input": "Hello.", **fields}, [MODEL])


async def refusal(engine: FakeEngine, store: VoiceStore | None = None, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        await prepare(engine, store, **fields)
    return raised.value


def asked(front: FakeFront) -> tuple[Speech, Recording]:
    """The one request that the front was given, with its recording."""
    ((speech, recording),) = front.asked
    assert recording is not None
    return speech, recording


async def test_the_front_gets_the_checked_request_and_makes_the_prompt(engine: FakeEngine, front: FakeFront) -> None:
    call, prompt = await prepare(engine, language="en", seed=5, response_format="pcm")
    assert prompt == Prompt(7, {"text_ids": [1, 2]})
    assert call == SpeechCall(Speech("Hello.", "clone", seed=5, extra={"language": "en"}), "pcm", sse=False)
    assert front.asked == [(call.speech, None)]


async def test_what_the_front_refuses_is_a_mistake_in_the_field_it_names(engine: FakeEngine, front: FakeFront) -> None:
    front.refusal = RequestError("language", "language 'x' is unknown")
    for fields in ({}, {"ref_audio": data_url(wav(1))}):
        error = await refusal(engine, **fields)
        assert (error.status, error.param, error.message) == (400, "language", "language 'x' is unknown")


async def test_a_wrong_request_does_not_reach_the_front(engine: FakeEngine, front: FakeFront) -> None:
    assert (await refusal(engine, speed=9)).param == "speed"
    with pytest.raises(ModelNotFound):
        await prepare(engine, model="other")
    assert front.asked == []


@pytest.mark.parametrize("rate", [24_000, 16_000])
@pytest.mark.parametrize("encode", [data_url, lambda data: b64encode(data).decode()], ids=["data-url", "base64"])
async def test_a_recording_reaches_the_front_as_samples_and_stays_in_this_process(
    engine: FakeEngine, front: FakeFront, encode: Any, rate: int
) -> None:
    data = wav(1.5, rate)
    call, _ = await prepare(engine, ref_audio=encode(data), ref_text="Words.", language="en", voice="alloy")
    speech, recording = asked(front)
    assert speech == call.speech
    assert (speech.voice, speech.extra) == ("clone", {"language": "en"})
    assert recording.transcript == "Words."
    # Of the speaker's sound the middle: at its ends are the resampler and the silence that is appended.
    (pcm,) = front.encoded
    assert pcm.dtype == np.float32
    assert np.abs(pcm - np.pad(tone(1.5), (0, 12_000)))[2400:33_600].max() < 1e-3
    assert recording.encoding == {"pcm": pcm}


@pytest.mark.parametrize("fields", [{}, {"ref_text": ""}])
async def test_a_recording_may_come_without_its_words(
    engine: FakeEngine, front: FakeFront, fields: dict[str, Any]
) -> None:
    await prepare(engine, ref_audio=data_url(wav(1)), **fields)
    assert asked(front)[1].transcript is None


async def test_a_recording_is_read_and_encoded_beside_the_event_loop_and_text_on_it(
    engine: FakeEngine, front: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(text: str) -> bytes:
        front.threads["decode"] = threading.current_thread()
        return decode_data(text)

    monkeypatch.setattr("pega_omni_plugin.api.prompts.decode_data", decode)
    await prepare(engine, ref_audio=data_url(wav(1)))
    assert front.threads["decode"] is not threading.current_thread()
    assert front.threads["encode"] is not threading.current_thread()
    assert front.threads["prepare"] is threading.current_thread()


async def test_words_without_a_recording_are_refused(engine: FakeEngine, front: FakeFront, store: VoiceStore) -> None:
    keep(store, pcm=tone(1))
    for fields in ({}, {"voice": "Carla"}):
        error = await refusal(engine, store, ref_text="Words.", **fields)
        assert (error.status, error.param) == (400, "ref_text")
        assert "ref_text is what ref_audio says" in error.message
    assert front.asked == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "is empty"),
        ("data:text/plain;base64,AAAA", "is a data URL of text/plain"),
        ("/etc/passwd", "is not base64"),
        ("file:///etc/passwd", "is not base64"),
        (data_url(b"%PDF-1.7"), "is a PDF"),
        (data_url(wav(0.1)), "is too short: 0.10 seconds without the silence around it; 0.5 to 3 seconds are allowed"),
        (data_url(wav(3.5)), "is too long: 3.50 seconds without the silence around it; 0.5 to 3 seconds are allowed"),
    ],
)
async def test_a_recording_that_cannot_be_used_is_refused_by_field(
    engine: FakeEngine, front: FakeFront, source: str, said: str
) -> None:
    error = await refusal(engine, ref_audio=source)
    assert (error.status, error.param) == (400, "ref_audio")
    assert error.message.startswith("ref_audio is ")
    assert said in error.message
    assert front.asked == []


URLS = ["http://voices.example/a.wav", "https://voices.example/a.wav"]


@pytest.mark.parametrize("url", URLS)
async def test_urls_are_not_fetched_unless_the_server_allows_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    async def never(url: str, max_bytes: int) -> bytes:
        raise AssertionError(f"fetched {url}")

    monkeypatch.setattr(prompts, "fetch_recording", never)
    error = await refusal(engine, ref_audio=url)
    assert (error.param, error.message) == (
        "ref_audio",
        "ref_audio: this server takes no URLs; send the recording itself as a data URL",
    )


@pytest.mark.parametrize("url", URLS)
async def test_a_url_that_is_allowed_is_fetched_up_to_the_limit(
    front: FakeFront, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    fetched: list[tuple[str, int]] = []

    async def fetch(url: str, max_bytes: int) -> bytes:
        fetched.append((url, max_bytes))
        return wav(1)

    monkeypatch.setattr(prompts, "fetch_recording", fetch)
    await prepare(FakeEngine(info=replace(CLONING, recording_urls=True), front=front), ref_audio=url)
    assert fetched == [(url, MAX_RECORDING_BYTES)]
    np.testing.assert_array_equal(asked(front)[1].encoding["pcm"], samples_of(wav(1)))


async def test_a_url_that_cannot_be_fetched_is_a_mistake_in_the_field(
    front: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(url: str, max_bytes: int) -> bytes:
        raise FetchError("the URL answered with status 404")

    monkeypatch.setattr(prompts, "fetch_recording", fails)
    error = await refusal(FakeEngine(info=replace(CLONING, recording_urls=True), front=front), ref_audio=URLS[0])
    assert (error.param, error.message) == ("ref_audio", "ref_audio: the URL answered with status 404")


async def test_a_file_of_another_field_is_read_by_the_same_rules(engine: FakeEngine) -> None:
    data = wav(1)
    for source in (data, data_url(data)):
        pcm, digest = await Preparer(engine, None).read(source, "audio_sample")
        np.testing.assert_array_equal(pcm, samples_of(data))
        assert digest == hashlib.sha256(data).hexdigest()
    with pytest.raises(InvalidRequest, match=r"^audio_sample is a PDF") as raised:
        await Preparer(engine, None).read(b"%PDF-1.7", "audio_sample")
    assert raised.value.param == "audio_sample"


@pytest.mark.parametrize("busy", [EngineBusy("full"), EngineDead("gone")])
async def test_an_engine_without_room_is_told_before_a_recording_is_read(
    engine: FakeEngine, front: FakeFront, store: VoiceStore, monkeypatch: pytest.MonkeyPatch, busy: EngineError
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("a recording was read for a request that is not taken")

    keep(store, pcm=tone(1))
    for name in ("decode_data", "read_recording", "fetch_recording"):
        monkeypatch.setattr(prompts, name, never)
    monkeypatch.setattr(VoiceStore, "audio", never)
    engine.refusal = busy
    for fields in ({"ref_audio": data_url(wav(1))}, {"ref_audio": URLS[0]}, {"voice": "Carla"}):
        with pytest.raises(type(busy)):
            await prepare(engine, store, **fields)
    assert front.asked == []


async def test_a_mistake_is_told_even_by_an_engine_without_room(engine: FakeEngine) -> None:
    engine.refusal = EngineBusy("full")
    assert (await refusal(engine, ref_audio=data_url(wav(1)), speed=9)).param == "speed"


def keep(store: VoiceStore, **fields: Any) -> StoredVoice:
    content = {"pcm": None, "transcript": None, "description": None} | fields
    return store.create(name="Carla", now=1, **content)


@pytest.mark.parametrize("transcript", [None, "Words."])
async def test_a_stored_recording_reaches_the_front_with_its_words(
    engine: FakeEngine, front: FakeFront, store: VoiceStore, transcript: str | None
) -> None:
    voice = keep(store, pcm=tone(1), transcript=transcript)
    for name in (voice.id, "carla"):
        front.asked.clear()
        call, _ = await prepare(engine, store, voice=name, language="en")
        speech, recording = asked(front)
        assert speech == call.speech
        assert (speech.voice, speech.extra) == ("clone", {"language": "en"})
        assert recording.transcript == transcript
        np.testing.assert_array_equal(recording.encoding["pcm"], store.audio(voice))
    assert front.threads["encode"] is not threading.current_thread()


@pytest.mark.parametrize(
    ("fields", "instructions"),
    [({}, "A deep voice."), ({"instructions": "Speak softly."}, "A deep voice. Speak softly.")],
)
async def test_a_stored_description_comes_before_the_instructions(
    front: FakeFront, store: VoiceStore, fields: dict[str, Any], instructions: str
) -> None:
    keep(store, description="A deep voice.")
    call, _ = await prepare(FakeEngine(info=DESIGNING, front=front), store, voice="Carla", **fields)
    assert call.speech.instructions == instructions
    assert call.speech.voice == "designed"
    assert front.asked == [(call.speech, None)]


async def test_of_a_voice_with_both_the_model_gets_what_it_is_for(
    engine: FakeEngine, front: FakeFront, store: VoiceStore
) -> None:
    voice = keep(store, pcm=tone(1), description="A deep voice.")
    await prepare(engine, store, voice="Carla")
    await prepare(FakeEngine(info=DESIGNING, front=front), store, voice="Carla")
    (imitated, recording), (described, nothing) = front.asked
    assert recording is not None
    np.testing.assert_array_equal(recording.encoding["pcm"], store.audio(voice))
    assert imitated.instructions is None
    assert (nothing, described.instructions) == (None, "A deep voice.")


async def test_a_recording_that_is_sent_wins_over_a_stored_one(
    engine: FakeEngine, front: FakeFront, store: VoiceStore
) -> None:
    keep(store, pcm=tone(1), transcript="Other words.")
    data = wav(1.5)
    call, _ = await prepare(engine, store, voice="Carla", ref_audio=data_url(data))
    recording = asked(front)[1]
    np.testing.assert_array_equal(recording.encoding["pcm"], samples_of(data))
    assert (recording.transcript, call.stored) == (None, None)


async def test_a_voice_that_was_deleted_is_unknown(engine: FakeEngine, store: VoiceStore) -> None:
    voice = keep(store, pcm=tone(1))
    await prepare(engine, store, voice=voice.id)
    store.delete(voice.id)
    error = await refusal(engine, store, voice=voice.id)
    assert (error.param, "is unknown" in error.message) == ("voice", True)


async def test_without_a_store_stored_voices_are_unknown(engine: FakeEngine, store: VoiceStore) -> None:
    keep(store, pcm=tone(1))
    assert (await refusal(engine, voice="Carla")).param == "voice"


async def until(condition: Callable[[], bool]) -> None:
    """Let the other tasks and threads run until something has happened."""
    for _ in range(5_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen")


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of recordings, each when its request goes on to the encoding."""
    read: list[str] = []
    once = Preparer._once

    async def counted(self: Preparer, digest: str, make: Any) -> Any:
        read.append(digest)
        return await once(self, digest, make)

    monkeypatch.setattr(Preparer, "_once", counted)
    return read


def cloned(recording: bytes) -> dict[str, Any]:
    return {"input": "Hello.", "ref_audio": data_url(recording)}


async def test_a_recording_is_encoded_once_and_another_for_itself(engine: FakeEngine, front: FakeFront) -> None:
    preparer = Preparer(engine, None)
    for text in ("One.", "Two."):
        for recording in (wav(1), wav(1.5)):
            await preparer.prepare(cloned(recording) | {"input": text, "ref_text": text}, [MODEL])
    assert len(front.encoded) == 2
    assert [
        (speech.input, recording.transcript, len(recording.encoding["pcm"])) for speech, recording in front.asked
    ] == [(text, text, len(samples_of(wav(seconds)))) for text in ("One.", "Two.") for seconds in (1, 1.5)]


async def test_requests_that_come_meanwhile_wait_for_the_same_encoding(
    engine: FakeEngine, front: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    preparer = Preparer(engine, None)
    front.gate.clear()
    waiting = [asyncio.create_task(preparer.prepare(cloned(wav(1)), [MODEL])) for _ in range(5)]
    await until(lambda: len(read) == 5 and len(front.encoded) == 1)
    assert front.asked == []
    front.gate.set()
    await asyncio.gather(*waiting)
    assert (len(front.encoded), len(front.asked)) == (1, 5)


async def test_only_so_many_encodings_are_kept_and_those_used_last(
    engine: FakeEngine, front: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "ENCODINGS_KEPT", 2)
    preparer = Preparer(engine, None)
    for seconds in (1, 1.5, 1, 2, 1, 1.5):
        await preparer.prepare(cloned(wav(seconds)), [MODEL])
    assert [round(len(pcm) / 24_000 - 0.5, 1) for pcm in front.encoded] == [1, 1.5, 2, 1.5]


async def test_an_encoding_that_failed_is_made_again(
    engine: FakeEngine, front: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    preparer = Preparer(engine, None)
    front.gate.clear()
    front.failure = MemoryError("full")
    waiting = [asyncio.create_task(preparer.prepare(cloned(wav(1)), [MODEL])) for _ in range(3)]
    await until(lambda: len(read) == 3 and len(front.encoded) == 1)
    front.gate.set()
    assert [type(failed) for failed in await asyncio.gather(*waiting, return_exceptions=True)] == [MemoryError] * 3
    front.failure = None
    await preparer.prepare(cloned(wav(1)), [MODEL])
    assert (len(front.encoded), len(front.asked)) == (2, 1)


async def test_a_failure_that_nobody_waited_for_is_told_to_nobody(engine: FakeEngine, front: FakeFront) -> None:
    preparer = Preparer(engine, None)
    front.gate.clear()
    front.failure = MemoryError("full")
    leaving = asyncio.create_task(preparer.prepare(cloned(wav(1)), [MODEL]))
    await until(lambda: len(front.encoded) == 1)
    leaving.cancel()
    await asyncio.wait({leaving})
    front.gate.set()
    await until(lambda: not preparer._encodings)
    front.failure = None
    await preparer.prepare(cloned(wav(1)), [MODEL])
    assert (len(front.encoded), len(front.asked)) == (2, 1)


async def test_a_caller_who_leaves_does_not_take_an_encoding_away(engine: FakeEngine, front: FakeFront) -> None:
    preparer = Preparer(engine, None)
    front.gate.clear()
    first, second = (asyncio.create_task(preparer.prepare(cloned(wav(1)), [MODEL])) for _ in range(2))
    await until(lambda: len(front.encoded) == 1)
    first.cancel()
    await asyncio.wait({first})
    front.gate.set()
    await second
    await preparer.prepare(cloned(wav(1)), [MODEL])
    assert first.cancelled()
    assert (len(front.encoded), len(front.asked)) == (1, 2)


async def test_more_requests_than_may_be_prepared_at_a_time_are_told_so(
    engine: FakeEngine, front: FakeFront, store: VoiceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_PREPARING", 3)
    keep(store, pcm=tone(1))
    preparer = Preparer(engine, store)
    front.gate.clear()
    waiting = [asyncio.create_task(preparer.prepare(cloned(wav(1)), [MODEL])) for _ in range(3)]
    await until(lambda: len(front.encoded) == 1)
    for fields in (cloned(wav(1)), {"input": "Hello.", "voice": "Carla"}):
        with pytest.raises(EngineBusy, match="3 recordings are being read already"):
            await preparer.prepare(fields, [MODEL])
    # One who leaves makes room.
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    waiting.append(asyncio.create_task(preparer.prepare(cloned(wav(1)), [MODEL])))
    await asyncio.sleep(0)
    front.gate.set()
    await asyncio.gather(*waiting[1:])
    await preparer.prepare({"input": "Hello.", "voice": "Carla"}, [MODEL])
    assert len(front.asked) == 4


async def test_only_so_many_recordings_are_encoded_at_a_time(
    engine: FakeEngine, front: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that read them, and those of everybody else, stay free."""
    monkeypatch.setattr(prompts, "ENCODERS", 2)
    preparer = Preparer(engine, None)
    front.gate.clear()
    waiting = [asyncio.create_task(preparer.prepare(cloned(wav(1 + part / 10)), [MODEL])) for part in range(4)]
    await until(lambda: len(front.encoded) == 2)
    await asyncio.sleep(0.05)
    assert len(front.encoded) == 2
    front.gate.set()
    await asyncio.gather(*waiting)
    assert len(front.encoded) == 4


async def test_a_stored_voices_encoding_is_kept_on_disk_for_the_next_process(
    engine: FakeEngine, front: FakeFront, store: VoiceStore
) -> None:
    voice = keep(store, pcm=tone(1), transcript="Words.")
    await prepare(engine, store, voice="Carla")
    np.testing.assert_array_equal(store.encoding(voice, front.key)["pcm"], store.audio(voice))
    next_process, other_weights = FakeFront(), FakeFront(key="other-weights")
    await prepare(FakeEngine(info=CLONING, front=next_process), VoiceStore(store.folder), voice="Carla")
    assert next_process.encoded == []
    np.testing.assert_array_equal(asked(next_process)[1].encoding["pcm"], store.audio(voice))
    await prepare(FakeEngine(info=CLONING, front=other_weights), VoiceStore(store.folder), voice="Carla")
    assert len(other_weights.encoded) == 1


async def test_what_is_made_of_a_sent_recording_stays_in_memory(
    engine: FakeEngine, front: FakeFront, store: VoiceStore
) -> None:
    await prepare(engine, store, ref_audio=data_url(wav(1)))
    assert len(front.encoded) == 1
    assert list(store.folder.iterdir()) == []


async def test_a_voice_whose_encoding_cannot_be_kept_speaks_all_the_same(
    engine: FakeEngine,
    front: FakeFront,
    store: VoiceStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*arguments: Any) -> None:
        raise VoicesUnwritable("voices cannot be kept: disk full")

    voice = keep(store, pcm=tone(1))
    monkeypatch.setattr(VoiceStore, "keep_encoding", full)
    await prepare(engine, store, voice=voice.id)
    np.testing.assert_array_equal(asked(front)[1].encoding["pcm"], store.audio(voice))
    assert "disk full" in caplog.text


async def test_a_recording_that_goes_while_it_is_asked_for_is_a_mistake_in_the_voice(
    engine: FakeEngine, front: FakeFront, store: VoiceStore
) -> None:
    voice = keep(store, pcm=tone(1))
    (store.folder / f"{voice.id}.flac").write_bytes(b"damaged")
    error = await refusal(engine, store, voice="Carla")
    assert (error.status, error.param) == (400, "voice")
    assert f"the recording of voice {voice.id} is gone or damaged" in error.message
    assert front.asked == []
