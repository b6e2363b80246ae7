from __future__ import annotations

import base64
from typing import Any

import dynamo.llm.exceptions as dynamo_errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.api.errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TimedOut,
    Unavailable,
)
from pega_omni_plugin.api.requests import check_speech
from pega_omni_plugin.dynamo.mapping import audio_item, dynamo_error, speech_document
from pega_omni_plugin.models.sim.program import SimOptions, SimProgram

INFO = SimProgram(SimOptions()).info

FRONTEND: dict[str, Any] = {
    "model": INFO.model,
    "input": "Hello.",
    "voice": "echo",
    "response_format": "pcm",
    "speed": None,
    "instructions": None,
    "data_source": None,
    "extra_args": None,
    "nvext": None,
}
"""What the frontend makes of a request, the fields it knows at the top and absent ones null."""


def test_the_body_comes_out_as_it_was_sent() -> None:
    assert speech_document(FRONTEND) == {
        "model": INFO.model,
        "input": "Hello.",
        "voice": "echo",
        "response_format": "pcm",
    }


def test_fields_that_the_frontend_does_not_know_come_back_to_the_top() -> None:
    sent = FRONTEND | {"extra_args": {"media_passthrough": {"extra": {"frames": 3}, "seed": 5, "stream": True}}}
    document = speech_document(sent)
    assert {key: document[key] for key in ("extra", "seed", "stream")} == {
        "extra": {"frames": 3},
        "seed": 5,
        "stream": True,
    }


def test_a_mapped_request_passes_the_same_checks_as_one_over_http() -> None:
    sent = FRONTEND | {"extra_args": {"media_passthrough": {"extra": {"frames": 3}, "seed": 5}}}
    call = check_speech(speech_document(sent), INFO, [INFO.model])
    assert (call.speech.voice, call.speech.extra, call.speech.seed, call.format) == ("echo", {"frames": 3}, 5, "pcm")


def test_an_unknown_field_is_still_refused_by_name() -> None:
    sent = FRONTEND | {"extra_args": {"media_passthrough": {"temperature": 1}}}
    with pytest.raises(InvalidRequest) as raised:
        check_speech(speech_document(sent), INFO, [INFO.model])
    assert raised.value.param == "temperature"


@pytest.mark.parametrize("other", [None, {}, {"media_passthrough": None}, {"media_passthrough": {}}, {"other": 1}])
def test_nothing_passed_through_adds_nothing(other: Any) -> None:
    assert speech_document(FRONTEND | {"extra_args": other}) == speech_document(FRONTEND)


def test_guidance_is_the_field_of_that_name_unless_the_body_has_it() -> None:
    assert speech_document(FRONTEND | {"nvext": {"cfg_scale": 2.5}})["cfg_scale"] == 2.5
    both = FRONTEND | {"nvext": {"cfg_scale": 2.5}, "extra_args": {"media_passthrough": {"cfg_scale": 3}}}
    assert speech_document(both)["cfg_scale"] == 3
    assert "cfg_scale" not in speech_document(FRONTEND | {"nvext": {"annotations": ["x"]}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"data_source": "url"}, "data_source"),
        ({"stream_format": "sse"}, "stream_format"),
        ({"extra_args": {"media_passthrough": {"stream_format": "sse"}}}, "stream_format"),
    ],
)
def test_what_this_path_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        speech_document(FRONTEND | fields)
    assert raised.value.param == param
    assert "leave the field out" in raised.value.message


@given(
    st.dictionaries(
        st.sampled_from([*FRONTEND, "stream", "user"]), st.none() | st.integers() | st.text(max_size=5), max_size=6
    )
)
def test_mapping_neither_changes_the_request_nor_lets_the_frontends_own_fields_through(fields: dict[str, Any]) -> None:
    sent = fields | {"extra_args": {"media_passthrough": {"seed": 1}}, "nvext": {}}
    before = dict(sent)
    document = speech_document({**sent, "data_source": "b64_json"})
    assert sent == before
    assert not {"extra_args", "nvext", "data_source"} & set(document)
    assert None not in document.values()


def test_a_piece_of_audio_is_one_item_of_base64() -> None:
    item = audio_item("r1", "m", b"\x01\x02", "pcm")
    assert (item["id"], item["model"], item["object"]) == ("r1", "m", "audio.speech")
    assert (item["status"], item["progress"]) == ("in_progress", 0)
    (piece,) = item["data"]
    assert piece["output_format"] == "pcm"
    assert base64.b64decode(piece["b64_json"]) == b"\x01\x02"


def test_the_last_item_says_so_and_may_be_empty() -> None:
    item = audio_item("r1", "m", b"", "wav", last=True)
    assert (item["status"], item["progress"], item["data"]) == ("completed", 100, [])


def test_a_wrong_request_is_an_invalid_argument_to_dynamo() -> None:
    error = dynamo_error(InvalidRequest("speed 9 is not between 0.25 and 4", param="speed"))
    assert isinstance(error, dynamo_errors.InvalidArgument)
    assert "speed 9" in str(error)


@pytest.mark.parametrize("kind", [ModelNotFound, BodyTooLarge, Overloaded, Unavailable, TimedOut, ApiError])
def test_other_errors_keep_their_status_and_never_take_the_worker_out_of_routing(kind: type[ApiError]) -> None:
    error = dynamo_error(kind("because"))
    assert isinstance(error, dynamo_errors.HttpError)
    assert error.code == kind.status
    assert "because" in str(error)
