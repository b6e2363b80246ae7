from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pega_omni_plugin.api.errors import ApiError, InvalidRequest, ModelNotFound
from pega_omni_plugin.api.requests import EXTENSIONS, SpeechCall, SpeechRequest, check_speech, parse_json
from pega_omni_plugin.api.voices import StoredVoice
from pega_omni_plugin.engine.program import Option, ProgramInfo, Voice

INFO = ProgramInfo(
    model="m",
    kind="speech",
    sample_rate=24_000,
    frame_samples=1920,
    voices=(Voice("ann", "Ann"), Voice("bob", "Bob")),
    default_voice="ann",
    max_input_chars=20,
    max_frames=100,
    speeds=(0.5, 2.0),
    instructions=True,
    options={
        "frames": Option("integer", "frames", minimum=1, maximum=9),
        "warmth": Option("number", "warmth", minimum=0.0, maximum=1.0),
        "gain": Option("number", "gain"),
        "whisper": Option("boolean", "whisper"),
        "language": Option("choice", "language", choices=("English", "Deutsch")),
    },
)
CLONING = replace(
    INFO,
    voices=(Voice("clone", "Clone"),),
    default_voice="clone",
    aliases={"alloy": "clone"},
    clones="recording",
    options={"ref_audio": Option("text", "recording"), "ref_text": Option("text", "words", maximum=30)},
)
DESIGNING = replace(INFO, clones="description")
SERVED = ("m", "also-m")

SPOKEN = StoredVoice("voice_1", "Carla", 1, "Words.", None, None, has_audio=True)
DESCRIBED = StoredVoice("voice_2", "Carl", 1, None, "A deep voice.", None, has_audio=False)
BOTH = StoredVoice("voice_3", "Carlo", 1, None, "A high voice.", None, has_audio=True)


def find(name: str) -> StoredVoice | None:
    return next((voice for voice in (SPOKEN, DESCRIBED, BOTH) if name in (voice.id, voice.name)), None)


def check(info: ProgramInfo = INFO, /, **fields: Any) -> SpeechCall:
    return check_speech({"input": "Hello.", **fields}, info, SERVED, find)


def refusal(info: ProgramInfo = INFO, /, **fields: Any) -> ApiError:
    with pytest.raises((InvalidRequest, ModelNotFound)) as raised:
        check(info, **fields)
    return raised.value


def test_only_the_text_is_needed() -> None:
    call = check()
    assert (call.format, call.sse) == ("wav", False)
    speech = call.speech
    assert (speech.input, speech.voice, speech.instructions, speech.speed, speech.extra) == (
        "Hello.",
        "ann",
        None,
        1.0,
        {},
    )


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    call = check(**{name: None for name in SpeechRequest.model_fields if name != "input"})
    assert replace(call.speech, seed=0) == replace(check().speech, seed=0)
    assert (call.format, call.sse) == ("wav", False)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"user": "u"}, {"model": "also-m"}])
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert replace(check(**fields).speech, seed=0) == replace(check().speech, seed=0)


@pytest.mark.parametrize("voice", ["bob", {"id": "bob"}, {"id": "bob", "name": "Robert"}])
def test_a_voice_is_a_name_or_an_object_with_it(voice: Any) -> None:
    assert check(voice=voice).speech.voice == "bob"


@pytest.mark.parametrize("voice", ["BOB", "Bob", {"id": "bOb"}, "echo", "Echo"])
def test_a_voice_has_its_name_in_any_case_and_its_aliases(voice: Any) -> None:
    assert check(replace(INFO, aliases={"echo": "bob"}), voice=voice).speech.voice == "bob"


def test_the_engine_gets_a_voice_as_the_program_spells_it() -> None:
    spelled = replace(INFO, voices=(Voice("Uncle_Fu", "Uncle Fu"),), default_voice="Uncle_Fu")
    assert check(spelled, voice="uncle_fu").speech.voice == "Uncle_Fu"


def test_a_name_is_the_programs_voice_before_an_alias_and_that_before_a_stored_voice() -> None:
    assert check(replace(INFO, aliases={"ann": "bob"}), voice="ann").speech.voice == "ann"
    call = check(replace(CLONING, aliases={"carla": "clone"}), voice="Carla")
    assert (call.speech.voice, call.stored) == ("clone", None)


@pytest.mark.parametrize("name", ["voice_1", "Carla"])
def test_a_stored_voice_is_named_by_id_or_name_and_spoken_in_the_default_voice(name: str) -> None:
    call = check(CLONING, voice=name)
    assert (call.speech.voice, call.speech.extra, call.stored) == ("clone", {}, SPOKEN)
    assert check(CLONING, voice={"id": name}).stored == SPOKEN


def test_a_stored_voice_has_what_the_model_needs() -> None:
    assert check(DESIGNING, voice="Carl").stored == DESCRIBED
    assert check(CLONING, voice="Carlo").stored == check(DESIGNING, voice="Carlo").stored == BOTH
    missing = refusal(CLONING, voice="Carl")
    assert (missing.param, missing.message) == ("voice", "voice voice_2 has no recording, which model m imitates")
    missing = refusal(DESIGNING, voice="Carla")
    assert (missing.param, missing.message) == ("voice", "voice voice_1 has no description, which model m follows")


def test_without_a_store_there_are_no_stored_voices() -> None:
    with pytest.raises(InvalidRequest, match="voice 'Carla' is unknown"):
        check_speech({"input": "Hello.", "voice": "Carla"}, CLONING, SERVED)


@pytest.mark.parametrize("fields", [{"ref_audio": "data:"}, {"extra": {"ref_audio": "data:"}}])
@pytest.mark.parametrize("voice", ["anything", "Carla", "Carl", {"id": "x"}])
def test_beside_a_recording_a_voice_is_a_label(fields: dict[str, Any], voice: Any) -> None:
    call = check(CLONING, voice=voice, **fields)
    assert (call.speech.voice, call.stored) == ("clone", None)
    assert call.speech.extra == {"ref_audio": "data:"}


@pytest.mark.parametrize("fields", [{}, {"ref_audio": ""}, {"extra": {"ref_audio": ""}}, {"ref_text": "Words."}])
def test_without_a_recording_a_voice_must_be_known(fields: dict[str, Any]) -> None:
    assert refusal(CLONING, voice="anything", **fields).param == "voice"


def test_where_recordings_are_not_imitated_one_makes_no_voice_a_label() -> None:
    taking = replace(INFO, options=CLONING.options)
    assert refusal(taking, voice="anything", ref_audio="data:").param == "voice"


def test_a_text_option_has_its_longest_length_and_is_text() -> None:
    assert check(CLONING, ref_audio="x" * 100_000, ref_text="w" * 30).speech.extra["ref_text"] == "w" * 30
    long = refusal(CLONING, ref_text="w" * 31)
    assert (long.param, "ref_text must be text of at most 30 characters, got" in long.message) == ("ref_text", True)
    assert "extra: ref_text must be text of at most 30 characters" in refusal(CLONING, extra={"ref_text": 3}).message
    assert "ref_audio must be text, got None" in refusal(CLONING, extra={"ref_audio": None}).message


@pytest.mark.parametrize("field", ["instructions", "instruct"])
def test_instructions_have_two_names(field: str) -> None:
    assert check(**{field: "softly"}).speech.instructions == "softly"
    assert check(**{field: ""}).speech.instructions is None


def test_a_program_of_one_pace_takes_no_other() -> None:
    own = replace(INFO, speeds=(1.0, 1.0))
    assert check_speech({"input": "x", "speed": 1}, own, [own.model]).speech.speed == 1
    with pytest.raises(InvalidRequest, match=r"speed 2: model .* speaks at its own pace"):
        check_speech({"input": "x", "speed": 2}, own, [own.model])


@pytest.mark.parametrize("speed", [0.5, 1, 2, 2.0])
def test_speed_up_to_its_bounds_is_a_float(speed: float) -> None:
    given = check(speed=speed).speech.speed
    assert given == speed
    assert isinstance(given, float)


def test_a_seed_is_kept_and_otherwise_drawn_anew() -> None:
    assert check(seed=0).speech.seed == 0
    assert check(extra={"seed": 2**63 - 1}).speech.seed == 2**63 - 1
    drawn = {check().speech.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.parametrize(
    "extra",
    [
        {"frames": 1},
        {"frames": 9},
        {"warmth": 1},
        {"warmth": 0.5},
        {"gain": -1e300},
        {"whisper": False},
        {"language": "Deutsch"},
    ],
)
def test_declared_options_are_passed_on(extra: dict[str, Any]) -> None:
    assert check(extra=extra).speech.extra == extra


def test_fields_of_other_servers_are_options_of_the_same_name() -> None:
    assert check(language="English").speech.extra == {"language": "English"}
    assert set(EXTENSIONS) <= set(SpeechRequest.model_fields)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ""}, "input", "input is empty"),
        ({"input": " \n\t"}, "input", "input is empty"),
        ({"input": "x" * 21}, "input", "input: 21 characters, at most 20"),
        ({"input": "a\0b"}, "input", "input has a NUL character at position 1"),
        ({"input": None}, "input", "input has the wrong type"),
        ({"input": 3}, "input", "got a number"),
        ({"input": ["a"]}, "input", "got an array"),
        ({"voice": "carl"}, "voice", "voice 'carl' is unknown; GET /v1/audio/voices lists all: ann, bob"),
        ({"voice": "ann\0"}, "voice", "is unknown"),
        ({"voice": {}}, "voice", "a string, or an object whose id is one, got an object"),
        ({"voice": {"id": 3}}, "voice", "a string, or an object whose id is one"),
        ({"voice": 3}, "voice", "got a number"),
        ({"voice": {"id": "carl"}}, "voice", "voice 'carl' is unknown"),
        ({"speed": 9}, "speed", "speed 9 is not between 0.5 and 2"),
        ({"speed": 0.49}, "speed", "speed 0.49"),
        ({"speed": "fast"}, "speed", "got a string"),
        ({"speed": True}, "speed", "got a boolean"),
        ({"response_format": "exe"}, "response_format", "'exe' is not one of wav, pcm"),
        ({"response_format": 3}, "response_format", "got a number"),
        ({"stream_format": "websocket"}, "stream_format", "'websocket' is not one of audio, sse"),
        ({"stream": "yes"}, "stream", "got a string"),
        ({"instructions": "x" * 21}, "instructions", "instructions: 21 characters, at most 20"),
        ({"instruct": "x" * 21}, "instruct", "instruct: 21 characters"),
        ({"instructions": "a\0"}, "instructions", "NUL character at position 1"),
        ({"instructions": "a", "instruct": "b"}, "instruct", "send one of them"),
        ({"seed": -1}, "seed", "seed must be an integer from 0 to 9223372036854775807, got -1"),
        ({"seed": 2**63}, "seed", "seed must be"),
        ({"seed": 1.5}, "seed", "wrong type"),
        ({"seed": True}, "seed", "got a boolean"),
        ({"seed": 1, "extra": {"seed": 1}}, "seed", "both in the body and in extra"),
        ({"language": "Klingon"}, "language", "language must be one of English, Deutsch, got 'Klingon'"),
        ({"ref_audio": "data:"}, "ref_audio", "model m has no option 'ref_audio'; it has: frames, gain, language"),
        ({"extra": {"nonsense": 1}}, "extra", "extra: model m has no option 'nonsense'; it has: frames"),
        ({"extra": {"frames": 10}}, "extra", "extra: frames must be an integer from 1 to 9, got 10"),
        ({"extra": {"frames": 1.0}}, "extra", "frames must be an integer"),
        ({"extra": {"frames": True}}, "extra", "got True"),
        ({"extra": {"frames": None}}, "extra", "got None"),
        ({"extra": {"warmth": -0.1}}, "extra", "warmth must be a number from 0.0 to 1.0"),
        ({"extra": {"gain": "loud"}}, "extra", "gain must be a number, got 'loud'"),
        ({"extra": {"whisper": 1}}, "extra", "whisper must be true or false, got 1"),
        ({"extra": {"language": ["English"]}}, "extra", "must be one of English, Deutsch, got ['English']"),
        ({"extra": {"zzz": 1, "aaa": 1}}, "extra", "no option 'aaa'"),
        ({"extra": []}, "extra", "got an array"),
        ({"temperature": 1, "voice": 3}, "temperature", "unknown field 'temperature'; known fields: model, input"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(fields: dict[str, Any], param: str, said: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert said in error.message


def test_a_missing_text_is_named() -> None:
    with pytest.raises(InvalidRequest, match="field 'input' is missing") as raised:
        check_speech({}, INFO, SERVED)
    assert raised.value.param == "input"


@pytest.mark.parametrize("model", ["other", "", "M"])
def test_another_model_is_not_found(model: str) -> None:
    error = refusal(model=model)
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "served: also-m, m" in error.message


@pytest.mark.parametrize("field", ["instructions", "instruct"])
def test_instructions_to_a_model_that_follows_none_are_refused(field: str) -> None:
    error = refusal(replace(INFO, instructions=False), **{field: "softly"})
    assert error.param == field
    assert f"model m does not follow {field}" in error.message


def test_a_model_of_fixed_speed_takes_its_own_speed_only() -> None:
    fixed = replace(INFO, speeds=(1.0, 1.0))
    assert check(fixed, speed=1).speech.speed == 1.0
    assert refusal(fixed, speed=1.1).param == "speed"


def test_many_voices_are_listed_in_part() -> None:
    many = replace(INFO, voices=tuple(Voice(f"v{number}", "V") for number in range(50)), default_voice="v0")
    assert refusal(many, voice="x").message.endswith("v10, v11, …")


def test_the_first_mistake_is_answered_in_the_order_of_the_documentation() -> None:
    wrong = {
        "temperature": 1,
        "stream": 3,
        "model": "other",
        "response_format": "exe",
        "stream_format": "exe",
        "input": "",
        "voice": "carl",
        "instructions": "x" * 21,
        "speed": 9,
        "extra": {"nonsense": 1},
    }
    named = []
    while wrong:
        param = refusal(**wrong).param
        assert param is not None
        named.append(param)
        del wrong[param]
    assert named == [
        "temperature",
        "stream",
        "model",
        "response_format",
        "stream_format",
        "input",
        "voice",
        "instructions",
        "speed",
        "extra",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"voice": "v" * 100_000},
        {"model": "m" * 100_000},
        {"response_format": "f" * 100_000},
        {"extra": {"gain": "g" * 100_000}},
        {"extra": {"k" * 100_000: 1}},
        {"extra": {"gain": [[["deep"] * 1000] * 1000]}},
        {"f" * 100_000: 1},
    ],
)
def test_messages_repeat_long_values_in_brief(fields: dict[str, Any]) -> None:
    assert len(refusal(**fields).message) < 500


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b'{"input": NaN}', "the body is not JSON"),
        (b'{"input": "\\ud800"}', "the body is not JSON"),
        (b"{}\0", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[]", "must be a JSON object, got an array"),
        (b"null", "got null"),
        (b"true", "got a boolean"),
        (b"3.5", "got a number"),
        (b'"text"', "got a string"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_json(body)
    assert said in raised.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=25),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
likely_values = st.sampled_from(
    ["m", "ann", "wav", "pcm", "sse", "audio", 1, 1.5, True, {"id": "bob"}, {"frames": 3}, {"seed": None}, "x" * 21]
)
bodies = st.dictionaries(
    st.sampled_from([*SpeechRequest.model_fields, "other"]), likely_values | json_values, max_size=6
)


def _accepted_or_refused(body: bytes) -> None:
    try:
        call = check_speech(parse_json(body), INFO, SERVED)
    except ApiError as error:
        assert 400 <= error.status < 500
        assert error.message
        orjson.dumps(error.body)
    else:
        speech = call.speech
        assert 0 < len(speech.input) <= INFO.max_input_chars
        assert speech.voice in ("ann", "bob")
        assert 0 <= speech.seed < 2**63
        assert INFO.speeds[0] <= speech.speed <= INFO.speeds[1]
        assert set(speech.extra) <= set(INFO.options)


@given(st.binary(max_size=100))
@example(b'{"input":"x","extra":{"seed":' + b"[" * 1000 + b"]" * 1000 + b"}}")
@example(b'{"input":"x","speed":' + b"9" * 400 + b"}")
@example(b'{"input":"x","speed":1e400}')
@example(b'{"input":"x","seed":123456789012345678901234567890}')
def test_any_bytes_are_accepted_or_refused_in_our_own_words(body: bytes) -> None:
    _accepted_or_refused(body)


@given(bodies | json_values, st.booleans())
def test_any_json_is_accepted_or_refused_in_our_own_words(document: Any, named: bool) -> None:
    if named and isinstance(document, Mapping):
        document = {"input": "Hello."} | document
    _accepted_or_refused(orjson.dumps(document))


def test_many_unknown_fields_cost_no_more_than_one_and_are_named_in_brief() -> None:
    document = {f"{number}".rjust(200, "x"): 1 for number in range(50_000)}
    with pytest.raises(InvalidRequest, match="unknown field") as refused:
        check_speech({"input": "a", **document}, INFO, ["m"])
    assert refused.value.param is not None
    assert len(refused.value.param) == 100
    assert len(refused.value.message) < 1000
