from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.engine.program import PARTS, Admission, FinishReason, Pcm, Program, Prompt, Speech
from pega_omni_plugin.models.sim.program import AMPLITUDE, TONE_HZ, SimOptions, SimProgram, planned_frames, tone_frames


def request(text: str = "hello", speed: float = 1.0, **extra: Any) -> Speech:
    return Speech(input=text, voice="alloy", seed=1, speed=speed, extra=extra)


def admission(slot: int, speech: Speech) -> Admission:
    return Admission(slot, speech, Prompt(len(speech.input)))


def load(slots: int = 4, **options: Any) -> SimProgram:
    return SimProgram.load(Path("checkpoint"), SimOptions(**options), {}, slots)


def speak(program: SimProgram, slot: int, speech: Speech) -> tuple[Pcm, FinishReason | None]:
    """One request alone, to its end."""
    program.prefill([admission(slot, speech)])
    pieces = []
    while True:
        (output,) = program.step([slot])
        pieces.append(output.pcm)
        if output.finish is not None:
            program.release(slot)
            return np.concatenate(pieces), output.finish


def test_the_audio_is_one_tone_of_a_known_pitch_without_a_break() -> None:
    """Two seconds: every sample is where an unbroken sine has it."""
    audio, finish = speak(load(), 1, request(frames=25))
    expected = AMPLITUDE * np.sin(2 * np.pi * TONE_HZ * np.arange(25 * 1920) / 24_000)
    assert finish == "stop"
    assert audio.dtype == np.int16
    assert np.abs(audio - expected).max() <= 0.5 + 1e-6


@given(
    rate=st.sampled_from([8_000, 16_000, 22_050, 24_000, 48_000]),
    samples=st.sampled_from([80, 160, 441, 1764, 1920]),
)
def test_frames_join_where_the_tone_repeats(rate: int, samples: int) -> None:
    frames = tone_frames(rate, samples)
    tone = np.concatenate([*frames, *frames])
    expected = AMPLITUDE * np.sin(2 * np.pi * TONE_HZ / rate * np.arange(len(tone)))
    assert all(frame.shape == (samples,) for frame in frames)
    assert np.abs(tone - expected).max() <= 0.5 + 1e-5


@given(
    characters=st.integers(1, 300),
    speed=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    limit=st.integers(1, 100),
    per_char=st.sampled_from([0.1, 0.5, 0.8, 1.0, 3.0]),
)
def test_length_follows_text_and_speed_up_to_the_limit(
    characters: int, speed: float, limit: int, per_char: float
) -> None:
    options = SimOptions(max_frames=limit, frames_per_char=per_char)
    frames, finish = planned_frames(request("x" * characters, speed), options)
    wanted = max(1, math.ceil(characters * per_char / speed))
    assert frames == min(wanted, limit)
    assert finish == ("length" if wanted > limit else "stop")


def test_ten_characters_at_double_speed_are_four_frames() -> None:
    assert planned_frames(request("0123456789", 2.0), SimOptions()) == (4, "stop")


def test_the_frames_option_wins_over_the_text() -> None:
    assert planned_frames(request("x" * 100, frames=3), SimOptions()) == (3, "stop")


@given(st.data())
def test_a_request_sounds_the_same_whatever_shares_its_steps(data: st.DataObject) -> None:
    """Requests come and go at random in three slots; each makes what it makes alone."""
    program, alone = load(slots=3), load(slots=1)
    running: dict[int, Speech] = {}
    heard: dict[int, list[Pcm]] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        for slot in data.draw(st.sets(st.integers(1, 3))):
            if slot not in running:
                running[slot] = request(frames=data.draw(st.integers(1, 6)))
                heard[slot] = []
                program.prefill([admission(slot, running[slot])])
            elif data.draw(st.booleans()):
                program.release(slot)  # aborted
                del running[slot]
        if not running:
            continue
        slots = data.draw(st.permutations(sorted(running)))
        for slot, output in zip(slots, program.step(slots), strict=True):
            heard[slot].append(output.pcm)
            if output.finish is not None:
                whole, finish = speak(alone, 1, running.pop(slot))
                assert np.concatenate(heard[slot]).tolist() == whole.tolist()
                assert output.finish == finish
                program.release(slot)


def test_a_slot_that_is_prefilled_anew_forgets_what_it_held() -> None:
    program = load()
    program.prefill([admission(1, request(frames=9))])
    program.step([1])
    assert speak(program, 1, request(frames=2))[0].tolist() == speak(load(), 1, request(frames=2))[0].tolist()


def test_release_of_an_empty_slot_does_nothing() -> None:
    load().release(3)


def test_costs_are_slept_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("pega_omni_plugin.models.sim.program.time.sleep", slept.append)
    program = load(step_base_us=100, step_per_row_us=11, prefill_per_char_us=3)
    program.prefill([admission(1, request("12345")), admission(2, request("12"))])
    program.step([1, 2])
    program.step([2])
    assert slept == pytest.approx([21e-6, 122e-6, 111e-6])
    assert program.part_seconds["thinker"] > 0
    assert program.part_seconds["codec"] > 0
    assert set(program.part_seconds) == set(PARTS)


def test_its_front_counts_characters_and_speaks_a_sample_in_its_default_voice() -> None:
    options = SimOptions()
    info = load().info
    front = SimProgram.front(Path("checkpoint"), options, info)
    assert front.prepare(request("four")) == Prompt(4)
    sample, prompt = front.sample()
    assert (sample.voice, prompt) == (info.default_voice, Prompt(len(sample.input)))
    assert planned_frames(sample, options)[1] == "stop"


def test_without_costs_it_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s")

    monkeypatch.setattr("pega_omni_plugin.models.sim.program.time.sleep", never)
    speak(load(), 1, request())


def test_it_says_what_it_serves() -> None:
    info = load(sample_rate=16_000, frame_rate=50, max_frames=77, max_input_chars=88, model="m").info
    assert (info.model, info.kind, info.sample_rate, info.frame_samples) == ("m", "speech", 16_000, 320)
    assert (info.max_frames, info.max_input_chars, info.speeds) == (77, 88, (0.25, 4.0))
    assert info.options["frames"].maximum == 77
    assert len(info.voices) == 11
    assert info.default_voice in {voice.id for voice in info.voices}


@pytest.mark.parametrize("name", ["load", "front", "prefill", "step", "release", "close"])
def test_its_methods_are_those_of_the_contract(name: str) -> None:
    parameters = inspect.signature(getattr(SimProgram, name)).parameters
    assert list(parameters) == list(inspect.signature(getattr(Program, name)).parameters)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frame_rate": 7}, "24000 / frame_rate 7 is no whole frame"),
        ({"sample_rate": 1, "frame_rate": 2}, "no whole frame"),
        *(({"frame_rate": rate}, "frame_rate") for rate in (0, -1, 1e-5, math.inf, math.nan)),
        *(({"frames_per_char": value}, "frames_per_char") for value in (0, -1, math.inf, math.nan)),
        *(({name: 0}, name) for name in ("sample_rate", "max_frames", "max_input_chars")),
        *(
            ({name: value}, name)
            for name in ("step_base_us", "step_per_row_us", "prefill_per_char_us")
            for value in (-1, math.inf, math.nan)
        ),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SimOptions(**options)


@pytest.mark.parametrize(("rate", "frame_rate", "samples"), [(24_000, 12.5, 1920), (16_000, 33.3333, 480)])
def test_frame_rates_may_be_fractions(rate: int, frame_rate: float, samples: int) -> None:
    assert SimOptions(sample_rate=rate, frame_rate=frame_rate).frame_samples == samples
