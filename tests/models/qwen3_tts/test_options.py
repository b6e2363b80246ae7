"""What a stage file and a request may say, and what a checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pega_omni_plugin.engine.program import Speech
from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, Sampling, read_config
from pega_omni_plugin.models.qwen3_tts.options import (
    ALIASES,
    SPEAKER_LANGUAGES,
    Qwen3TtsOptions,
    draw_settings,
    program_info,
)
from pega_omni_plugin.models.qwen3_tts.sampler import DrawSettings

ConfigOf = Callable[[str], Qwen3TtsConfig]


@pytest.fixture(scope="module")
def config_of(checkpoint_of: Callable[[str], Path]) -> ConfigOf:
    return lambda case: read_config(checkpoint_of(case))


# --- The stage file's options ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positions": 127}, "positions must be from 128 to 1048576, got 127"),
        ({"max_input_chars": 0}, "max_input_chars must be from 1"),
        ({"min_reference_seconds": 0.05}, "min_reference_seconds must be from 0.1 to 60.0, got 0.05"),
        ({"max_reference_seconds": 61.0}, "max_reference_seconds must be from 1.0 to 60.0, got 61.0"),
        ({"min_reference_seconds": 5.0, "max_reference_seconds": 4.0}, "max_reference_seconds must be from 5.0"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3TtsOptions(**given)


def test_options_reach_the_description(config_of: ConfigOf) -> None:
    options = Qwen3TtsOptions(
        positions=200, max_input_chars=77, reference_urls=True, min_reference_seconds=2.0, max_reference_seconds=9.0
    )
    info = program_info(config_of("base"), options, "m")
    assert (info.model, info.kind, info.sample_rate, info.frame_samples) == ("m", "speech", 24_000, 1920)
    assert (info.max_input_chars, info.max_frames) == (77, 200)
    assert info.options["max_new_tokens"].maximum == 200
    assert (info.recording_seconds, info.recording_urls) == ((2.0, 9.0), True)


# --- What a checkpoint offers ---


def test_speakers_are_voices_with_their_languages(config_of: ConfigOf) -> None:
    info = program_info(config_of("custom_voice"), Qwen3TtsOptions(), "m")
    assert {voice.id: voice.language for voice in info.voices} == SPEAKER_LANGUAGES
    assert {voice.id: voice.name for voice in info.voices}["uncle_fu"] == "Uncle Fu"
    assert info.default_voice == info.voices[0].id
    assert info.aliases == ALIASES
    assert info.clones is None


@pytest.mark.parametrize(
    ("case", "instructions", "clones"),
    [
        ("custom_voice", True, None),
        ("custom_voice_narrow", False, None),  # the published 0.6B was not taught them
        ("voice_design", True, "description"),
        ("base", False, "recording"),
        ("base_narrow", False, "recording"),
    ],
)
def test_variants_differ_in_what_makes_the_voice(
    config_of: ConfigOf, case: str, instructions: bool, clones: str | None
) -> None:
    info = program_info(config_of(case), Qwen3TtsOptions(), "m")
    assert (info.instructions, info.clones) == (instructions, clones)
    assert ("ref_audio" in info.options) == (clones == "recording")
    if clones is not None:
        assert len(info.voices) == 1
        assert set(info.aliases) == set(ALIASES)
        assert set(info.aliases.values()) == {info.default_voice}


def test_speakers_that_nobody_knows_are_voices_too(config_of: ConfigOf) -> None:
    config = config_of("custom_voice")
    other = replace(config, talker=replace(config.talker, speakers={"somebody_new": 3000}))
    info = program_info(other, Qwen3TtsOptions(), "m")
    assert [(voice.id, voice.language) for voice in info.voices] == [("somebody_new", None)]
    assert info.aliases == {}


def test_a_custom_voice_checkpoint_without_speakers_is_refused(config_of: ConfigOf) -> None:
    config = config_of("custom_voice")
    with pytest.raises(ValueError, match=r"talker_config\.spk_id"):
        program_info(replace(config, talker=replace(config.talker, speakers={})), Qwen3TtsOptions(), "m")


def test_aliases_of_the_stage_file_replace_the_others(config_of: ConfigOf) -> None:
    info = program_info(config_of("custom_voice"), Qwen3TtsOptions(aliases={"Anna": "sohee"}), "m")
    assert info.aliases == {"anna": "sohee"}
    with pytest.raises(ValueError, match="aliases: no such voice: nobody; there are: aiden, "):
        program_info(config_of("custom_voice"), Qwen3TtsOptions(aliases={"Anna": "nobody"}), "m")


# --- A request's settings ---


def settings(config: Qwen3TtsConfig, **extra: Any) -> DrawSettings:
    return draw_settings(config, Speech("a", "v", 0, extra=extra))


def test_without_settings_a_request_has_the_checkpoints_own(config_of: ConfigOf) -> None:
    own = config_of("custom_voice").generation
    assert settings(config_of("custom_voice")) == DrawSettings(own.talker, own.predictor, own.repetition_penalty)
    assert own.talker == Sampling(0.9, 50, 1.0)


def test_a_requests_settings_replace_one_by_one(config_of: ConfigOf) -> None:
    config = config_of("custom_voice")
    found = settings(config, top_k=7, subtalker_top_p=0.5, repetition_penalty=1.5)
    assert found == DrawSettings(Sampling(0.9, 7, 1.0), Sampling(0.9, 50, 0.5), 1.5)
    found = settings(config, temperature=0, subtalker_temperature=2, subtalker_top_k=0)
    assert found == DrawSettings(Sampling(0.0, 50, 1.0), Sampling(2.0, 0, 1.0), 1.05)


@pytest.mark.parametrize("case", ["custom_voice", "voice_design", "base"])
def test_every_setting_is_declared_with_bounds(config_of: ConfigOf, case: str) -> None:
    """The API refuses what is not declared, and what is out of bounds."""
    declared = program_info(config_of(case), Qwen3TtsOptions(), "m").options
    for prefix in ("", "subtalker_"):
        for name, most in (("temperature", 2.0), ("top_k", 2048), ("top_p", 1.0)):
            option = declared[f"{prefix}{name}"]
            assert (option.minimum, option.maximum) == (0, most)
    assert (declared["repetition_penalty"].minimum, declared["repetition_penalty"].maximum) == (0.5, 2.0)
    assert (declared["max_new_tokens"].minimum, declared["max_new_tokens"].maximum) == (2, 6144)
    expected = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}[case]
    assert declared["task_type"].choices == (expected,)
