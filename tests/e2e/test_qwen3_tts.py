"""Qwen3-TTS with tiny checkpoints: clones under ``vllm serve``, named voices behind Dynamo's frontend."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from pega_omni_plugin.models.qwen3_tts import tiny
from tests.api.test_prompts import data_url, wav
from tests.audio.test_recording import flac_of
from tests.e2e.checks import eventually, metric
from tests.harness import BIN, Server, free_port, launch

FRAME_BYTES = 3840
TEXT = "Good morning, everyone."

HTTP = httpx.Client(timeout=60)
"""One for all: making a client takes longer than most requests here."""


def serve(folder: Path, variant: str, voices: Path) -> Server:
    """Plain ``vllm serve --omni`` on a checkpoint whose model type vLLM-Omni has a pipeline of its own for."""
    tiny.write(folder / variant, variant=variant)
    port = free_port()
    command = [str(BIN / "vllm"), "serve", str(folder / variant), "--omni", "--host", "127.0.0.1", "--port", str(port)]
    return Server(command, folder / f"{variant}.log", port, PEGA_VOICES_DIR=str(voices)).wait_for("/readyz")


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers of this module keep what callers make, all of them in one folder."""
    return tmp_path_factory.mktemp("stored") / "voices"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, voices: Path) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("base"), "base", voices) as server:
        yield server


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """The frontend with a worker, and the address of the worker's metrics."""
    folder = tmp_path_factory.mktemp("custom")
    tiny.write(folder / "tiny-voices")
    status = free_port()
    with launch(folder, "--model", str(folder / "tiny-voices"), DYN_SYSTEM_PORT=str(status)) as server:
        yield server, f"http://127.0.0.1:{status}"


def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def post(server: Server, **fields: Any) -> httpx.Response:
    body = {"input": TEXT, "response_format": "pcm", **fields}
    return HTTP.post(f"{server.url}/v1/audio/speech", json=body)


def spoken(server: Server, **fields: Any) -> bytes:
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    assert_speech(answer.content)
    return answer.content


def assert_speech(pcm: bytes) -> None:
    """Whole frames, more than one, of something that is heard."""
    assert len(pcm) % FRAME_BYTES == 0
    assert len(pcm) >= 2 * FRAME_BYTES
    assert np.frombuffer(pcm, dtype="<i2").std() > 100


def test_the_sdk_speaks_like_a_recording_with_and_without_its_words(base: Server) -> None:
    client = sdk(base)
    assert client.models.list().data[0].id == "base"
    heard = {}
    for words in (None, "These are my words."):
        fields = {"ref_audio": data_url(wav(2)), "seed": 5} | ({} if words is None else {"ref_text": words})
        made, again = (
            client.audio.speech.create(
                model="base", voice="alloy", input=TEXT, response_format="wav", extra_body=fields
            )
            for _ in range(2)
        )
        heard[words] = made.read()
        assert heard[words] == again.read()
        samples, rate = soundfile.read(io.BytesIO(heard[words]), dtype="int16")
        assert rate == 24_000
        assert_speech(samples.tobytes())
    assert heard[None] != heard["These are my words."]


def test_another_recording_or_seed_is_heard(base: Server) -> None:
    usual = {"ref_audio": data_url(wav(2)), "seed": 5, "max_new_tokens": 4}
    heard = [spoken(base, **usual | other) for other in ({}, {"ref_audio": data_url(wav(1, 16_000))}, {"seed": 6})]
    assert len(set(heard)) == 3


def test_a_voice_is_made_listed_spoken_by_id_and_by_name_and_deleted(base: Server, voices: Path) -> None:
    client = sdk(base)
    recording = ("carla.wav", wav(2), "audio/wav")
    voice = client.audio.voices.create(
        name="Carla", audio_sample=recording, consent="cons_1", extra_body={"transcript": "These are my words."}
    )
    assert (voice.name, voice.object, voice.type) == ("Carla", "audio.voice", "audio_sample")
    # Its recording was encoded before the answer.
    assert [path.suffix for path in sorted(voices.glob(f"{voice.id}*"))] == [".npz", ".flac", ".json"]
    listed = HTTP.get(f"{base.url}/v1/audio/voices").json()
    assert listed["voice_names"] == ["clone", "Carla"]
    assert listed["voices"][-1]["id"] == voice.id

    heard = {spoken(base, voice=name, seed=5) for name in (voice.id, "carla", {"id": voice.id}, "Carla")}
    assert len(heard) == 1
    # The same recording sent along is the same voice; kept with 16 bits it is the same to the last sample.
    sent = spoken(base, ref_audio=data_url(wav(2)), ref_text="These are my words.", seed=5)
    assert heard == {sent}

    with pytest.raises(openai.ConflictError) as taken:
        client.audio.voices.create(name="CARLA", audio_sample=("x.wav", wav(1), "audio/wav"), consent="cons_1")
    assert taken.value.param == "name"
    assert client.audio.voices.delete(voice.id).deleted
    for name in (voice.id, "Carla"):
        refused(post(base, voice=name), "voice", "unknown")
    with pytest.raises(openai.NotFoundError):
        client.audio.voices.delete(voice.id)
    assert not list(voices.glob("voice_*"))


def refused(answer: httpx.Response, param: str, said: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert said in error["message"]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


BAD_CLONES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no reference": ({"ref_audio": None}, "ref_audio", "send ref_audio"),
    "no reference, but an OpenAI name": ({"ref_audio": None, "voice": "alloy"}, "ref_audio", "send ref_audio"),
    "words without a reference": ({"ref_audio": None, "ref_text": "a"}, "ref_text", "send both"),
    "0.1 s": ({"ref_audio": data_url(wav(0.1))}, "ref_audio", "too short: 0.10 seconds"),
    "90 s": ({"ref_audio": data_url(wav(90, 8_000))}, "ref_audio", "too long: 90.0 seconds"),
    "a PDF": ({"ref_audio": data_url(b"%PDF-1.7\n")}, "ref_audio", "a PDF"),
    "zero length": ({"ref_audio": data_url(b"")}, "ref_audio", "empty"),
    "no samples": ({"ref_audio": data_url(wav(0))}, "ref_audio", "is silent"),
    "10 hours": ({"ref_audio": data_url(flac_of(36_000 * 24_000))}, "ref_audio", "too long: 36000.0 seconds"),
    "truncated": ({"ref_audio": data_url(truncated(wav(3)))}, "ref_audio", "cut off"),
    "a URL": ({"ref_audio": "http://127.0.0.1/a.wav"}, "ref_audio", "takes no URLs"),
    "a path": ({"ref_audio": "/etc/passwd"}, "ref_audio", "not base64"),
    "long words": ({"ref_text": "a" * 1025}, "ref_text", "1024"),
    "an unknown language": ({"language": "klingon"}, "language", "'klingon' is not one of"),
    "a negative seed": ({"seed": -1}, "seed", "integer from 0"),
    "200 kB of text": ({"input": "a" * 200_000}, "input", "200000 characters, at most 4096"),
    "instructions": ({"instructions": "Softly."}, "instructions", "does not follow"),
    "another task": ({"task_type": "CustomVoice"}, "task_type", "Base"),
    "a number as recording": ({"ref_audio": 5}, "ref_audio", "wrong type"),
    "an option out of range": ({"extra": {"top_p": 2}}, "extra", "top_p"),
}


@pytest.mark.parametrize(("fields", "param", "said"), BAD_CLONES.values(), ids=BAD_CLONES.keys())
def test_a_bad_clone_is_refused_by_field_and_the_next_request_is_spoken(
    base: Server, fields: dict[str, Any], param: str, said: str
) -> None:
    good = {"ref_audio": data_url(wav(1)), "max_new_tokens": 2}
    refused(post(base, **good | fields), param, said)
    assert len(spoken(base, **good)) == 2 * FRAME_BYTES


def test_a_body_over_the_limit_is_413_and_the_next_request_is_spoken(base: Server) -> None:
    answer = post(base, ref_audio="A" * (24 << 20))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert len(spoken(base, ref_audio=data_url(wav(1)), max_new_tokens=2)) == 2 * FRAME_BYTES


def metrics(status: str) -> str:
    return HTTP.get(f"{status}/metrics").text


async def finished(status: str) -> dict[str, float]:
    """Requests by why they ended, once the engine's counters, which are read every second, have all of them."""
    complete = metric(metrics(status), "pega_requests_total", outcome="complete")
    await eventually(status, "pega_finished_total", complete + 1)  # the sentence at the start
    text = metrics(status)
    return {reason: metric(text, "pega_finished_total", reason=reason) for reason in ("stop", "length")}


async def test_usage_and_metrics_say_why_speech_ended(base: Server) -> None:
    before = await finished(base.url)
    for fields, reason in (({"seed": 5}, "stop"), ({"max_new_tokens": 2}, "length")):
        answer = post(base, ref_audio=data_url(wav(1)), stream_format="sse", **fields)
        events = [json.loads(block.removeprefix("data: ")) for block in answer.text.strip().split("\n\n")]
        pcm = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
        assert_speech(pcm)
        usage = events[-1]["usage"]
        assert usage["finish_reason"] == reason
        assert usage["output_tokens"] == len(pcm) // FRAME_BYTES
    assert await finished(base.url) == {reason: count + 1 for reason, count in before.items()}


DYNAMO_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown voice": ({"voice": "nobody"}, "nobody"),
    "an unknown language": ({"language": "klingon"}, "klingon"),
    "a negative seed": ({"seed": -1}, "seed"),
    "words of a recording": ({"ref_text": "My words."}, "ref_text"),
    "a recording": ({"ref_audio": data_url(wav(1))}, "ref_audio"),
    "another task": ({"task_type": "Base"}, "CustomVoice"),
    "200 kB of text": ({"input": "a" * 200_000}, "200000 characters"),
}


def from_frontend(server: Server, **fields: Any) -> httpx.Response:
    return post(server, **{"model": "tiny-voices", "voice": "vivian", **fields})


def heard_from_frontend(server: Server, **fields: Any) -> bytes:
    answer = from_frontend(server, **fields)
    assert answer.status_code == 200, answer.text
    assert_speech(answer.content)
    return answer.content


def test_the_worker_knows_the_checkpoint_and_waits_for_its_engine_without_polling(custom: tuple[Server, str]) -> None:
    server, _ = custom
    log = server.log.read_text()
    assert "Error parsing config" not in log
    assert "Event-driven orchestration loop enabled" in log


def test_a_seed_reproduces_bytes_through_the_frontend(custom: tuple[Server, str]) -> None:
    server, _ = custom
    made, again, other = (heard_from_frontend(server, seed=seed) for seed in (5, 5, 6))
    assert made == again
    assert made != other
    client = sdk(server)
    assert [model.id for model in client.models.list()] == ["tiny-voices"]
    speech = client.audio.speech.create(
        model="tiny-voices", voice="vivian", input=TEXT, response_format="pcm", extra_body={"seed": 5}
    )
    assert speech.read() == made


def test_aliases_instructions_and_languages_are_followed_through_the_frontend(custom: tuple[Server, str]) -> None:
    server, _ = custom

    def heard(**fields: Any) -> bytes:
        return heard_from_frontend(server, seed=5, max_new_tokens=3, **fields)

    assert heard(voice="alloy") == heard(voice="serena") == heard(voice="Serena")
    assert heard(language="de") == heard(language="German")
    variants = [
        heard(voice="serena"),
        heard(),
        heard(instructions="Softly."),
        heard(instructions="Shout."),
        heard(language="de"),
        heard(language="ko"),
    ]
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize(("fields", "said"), DYNAMO_REFUSALS.values(), ids=DYNAMO_REFUSALS.keys())
def test_the_frontend_passes_refusals_on(custom: tuple[Server, str], fields: dict[str, Any], said: str) -> None:
    answer = from_frontend(custom[0], **fields)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["message"]
    assert len(heard_from_frontend(custom[0], max_new_tokens=2)) == 2 * FRAME_BYTES


async def test_the_worker_counts_how_speech_ended(custom: tuple[Server, str]) -> None:
    server, status = custom
    before = await finished(status)
    heard_from_frontend(server, seed=5)
    heard_from_frontend(server, max_new_tokens=2)
    assert await finished(status) == {reason: count + 1 for reason, count in before.items()}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_voice_from_a_description_is_spoken_by_its_model_and_imitated_by_another(
    tmp_path: Path, voices: Path, base: Server
) -> None:
    with serve(tmp_path, "voice_design", voices) as design:
        refused(post(design), "instructions", "the voice that instructions describe")
        spoken(design, instructions="A calm old man.")
        answers = [
            HTTP.post(f"{design.url}/v1/audio/voices", json={"name": "Otto", "description": "A calm old man."})
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        voice, again = (answer.json() for answer in answers)
        assert voice == again
        assert (voice["name"], voice["type"]) == ("Otto", "prompt")
        made = spoken(design, voice="otto", seed=5)
        assert made == spoken(design, instructions="A calm old man.", seed=5)
        refused(post(design, voice="otto", ref_audio=data_url(wav(1))), "ref_audio", "no option")
    imitated = [spoken(base, voice=name, seed=5) for name in (voice["id"], "Otto")]
    assert imitated[0] == imitated[1]
    HTTP.delete(f"{base.url}/v1/audio/voices/{voice['id']}").raise_for_status()
