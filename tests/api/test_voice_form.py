from __future__ import annotations

import base64
from typing import Any

import httpx
import httpx2
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from pega_omni_plugin.api import voice_form
from pega_omni_plugin.api.errors import BodyTooLarge, InvalidRequest
from pega_omni_plugin.api.voice_form import FIELDS, MAX_BODY_BYTES, VoiceRequest, parse_voice_form

SOUND = bytes(range(256))
TEXT = base64.b64encode(SOUND).decode()
FILE = {"audio_sample": ("voice.wav", SOUND, "audio/wav")}


async def parse(body: bytes, kind: str | None = "application/json") -> VoiceRequest:
    """As the server would see this body, in pieces."""
    pieces = [body[start : start + 1_000_000] for start in range(0, len(body), 1_000_000)] or [b""]
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> Message:
        return messages.pop(0)

    headers = [] if kind is None else [(b"content-type", kind.encode())]
    return await parse_voice_form(Request({"type": "http", "method": "POST", "headers": headers}, receive))


async def parse_form(**fields: Any) -> VoiceRequest:
    return await send(httpx.Request("POST", "http://test/", **fields))


async def send(request: httpx.Request) -> VoiceRequest:
    return await parse(request.read(), request.headers["content-type"])


async def parse_object(**fields: Any) -> VoiceRequest:
    return await parse(orjson.dumps(fields))


async def test_openais_form_is_taken() -> None:
    request = await parse_form(data={"name": "Anna", "consent": "cons_1", "type": "audio_sample"}, files=FILE)
    assert request == VoiceRequest("Anna", SOUND, None, None, None, "audio_sample")


async def test_openais_client_is_understood() -> None:
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        request.read()
        sent.append(request)
        return httpx2.Response(200, json={"id": "voice_1", "object": "audio.voice", "name": "Anna", "created_at": 1})

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        client = OpenAI(api_key="none", base_url="http://test/v1", http_client=http)
        client.audio.voices.create(name="Anna", audio_sample=FILE["audio_sample"], consent="cons_1")
        client.audio.voices.create(name="Anna", prompt="A calm old man.", type="prompt")
    sample, prompt = [await parse(each.content, each.headers["content-type"]) for each in sent]
    assert sample == VoiceRequest("Anna", SOUND, None, None, None)
    assert prompt == VoiceRequest("Anna", None, None, "A calm old man.", None)


async def test_a_form_may_have_texts_and_the_recording_as_text() -> None:
    fields = {"name": " Zoë ", "ref_audio": TEXT, "ref_text": "Grüße.", "description": "calm", "language": "de"}
    request = await parse_form(files={name: (None, value.encode()) for name, value in fields.items()})
    assert request == VoiceRequest("Zoë", SOUND, "Grüße.", "calm", "de", "ref_audio")


@pytest.mark.parametrize("field", voice_form.RECORDING)
@pytest.mark.parametrize("value", [TEXT, f"data:audio/wav;base64,{TEXT}"])
async def test_an_object_has_the_recording_as_base64_or_data_url(field: str, value: str) -> None:
    request = await parse_object(**{"name": "Anna", field: value, "transcript": "Hello."})
    assert request == VoiceRequest("Anna", SOUND, "Hello.", None, None, field)


@pytest.mark.parametrize("field", voice_form.DESCRIPTION)
async def test_a_voice_may_be_a_description_alone(field: str) -> None:
    request = await parse_object(**{"name": "Anna", field: "A calm old man.", "type": "prompt"})
    assert request == VoiceRequest("Anna", None, None, "A calm old man.", None)


async def test_fields_that_are_null_or_empty_were_left_out() -> None:
    empty = dict.fromkeys(("ref_audio", "transcript", "ref_text", "language"), "") | {"description": None}
    assert await parse_object(name="Anna", audio=TEXT, **empty) == VoiceRequest(
        "Anna", SOUND, None, None, None, "audio"
    )
    assert (await parse_object(name="Anna", audio=TEXT, transcript="  ")).transcript is None


async def test_a_body_without_a_content_type_is_json() -> None:
    assert (await parse(orjson.dumps({"name": "Anna", "audio": TEXT}), None)).data == SOUND


GOOD = {"name": "Anna", "audio": TEXT}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({}, "name", "missing"),
        (GOOD | {"name": ""}, "name", "missing"),
        (GOOD | {"name": 3}, "name", "must be text"),
        (GOOD | {"name": "a" * 65}, "name", "65 characters, at most 64"),
        (GOOD | {"name": "a\nb"}, "name", "does not print"),
        (GOOD | {"speed": 1}, "speed", "unknown field 'speed'; known fields: name, audio_sample"),
        (GOOD | {"x" * 500: 1}, "x" * 100, "unknown field"),
        ({"name": "Anna"}, "audio_sample", "needs audio_sample or a description"),
        ({"name": "Anna", "audio": "", "description": " "}, "audio_sample", "needs audio_sample"),
        ({"name": "Anna", "transcript": "Hello."}, "transcript", "there is none"),
        ({"name": "Anna", "ref_text": "Hello.", "description": "d"}, "ref_text", "there is none"),
        (GOOD | {"ref_audio": TEXT}, "ref_audio", "audio and ref_audio say the same"),
        (GOOD | {"transcript": "a", "ref_text": "b"}, "ref_text", "say the same"),
        (GOOD | {"description": "a", "prompt": "b"}, "prompt", "say the same"),
        (GOOD | {"audio": 3}, "audio", "a file, a data URL or base64"),
        (GOOD | {"audio": {"url": "x"}}, "audio", "a file, a data URL or base64"),
        (GOOD | {"audio": "no base64!"}, "audio", "audio is not base64"),
        (GOOD | {"audio": "https://example.com/voice.wav"}, "audio", "audio is not base64"),
        (GOOD | {"audio": "data:text/html;base64,YWJj"}, "audio", "audio is a data URL of text/html"),
        (GOOD | {"transcript": ["a"]}, "transcript", "must be text"),
        (GOOD | {"transcript": "a" * 4_097}, "transcript", "4097 characters, at most 4096"),
        (GOOD | {"description": "a\0"}, "description", "NUL"),
        (GOOD | {"language": "a" * 65}, "language", "65 characters, at most 64"),
        (GOOD | {"language": True}, "language", "must be text"),
    ],
)
async def test_the_first_mistake_is_named(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await parse_object(**fields)
    assert caught.value.param == param
    assert reason in caught.value.message and len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"data": {"name": "Anna"}}, "audio_sample", "needs audio_sample"),
        ({"data": {}, "files": FILE}, "name", "missing"),
        ({"data": {"name": "Anna", "size": "3"}, "files": FILE}, "size", "unknown field"),
        ({"data": {"name": ["Anna", "Berta"]}, "files": FILE}, "name", "stands twice"),
        ({"data": {"name": "Anna"}, "files": {"audio_sample": ("a.wav", b"")}}, "audio_sample", "is an empty file"),
        ({"files": {"name": ("a.txt", b"Anna")}}, "name", "must be text"),
        ({"data": {"name": "Anna"}, "files": [("audio", ("a", b"a")), ("ref_audio", ("b", b"b"))]}, None, "files is 1"),
        ({"data": {"name": ["Anna"] * 40}, "files": FILE}, None, f"fields is {len(FIELDS)}"),
    ],
)
async def test_mistakes_in_a_form_are_named(fields: dict[str, Any], param: str | None, reason: str) -> None:
    if "files" not in fields:
        fields = {"files": {name: (None, value) for name, value in fields["data"].items()}}
    with pytest.raises(InvalidRequest) as caught:
        await parse_form(**fields)
    assert caught.value.param == param and reason in caught.value.message


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b"", "application/json", "not JSON"),
        (b"[]", "application/json", "an array"),
        (b'{"name": "\\ud800"}', "application/json", "not JSON"),
        (b"name=Anna", "application/x-www-form-urlencoded", "multipart/form-data and application/json"),
        (b"RIFF", "audio/wav", "content type is 'audio/wav'"),
        (b"--a", "multipart/form-data", "boundary"),
        (b"nothing", "multipart/form-data; boundary=a", "cannot be read"),
        (b"--a\r\nContent-Disposition: form-data\r\n\r\nx\r\n--a--\r\n", "multipart/form-data; boundary=a", '"name"'),
    ],
)
async def test_what_is_neither_form_nor_object_is_refused(body: bytes, kind: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await parse(body, kind)
    assert reason in caught.value.message


async def test_a_form_that_ends_early_lacks_what_had_not_come() -> None:
    request = httpx.Request("POST", "http://test/", data={"name": "Anna"}, files=FILE)
    with pytest.raises(InvalidRequest, match="needs audio_sample"):
        await parse(request.read()[:-100], request.headers["content-type"])


PART = b'--a\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'


@pytest.mark.parametrize(
    ("charset", "text"),
    [("idna", b"xn--"), ("unicode_escape", b"\\ud800"), ("utf-7", b"+2AA-"), ("hex", b"zz"), ("punycode", b"a-\xff")],
)
async def test_odd_charsets_make_no_odd_text(charset: str, text: bytes) -> None:
    body = PART % (b"name", b"Anna") + PART % (b"description", text) + b"--a--\r\n"
    try:
        request = await parse(body, f"multipart/form-data; boundary=a; charset={charset}")
    except InvalidRequest:
        return
    assert request.description is not None
    request.description.encode()


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=a"])
async def test_a_body_over_the_limit_is_left_unread(kind: str) -> None:
    received = 0

    async def receive() -> Message:
        nonlocal received
        received += 1
        start = b'--a\r\nContent-Disposition: form-data; name="audio"; filename="a"\r\n\r\n' if received == 1 else b""
        return {"type": "http.request", "body": start + bytes(1 << 20), "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", kind.encode())]}, receive)
    with pytest.raises(BodyTooLarge, match=f"over {MAX_BODY_BYTES} bytes"):
        await parse_voice_form(request)
    assert received <= 21


async def test_a_caller_that_leaves_is_no_bad_request() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await parse_voice_form(Request({"type": "http", "method": "POST", "headers": []}, receive))


VALUES = st.none() | st.booleans() | st.integers(-5, 5) | st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = VALUES | st.just(TEXT) | st.lists(VALUES, max_size=2)


@given(fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(st.characters(codec="utf-8"), max_size=5), VALUES))
@settings(deadline=None)
async def test_any_object_is_a_voice_or_a_named_mistake(fields: dict[str, Any]) -> None:
    try:
        request = await parse_object(**fields)
    except InvalidRequest as error:
        assert error.param in FIELDS or error.param in fields
        return
    assert request.name and (request.data or request.description)
