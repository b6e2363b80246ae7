"""The routes of stored voices over HTTP, with a store on disk and an engine that says what the test wrote."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pega_omni_plugin.api import prompts
from pega_omni_plugin.api.speech import SpeechService
from pega_omni_plugin.api.voice_routes import SAMPLE_TEXT
from pega_omni_plugin.api.voices import VoiceStore
from pega_omni_plugin.audio.recording import TAIL_SECONDS
from pega_omni_plugin.engine.errors import EngineBusy, EngineDead
from pega_omni_plugin.engine.program import RequestError
from pega_omni_plugin.engine.wire import Ending
from tests.api.fake_engine import INFO, ONE_SECOND, FakeEngine, FakeFront, Item, pcm, serve
from tests.api.test_prompts import CLONING, DESIGNING, data_url, samples_of, tone, until, wav
from tests.api.test_routes import application

VOICES = "/v1/audio/voices"
UNKNOWN_ID = "voice_" + "0" * 24


class Api:
    """A served model, and a client of it."""

    def __init__(self, engine: FakeEngine, front: FakeFront, service: SpeechService) -> None:
        self.engine, self.front, self.service = engine, front, service
        transport = httpx.ASGITransport(application(service))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def create(self, **fields: Any) -> httpx.Response:
        return await self.http.post(VOICES, json=fields)

    async def upload(self, data: bytes, **fields: str) -> httpx.Response:
        return await self.http.post(VOICES, data=fields, files={"audio_sample": ("voice.wav", data, "audio/wav")})

    async def listed(self) -> dict[str, Any]:
        answer = await self.http.get(VOICES)
        assert answer.status_code == 200
        return answer.json()

    async def speak(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/audio/speech", json={"input": "Hello.", **fields})


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore(tmp_path / "voices")


def api(info: Any, store: VoiceStore, script: tuple[Item, ...] = ONE_SECOND) -> Api:
    front = FakeFront()
    engine = FakeEngine(script, info, front)
    return Api(engine, front, serve(engine, store))


@pytest.fixture
async def cloning(store: VoiceStore) -> Api:
    return api(replace(CLONING, aliases={"alloy": "clone"}), store)


@pytest.fixture
async def designing(store: VoiceStore) -> Api:
    return api(DESIGNING, store)


def mistake(answer: httpx.Response, status: int, param: str | None, said: str) -> None:
    """An error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error" if status < 429 else "server_error", param)
    assert said in error["message"]


async def test_the_list_has_the_models_voices_the_stored_ones_and_the_aliases(cloning: Api) -> None:
    own = {"id": "clone", "name": "Clone", "language": None}
    assert await cloning.listed() == {"voices": [own], "voice_names": ["clone"], "aliases": {"alloy": "clone"}}
    made = (await cloning.upload(wav(1), name="Carla", language="de", transcript="Words.")).json()
    assert await cloning.listed() == {
        "voices": [own, made],
        "voice_names": ["clone", "Carla"],
        "aliases": {"alloy": "clone"},
    }


async def test_a_model_without_a_store_lists_its_own(store: VoiceStore) -> None:
    store.create(name="Carla", pcm=tone(1), transcript=None, description=None, now=1)
    assert (await api(INFO, store).listed())["voice_names"] == [voice.id for voice in INFO.voices]


async def test_a_recording_in_a_form_becomes_a_voice(cloning: Api, store: VoiceStore) -> None:
    answer = await cloning.upload(wav(1), name=" Carla ", transcript="Words.", language="de", consent="cons_1")
    assert answer.status_code == 200, answer.text
    (voice,) = store.list()
    assert answer.json() == {
        "id": voice.id,
        "object": "audio.voice",
        "name": "Carla",
        "type": "audio_sample",
        "created_at": voice.created_at,
        "language": "de",
        "transcript": "Words.",
        "description": None,
    }
    np.testing.assert_allclose(store.audio(voice), samples_of(wav(1)), atol=2**-15)


async def test_a_recording_in_an_object_becomes_the_same_voice(cloning: Api, store: VoiceStore) -> None:
    uploaded = await cloning.upload(wav(1), name="Carla", transcript="Words.")
    for field in ("audio_sample", "ref_audio"):
        answer = await cloning.create(name="Carla", ref_text="Words.", **{field: data_url(wav(1))})
        assert answer.json() == uploaded.json()
    assert len(store.list()) == 1


async def test_a_recording_is_encoded_when_it_is_sent_and_not_again(cloning: Api, store: VoiceStore) -> None:
    made = (await cloning.upload(wav(1), name="Carla", transcript="Words.")).json()
    assert len(cloning.front.encoded) == 1
    (voice,) = store.list()
    assert store.encoding(voice, cloning.front.key) is not None
    for name in (made["id"], "carla", {"id": made["id"]}):
        assert (await cloning.speak(voice=name)).status_code == 200
    assert {recording.transcript for _, recording in cloning.front.asked} == {"Words."}
    assert len(cloning.front.encoded) == 1


async def test_a_description_is_spoken_and_what_is_heard_is_kept(designing: Api, store: VoiceStore) -> None:
    answer = await designing.create(name="Carla", description="A deep voice.", language="en")
    assert answer.status_code == 200, answer.text
    (voice,) = store.list()
    assert answer.json() | {"created_at": 0} == {
        "id": voice.id,
        "object": "audio.voice",
        "name": "Carla",
        "type": "prompt",
        "created_at": 0,
        "language": "en",
        "transcript": SAMPLE_TEXT,
        "description": "A deep voice.",
    }
    (spoken,) = designing.engine.spoken
    assert (spoken.input, spoken.instructions, spoken.voice) == (SAMPLE_TEXT, "A deep voice.", "designed")
    assert spoken.extra == {"language": "en"}
    assert designing.engine.prompts[0].units == 7
    heard = np.concatenate([item for item in ONE_SECOND if isinstance(item, np.ndarray)])
    silence = np.zeros(round(TAIL_SECONDS * INFO.sample_rate))
    np.testing.assert_array_equal(store.audio(voice) * 32_768, np.concatenate([heard, silence]))
    assert designing.engine.in_flight == 0


async def test_a_described_voice_is_spoken_by_its_description(designing: Api) -> None:
    await designing.create(name="Carla", prompt="A deep voice.")
    assert (await designing.speak(voice="Carla", instructions="Softly.")).status_code == 200
    assert designing.engine.spoken[-1].instructions == "A deep voice. Softly."


async def test_the_same_description_is_spoken_once_and_makes_one_voice(designing: Api, store: VoiceStore) -> None:
    first, again, other = [
        (await designing.create(name=name, description=text)).json()
        for name, text in (("Carla", "A deep voice."), ("Carla", "A deep voice."), ("Otto", "A high voice."))
    ]
    assert first == again
    assert other["id"] != first["id"]
    first_seed, other_seed = [speech.seed for speech in designing.engine.spoken]
    assert first_seed != other_seed
    assert len(store.list()) == 2


async def test_a_description_known_in_one_language_is_spoken_again_in_another(designing: Api) -> None:
    await designing.create(name="Carla", description="A deep voice.", language="en")
    await designing.create(name="Carla", description="A deep voice.", language="de")
    assert [speech.extra for speech in designing.engine.spoken] == [{"language": "en"}, {"language": "de"}]
    designing.front.refusal = RequestError("language", "language 'xx' is not known")
    answer = await designing.create(name="Carla", description="A deep voice.", language="xx")
    mistake(answer, 400, "language", "is not known")


async def test_a_deleted_voice_is_spoken_again_with_the_same_seed(designing: Api, store: VoiceStore) -> None:
    for _ in range(2):
        voice = (await designing.create(name="Carla", description="A deep voice.")).json()
        assert store.delete(voice["id"])
    first, again = [speech.seed for speech in designing.engine.spoken]
    assert first == again


@pytest.mark.parametrize(
    ("script", "finish"),
    [
        ((pcm(1, 2), Ending("repetition", 1)), "repetition"),
        ((pcm(1, 2), Ending("length", 1)), "length"),
        ((Ending("stop", 0),), "stop"),
    ],
)
async def test_a_description_that_is_not_spoken_to_the_end_makes_no_voice(
    store: VoiceStore, script: tuple[Item, ...], finish: str
) -> None:
    answer = await api(DESIGNING, store, script).create(name="Carla", description="A deep voice.")
    mistake(answer, 500, None, f"did not speak its sample text to the end ({finish})")
    assert len(store.list()) == 0


async def test_what_the_front_refuses_of_a_description_is_a_mistake_in_the_field(designing: Api) -> None:
    designing.front.refusal = RequestError("language", "language 'xx' is not known")
    answer = await designing.create(name="Carla", description="A deep voice.", language="xx")
    mistake(answer, 400, "language", "'xx'")
    assert designing.engine.spoken == []


async def test_a_model_refuses_the_kind_of_voice_that_it_cannot_make(
    cloning: Api, designing: Api, store: VoiceStore
) -> None:
    answer = await cloning.create(name="Carla", description="A deep voice.")
    mistake(answer, 400, "audio_sample", "makes voices from recordings only")
    mistake(await designing.upload(wav(1), name="Carla"), 400, "audio_sample", "from descriptions only")
    answer = await designing.create(name="Carla", ref_audio=data_url(wav(1)), description="A deep voice.")
    mistake(answer, 400, "ref_audio", "from descriptions only")
    assert len(store.list()) == 0
    assert (cloning.front.encoded, designing.engine.spoken) == ([], [])


async def test_a_model_with_voices_of_its_own_makes_and_deletes_none(store: VoiceStore) -> None:
    sim = api(INFO, store)
    mistake(await sim.upload(wav(1), name="Carla"), 404, None, "has voices of its own only")
    mistake(await sim.create(name="Carla", description="A deep voice."), 404, None, "has voices of its own only")
    mistake(await sim.http.delete(f"{VOICES}/{UNKNOWN_ID}"), 404, None, "has voices of its own only")
    assert not store.folder.exists()


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "name", "missing"),
        ({"name": "a" * 65, "description": "x"}, "name", "65 characters"),
        ({"name": "Carla"}, "audio_sample", "needs"),
        ({"name": "Carla", "transcript": "Words."}, "transcript", "is what a recording says"),
        ({"name": "Carla", "audio_sample": "/etc/passwd"}, "audio_sample", "is not base64"),
        ({"name": "Carla", "ref_audio": data_url(b"%PDF-1.7")}, "ref_audio", "is a PDF"),
        ({"name": "Carla", "audio": data_url(wav(0.1))}, "audio", "is too short"),
        ({"name": "Carla", "audio": data_url(wav(5))}, "audio", "is too long"),
        ({"name": "Carla", "pitch": 1}, "pitch", "unknown field"),
    ],
)
async def test_a_wrong_body_is_refused_by_field_and_the_next_is_taken(
    cloning: Api, store: VoiceStore, fields: dict[str, Any], param: str, said: str
) -> None:
    mistake(await cloning.create(**fields), 400, param, said)
    assert len(store.list()) == 0
    assert (await cloning.upload(wav(1), name="Carla")).status_code == 200


async def test_a_body_over_the_limit_is_413(cloning: Api) -> None:
    mistake(await cloning.upload(bytes(21 << 20), name="Carla"), 413, None, "over")


async def test_a_name_is_given_once(cloning: Api, store: VoiceStore) -> None:
    first = (await cloning.upload(wav(1), name="Carla")).json()
    mistake(await cloning.upload(wav(1.5), name="CARLA"), 409, "name", first["id"])
    assert [voice.id for voice in store.list()] == [first["id"]]


@pytest.mark.parametrize("name", ["clone", "Clone", "ALLOY"])
async def test_names_that_the_model_gives_itself_are_taken(cloning: Api, store: VoiceStore, name: str) -> None:
    """A voice of that name could be asked for by its id only."""
    mistake(await cloning.upload(wav(1), name=name), 409, "name", "is a voice of model")
    assert len(store.list()) == 0


async def test_a_full_store_is_409(store: VoiceStore) -> None:
    store.max_voices = 1
    cloning = api(CLONING, store)
    await cloning.upload(wav(1), name="Carla")
    mistake(await cloning.upload(wav(1.5), name="Otto"), 409, "name", "the most allowed; delete one")


async def test_a_deleted_voice_is_gone_from_the_list_the_disk_and_speech(cloning: Api, store: VoiceStore) -> None:
    made = (await cloning.upload(wav(1), name="Carla")).json()
    answer = await cloning.http.delete(f"{VOICES}/{made['id']}")
    assert (answer.status_code, answer.json()) == (
        200,
        {"id": made["id"], "object": "audio.voice.deleted", "deleted": True},
    )
    assert (await cloning.listed())["voice_names"] == ["clone"]
    assert not list(store.folder.glob("voice_*"))
    mistake(await cloning.speak(voice=made["id"]), 400, "voice", "is unknown")
    mistake(await cloning.http.delete(f"{VOICES}/{made['id']}"), 404, "voice_id", "is unknown")


async def test_what_is_no_stored_voice_cannot_be_deleted(cloning: Api) -> None:
    await cloning.upload(wav(1), name="Carla")
    for name in (UNKNOWN_ID, "nobody", "%2e%2e", "voice_1.json", "a" * 5_000):
        mistake(await cloning.http.delete(f"{VOICES}/{name}"), 404, "voice_id", "is unknown")
    mistake(await cloning.http.delete(f"{VOICES}/clone"), 404, "voice_id", "is the model's own and stays")
    assert (await cloning.listed())["voice_names"] == ["clone", "Carla"]


async def test_a_folder_that_cannot_be_written_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cloning = api(CLONING, VoiceStore(tmp_path / "file" / "voices"))
    answer = await cloning.upload(wav(1), name="Carla")
    mistake(answer, 500, None, "name a writable folder in PEGA_VOICES_DIR")
    assert (await cloning.listed())["voice_names"] == ["clone"]


async def test_a_voice_that_cannot_be_deleted_says_so(cloning: Api, store: VoiceStore) -> None:
    made = (await cloning.upload(wav(1), name="Carla")).json()
    (store.folder / ".lock").unlink()
    (store.folder / ".lock").mkdir()
    mistake(await cloning.http.delete(f"{VOICES}/{made['id']}"), 500, None, "PEGA_VOICES_DIR")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(EngineBusy("full"), 429, "engine_overloaded"), (EngineDead("x"), 503, "engine_dead")],
)
async def test_an_engine_that_takes_nothing_describes_nothing(
    designing: Api, store: VoiceStore, refusal: Any, status: int, code: str
) -> None:
    designing.engine.refusal = refusal
    answer = await designing.create(name="Carla", description="A deep voice.")
    mistake(answer, status, None, str(refusal))
    assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == (code, "1")
    assert len(store.list()) == 0


async def test_recordings_of_voices_and_of_requests_are_counted_together(
    cloning: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_PREPARING", 2)
    monkeypatch.setattr(cloning.service.prompts, "_turns", asyncio.Semaphore(2))
    cloning.front.gate.clear()
    held = [
        asyncio.create_task(cloning.speak(ref_audio=data_url(wav(1)))),
        asyncio.create_task(cloning.upload(wav(1.5), name="Carla")),
    ]
    await until(lambda: len(cloning.front.encoded) == 2)
    for refused in (await cloning.upload(wav(2), name="Otto"), await cloning.speak(voice="Carla")):
        mistake(refused, 429, None, "2 recordings are being read already")
    cloning.front.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
    assert (await cloning.upload(wav(2), name="Otto")).status_code == 200


def test_the_sample_of_a_described_voice_can_be_imitated() -> None:
    """It has the length of a good reference, at 15 characters a second."""
    assert 3 <= len(SAMPLE_TEXT) / 15 <= 15
