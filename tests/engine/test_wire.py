from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_omni.engine.serialization import serialize_additional_information

from pega_omni_plugin.engine.program import FinishReason, Option, ProgramInfo, Prompt, Speech, Voice
from pega_omni_plugin.engine.wire import (
    KEY,
    Ending,
    decode_ending,
    decode_info,
    decode_speech,
    encode_ending,
    encode_info,
    encode_speech,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
speeches = st.builds(
    Speech,
    input=texts,
    voice=texts,
    seed=st.integers(0, 2**63 - 1),
    instructions=st.none() | texts,
    speed=st.floats(0.25, 4),
    extra=st.dictionaries(texts, st.integers(-(2**63), 2**63 - 1) | st.booleans() | texts | st.floats(0, 1)),
)

INFO = ProgramInfo(
    model="m",
    kind="speech",
    sample_rate=24_000,
    frame_samples=1920,
    voices=(Voice("a", "A", "en"), Voice("b", "B")),
    default_voice="a",
    max_input_chars=10,
    max_frames=20,
    speeds=(0.5, 2.0),
    instructions=True,
    options={
        "kind": Option("choice", "k", choices=("x", "y")),
        "count": Option("integer", "c", minimum=1, maximum=9),
        "ref_text": Option("text", "t", maximum=50),
    },
    aliases={"alloy": "a"},
    clones="recording",
    recording_seconds=(0.5, 20.0),
    recording_urls=True,
)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1, 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@given(speech=speeches, prompt=st.builds(Prompt, st.integers(0, 2**31), st.dictionaries(texts, JSON, max_size=3)))
def test_a_request_survives_the_way_through_vllm_omni(speech: Speech, prompt: Prompt) -> None:
    payload = serialize_additional_information(encode_speech(speech, prompt))
    assert decode_speech(payload) == (speech, prompt)


@pytest.mark.parametrize(
    "information", [{}, {"other": ["{}"]}, {KEY: ["not JSON"]}, {KEY: ["{}"]}, {KEY: ['{"prompt":{"units":1}}']}]
)
def test_what_is_not_ours_says_where_to_send_it(information: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="/v1/audio/speech"):
        decode_speech(serialize_additional_information(information))


def test_no_information_at_all_is_not_ours() -> None:
    with pytest.raises(ValueError, match="/v1/audio/speech"):
        decode_speech(None)


@pytest.mark.parametrize("finish", get_args(FinishReason))
def test_an_ending_survives(finish: Any) -> None:
    assert decode_ending(encode_ending(Ending(finish, 17))) == Ending(finish, 17)


@pytest.mark.parametrize(
    "info", [INFO, replace(INFO, options={}, voices=(Voice("é", "É"),)), replace(INFO, clones=None)]
)
def test_program_info_survives_with_its_types(info: ProgramInfo) -> None:
    decoded = decode_info(encode_info(info))
    assert decoded == info
    assert isinstance(decoded.voices, tuple)
    assert isinstance(decoded.speeds, tuple)
    assert isinstance(decoded.recording_seconds, tuple)
    assert decoded.frame_seconds == info.frame_seconds == 0.08
