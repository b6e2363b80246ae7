"""Requests to prompts: what is refused and why, and that prompts are those of the official package."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pega_omni_plugin.engine.program import Prompt, Recording, RequestError, Speech
from pega_omni_plugin.models.qwen3_tts.config import read_config
from pega_omni_plugin.models.qwen3_tts.ending import frame_limit
from pega_omni_plugin.models.qwen3_tts.front import Qwen3TtsFront, language
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.prompt import Clone, PromptBuilder, TextTokenizer
from tests.goldens import load as load_arrays
from tests.goldens import manifest, reference_audio
from tests.models.qwen3_tts.harness import request_prompt

FrontOf = Callable[[str], Qwen3TtsFront]
CheckpointOf = Callable[[str], Path]
CASES: Mapping[str, Any] = manifest()["cases"]


@pytest.fixture(scope="module")
def recording(front_of: FrontOf) -> Recording:
    """The one of the golden outputs, encoded by us."""
    pcm = reference_audio().astype(np.float32) / 32768
    return Recording(front_of("base").encode(pcm), manifest()["reference_text"])


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("custom_voice", "english"),
        ("custom_voice", "auto"),
        ("custom_voice", "instruction"),
        ("custom_voice", "dialect_auto"),
        ("custom_voice", "dialect_english"),
        ("voice_design", "described"),
        ("base", "long"),
        ("base", "long_non_streaming"),
        ("base", "speaker"),
        ("base_narrow", "long"),
    ],
)
def test_a_request_gets_the_prompt_of_the_official_package(
    front_of: FrontOf, checkpoint_of: CheckpointOf, recording: Recording, case: str, name: str
) -> None:
    """The golden tests tell that those prompts are the package's; here they come from requests as they arrive."""
    request = CASES[case]["requests"][name]
    folder = checkpoint_of(case)
    given, clone = None, None
    if case.startswith("base"):
        embedding = load_arrays(case)["reference/speaker"]
        given = Recording({**recording.encoding, "embedding": embedding}, recording.transcript)
        clone = Clone(embedding, load_arrays(case)["reference/codes"], recording.transcript)
    wanted = request_prompt(PromptBuilder(read_config(folder), TextTokenizer(folder)), request, clone)
    keys = ("language", "x_vector_only_mode", "non_streaming_mode")
    speech = Speech(
        request["text"],
        request.get("speaker", "any"),
        seed=0,
        instructions=request.get("instruct"),
        extra={key: request[key] for key in keys if key in request},
    )
    prompt = front_of(case).prepare(speech, given)
    assert prompt.units == len(wanted)
    assert {**prompt.data, "frames": 1} == wanted.document()


def test_a_recording_has_the_codes_and_the_voice_of_the_official_package(recording: Recording) -> None:
    arrays = load_arrays("base")
    np.testing.assert_array_equal(recording.encoding["codes"], arrays["reference/codes"])
    np.testing.assert_allclose(recording.encoding["embedding"], arrays["reference/speaker"], rtol=1e-4, atol=1e-5)


# --- How long speech may be ---


def frames_of(front: Qwen3TtsFront, text: str = "Hello.", **extra: Any) -> int:
    return int(front.prepare(Speech(text, "ryan", 0, extra=extra)).data["frames"])


def test_the_least_of_all_limits_holds(front_of: FrontOf, checkpoint_of: CheckpointOf) -> None:
    wide = Qwen3TtsFront(checkpoint_of("custom_voice"), Qwen3TtsOptions(positions=20_000), "ryan")
    assert frames_of(wide) == frame_limit("Hello.")
    assert frames_of(wide, max_new_tokens=7) == 7
    assert frames_of(wide, "a" * 4000) == 8192  # the checkpoint's own
    narrow = front_of("custom_voice")  # of 256 positions
    text = "a" * 100
    prompt = narrow.prepare(Speech(text, "ryan", 0))
    assert prompt.data["frames"] == 256 - prompt.units < frame_limit(text)


# --- What is refused ---


def refused(front: Qwen3TtsFront, speech: Speech, recording: Recording | None = None) -> RequestError:
    with pytest.raises(RequestError) as raised:
        front.prepare(speech, recording)
    return raised.value


@pytest.mark.parametrize("instructions", [None, ""])
def test_a_voice_that_nobody_describes_is_refused(front_of: FrontOf, instructions: str | None) -> None:
    error = refused(front_of("voice_design"), Speech("Hello.", "designed", 0, instructions))
    assert error.field == "instructions"
    assert "send them" in str(error)


def test_without_a_recording_there_is_nothing_to_imitate(front_of: FrontOf) -> None:
    error = refused(front_of("base"), Speech("Hello.", "clone", 0))
    assert error.field == "ref_audio"
    assert "send ref_audio" in str(error)


def test_a_language_that_the_checkpoint_has_not_is_refused_by_name(front_of: FrontOf) -> None:
    error = refused(front_of("custom_voice"), Speech("Hello.", "ryan", 0, extra={"language": "klingon" * 9}))
    assert error.field == "language"
    message = str(error)
    assert "'klingon" in message
    assert len(message) < 400
    assert "english" in message and "auto" in message and "en, " in message


def test_a_text_that_does_not_fit_is_refused_and_says_how_much_is_left(front_of: FrontOf) -> None:
    front = front_of("custom_voice")
    fitting = next(n for n in range(200, 0, -1) if _fits(front, "a" * n))
    error = refused(front, Speech("a" * (fitting + 1), "ryan", 0))
    assert error.field == "input"
    message = str(error)
    assert f"{fitting + 1} bytes takes about {fitting + 1} frames" in message
    assert f"leaves {fitting - 1} of the 256" in message and message.endswith("send the text in pieces")
    assert "leaves 0 of the 256" in str(refused(front, Speech("a" * 300, "ryan", 0)))


def _fits(front: Qwen3TtsFront, text: str) -> bool:
    try:
        prompt = front.prepare(Speech(text, "ryan", 0))
    except RequestError:
        return False
    assert prompt.units + prompt.data["frames"] <= 256
    return True


def test_long_instructions_count_too(front_of: FrontOf) -> None:
    assert refused(front_of("custom_voice"), Speech("Hello.", "ryan", 0, "Slowly. " * 60)).field == "input"


# --- Languages ---


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("english", "english"),
        ("English", "english"),
        ("CHINESE", "chinese"),
        ("en", "english"),
        ("EN", "english"),
        ("en-US", "english"),
        ("en_GB", "english"),
        ("zh_CN", "chinese"),
        ("zh-Hans-CN", "chinese"),
        (" ja ", "japanese"),
        ("pt-BR", "portuguese"),
        ("sichuan_dialect", "sichuan_dialect"),
        ("Sichuan-Dialect", "sichuan_dialect"),
        ("auto", None),
        ("Auto", None),
        ("", None),
        (None, None),
    ],
)
def test_languages_are_known_by_name_and_by_code(
    checkpoint_of: CheckpointOf, asked: str | None, found: str | None
) -> None:
    assert language(read_config(checkpoint_of("custom_voice")), asked) == found


@pytest.mark.parametrize("asked", ["klingon", "xx", "eng", "english-us", "-", "_", "auto-detect", "chinese_x"])
def test_other_languages_are_refused(checkpoint_of: CheckpointOf, asked: str) -> None:
    with pytest.raises(RequestError) as raised:
        language(read_config(checkpoint_of("custom_voice")), asked)
    assert raised.value.field == "language"
    assert repr(asked) in str(raised.value)


def test_every_language_of_the_checkpoint_is_known_by_its_name(checkpoint_of: CheckpointOf) -> None:
    config = read_config(checkpoint_of("custom_voice"))
    assert [language(config, name) for name in config.talker.languages] == list(config.talker.languages)


# --- Encoding and samples ---


@pytest.mark.parametrize("case", CASES)
def test_every_variant_has_a_sample_of_at_most_four_frames(front_of: FrontOf, case: str) -> None:
    speech, prompt = front_of(case).sample()
    assert isinstance(prompt, Prompt)
    assert speech.input
    assert prompt.data["frames"] == 4
    assert ("speaker" in prompt.data) == case.startswith("base")


@pytest.mark.parametrize("case", ["custom_voice", "voice_design"])
def test_only_base_checkpoints_encode(front_of: FrontOf, case: str) -> None:
    front = front_of(case)
    with pytest.raises(ValueError, match="only base checkpoints imitate recordings"):
        front.encode(np.zeros(24_000, np.float32))
    assert front.key == ""


def test_the_key_of_encodings_changes_with_the_checkpoint(
    front_of: FrontOf, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    key = front_of("base").key
    assert len(key) == 32
    assert front_of("base_narrow").key != key
    folder = tmp_path / "moved"
    shutil.copytree(checkpoint_of("base"), folder)
    options = Qwen3TtsOptions(positions=256)
    assert Qwen3TtsFront(folder, options, "clone").key == key
    config = folder / "speech_tokenizer" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert Qwen3TtsFront(folder, options, "clone").key != key
