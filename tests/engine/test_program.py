from __future__ import annotations

from dataclasses import replace

import numpy as np

from pega_omni_plugin.engine.program import CharacterFront, Prompt, Recording, RequestError, Speech
from tests.engine.harness import CheckedProgram

FRONT = CharacterFront(replace(CheckedProgram.info, default_voice="w"))


def test_a_unit_of_programs_that_take_text_is_a_character() -> None:
    speech = Speech("a word — é", "v", seed=1, instructions="not counted")
    assert FRONT.prepare(speech) == Prompt(10, {})
    assert FRONT.prepare(speech, Recording(np.zeros(3, np.float32), "digest")) == Prompt(10, {})


def test_the_sample_is_in_the_default_voice_and_always_the_same() -> None:
    speech, prompt = FRONT.sample()
    assert (speech.voice, speech.speed, speech.extra) == ("w", 1.0, {})
    assert prompt == FRONT.prepare(speech)
    assert FRONT.sample() == (speech, prompt)


def test_a_request_that_a_program_refuses_names_the_field() -> None:
    error = RequestError("language", "language 'x' is unknown")
    assert (error.field, str(error)) == ("language", "language 'x' is unknown")
    assert isinstance(error, ValueError)
