from __future__ import annotations

import hashlib
import io
import threading
from base64 import b64encode
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
from pega_omni_plugin.api.voices import StoredVoice, VoiceStore
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
    assert (recording.transcript, recording.digest) == ("Words.", hashlib.sha256(data).hexdigest())
    # Of the speaker's sound the middle: at its ends are the resampler and the silence that is appended.
    assert recording.pcm.dtype == np.float32
    assert np.abs(recording.pcm - np.pad(tone(1.5), (0, 12_000)))[2400:33_600].max() < 1e-3


@pytest.mark.parametrize("fields", [{}, {"ref_text": ""}])
async def test_a_recording_may_come_without_its_words(
    engine: FakeEngine, front: FakeFront, fields: dict[str, Any]
) -> None:
    await prepare(engine, ref_audio=data_url(wav(1)), **fields)
    assert asked(front)[1].transcript is None


async def test_a_recording_is_encoded_beside_the_event_loop_and_text_on_it(
    engine: FakeEngine, front: FakeFront
) -> None:
    await prepare(engine, ref_audio=data_url(wav(1)))
    await prepare(engine)
    assert front.threads[0] is not threading.current_thread()
    assert front.threads[1] is threading.current_thread()


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
    assert asked(front)[1].digest == hashlib.sha256(wav(1)).hexdigest()


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
    recording = await Preparer(engine, None).recording(data, "Words.", param="audio_sample")
    assert (recording.digest, recording.transcript) == (hashlib.sha256(data).hexdigest(), "Words.")
    with pytest.raises(InvalidRequest, match=r"^audio_sample is a PDF") as raised:
        await Preparer(engine, None).recording(b"%PDF-1.7", None, param="audio_sample")
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
async def test_a_stored_recording_reaches_the_front_under_the_voices_id(
    engine: FakeEngine, front: FakeFront, store: VoiceStore, transcript: str | None
) -> None:
    voice = keep(store, pcm=tone(1), transcript=transcript)
    for name in (voice.id, "carla"):
        front.asked.clear()
        call, _ = await prepare(engine, store, voice=name, language="en")
        speech, recording = asked(front)
        assert speech == call.speech
        assert (speech.voice, speech.extra) == ("clone", {"language": "en"})
        assert (recording.digest, recording.transcript) == (voice.id, transcript)
        np.testing.assert_array_equal(recording.pcm, store.audio(voice))
    assert {thread is threading.current_thread() for thread in front.threads} == {False}


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
    assert (recording.digest, imitated.instructions) == (voice.id, None)
    assert (nothing, described.instructions) == (None, "A deep voice.")


async def test_a_recording_that_is_sent_wins_over_a_stored_one(
    engine: FakeEngine, front: FakeFront, store: VoiceStore
) -> None:
    keep(store, pcm=tone(1), transcript="Other words.")
    data = wav(1.5)
    call, _ = await prepare(engine, store, voice="Carla", ref_audio=data_url(data))
    assert (asked(front)[1].digest, asked(front)[1].transcript) == (hashlib.sha256(data).hexdigest(), None)
    assert call.stored is None


async def test_a_voice_that_was_deleted_is_unknown(engine: FakeEngine, store: VoiceStore) -> None:
    voice = keep(store, pcm=tone(1))
    await prepare(engine, store, voice=voice.id)
    store.delete(voice.id)
    error = await refusal(engine, store, voice=voice.id)
    assert (error.param, "is unknown" in error.message) == ("voice", True)


async def test_without_a_store_stored_voices_are_unknown(engine: FakeEngine, store: VoiceStore) -> None:
    keep(store, pcm=tone(1))
    assert (await refusal(engine, voice="Carla")).param == "voice"
