"""The program as the engine runs it: first frames, endings, seeds, slots, and what shares a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pega_omni_plugin.engine.program import PARTS, Admission, Part, PartConfig, Pcm, Prompt, Speech
from pega_omni_plugin.models.qwen3_tts import program as program_module
from pega_omni_plugin.models.qwen3_tts.ending import LOOP_FRAMES
from pega_omni_plugin.models.qwen3_tts.front import Qwen3TtsFront
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from tests.goldens import load as load_arrays
from tests.goldens import manifest
from tests.models.qwen3_tts.conftest import Load
from tests.models.qwen3_tts.harness import Coming, Forced, Heard, run, speak

TEXT = "Hello there."
FRAME = 1920
END = 2048

FrontOf = Callable[[str], Qwen3TtsFront]
Say = Callable[..., Coming]


@pytest.fixture
def program(load: Load) -> Qwen3TtsProgram:
    return load("custom_voice", 2)


@pytest.fixture(scope="module")
def say(front_of: FrontOf) -> Say:
    """``say(slot, text, seed, step, **extra)``: a request to the ``custom_voice`` checkpoint."""

    def coming(slot: int = 1, text: str = TEXT, seed: int = 2, step: int = 0, **extra: object) -> Coming:
        speech = Speech(text, "ryan", seed, extra=extra)
        return Coming(slot, speech, front_of("custom_voice").prepare(speech), step)

    return coming


def alone(program: Qwen3TtsProgram, one: Coming) -> Heard:
    return speak(program, one.speech, one.prompt, one.slot)


# --- One request ---


def test_the_step_that_prefilled_gives_the_first_frame(program: Qwen3TtsProgram, say: Say) -> None:
    one = say(max_new_tokens=4)
    program.prefill([Admission(1, one.speech, one.prompt)])
    (output,) = program.step([1])
    assert output.pcm.dtype == np.int16
    assert output.pcm.shape == (FRAME,)
    assert output.pcm.any()
    program.release(1)


def test_speech_ends_by_itself_and_the_end_has_no_audio(program: Qwen3TtsProgram, say: Say) -> None:
    for seed in (4, 6, 8):
        heard = alone(program, say(seed=seed))
        assert heard.finish == "stop"
        assert heard.codes[-1][0] == END
        assert all(frame[0] < END for frame in heard.codes[:-1])
        assert [len(piece) for piece in heard.pieces] == [FRAME] * (len(heard.pieces) - 1) + [0]
        assert len(heard.pieces) > 2  # two frames at least, and the end


@pytest.mark.parametrize("frames", [2, 3, 7])
def test_the_limit_ends_speech_with_exactly_so_many_frames(program: Qwen3TtsProgram, say: Say, frames: int) -> None:
    heard = alone(program, say(seed=0, max_new_tokens=frames))
    assert heard.finish == "length"
    assert [len(piece) for piece in heard.pieces] == [FRAME] * frames


def test_a_seed_gives_the_same_bytes_and_another_seed_others(program: Qwen3TtsProgram, say: Say) -> None:
    first, again, other = (alone(program, say(seed=seed)) for seed in (1, 1, 2))
    assert first.codes == again.codes
    assert first.pcm.tobytes() == again.pcm.tobytes()
    assert first.codes[0] != other.codes[0]


def test_the_largest_seeds_are_seeds_like_others(program: Qwen3TtsProgram, say: Say) -> None:
    for seed in (2**32, 2**63 - 1):
        assert alone(program, say(seed=seed, max_new_tokens=2)).finish == "length"


def test_temperature_zero_hears_no_seed(program: Qwen3TtsProgram, say: Say) -> None:
    greedy = {"temperature": 0.0, "subtalker_temperature": 0.0, "max_new_tokens": 3}
    assert alone(program, say(seed=1, **greedy)).codes == alone(program, say(seed=2, **greedy)).codes


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p", "repetition_penalty"])
def test_every_setting_of_a_request_is_heard(program: Qwen3TtsProgram, say: Say, key: str) -> None:
    value = {"temperature": 2.0, "top_k": 1, "top_p": 0.01, "repetition_penalty": 2.0}[key]
    own = alone(program, say(seed=3, max_new_tokens=8))
    assert alone(program, say(seed=3, max_new_tokens=8, **{key: value})).codes != own.codes


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p"])
def test_the_code_predictor_has_settings_of_its_own(program: Qwen3TtsProgram, say: Say, key: str) -> None:
    value = {"temperature": 0.0, "top_k": 1, "top_p": 0.01}[key]
    (own,), (other,) = (
        alone(program, say(seed=3, max_new_tokens=2, **extra)).codes[:1] for extra in ({}, {f"subtalker_{key}": value})
    )
    assert own[0] == other[0]
    assert own[1:] != other[1:]


def test_time_is_counted_by_part(program: Qwen3TtsProgram, say: Say) -> None:
    before = dict(program.part_seconds)
    alone(program, say(max_new_tokens=2))
    assert all(program.part_seconds[part] > before[part] for part in before)


def test_a_step_of_no_slots_does_nothing(program: Qwen3TtsProgram) -> None:
    assert list(program.step([])) == []


# --- Endings that are not the model's ---


def test_speech_that_goes_round_in_circles_is_faded_out(
    program: Qwen3TtsProgram, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = np.tile(np.arange(16) * 100 + 7, (LOOP_FRAMES + 10, 1))
    monkeypatch.setattr(program, "sampler", Forced(program.sampler, codes))
    heard = alone(program, say())
    assert heard.finish == "repetition"
    assert len(heard.pieces) == LOOP_FRAMES + 1  # the first repeats nothing
    last, before = heard.pieces[-1], heard.pieces[-2]
    assert last[-1] == 0
    assert np.abs(last[-200:].astype(int)).max() * 4 < np.abs(before[-200:].astype(int)).max()
    assert np.abs(last[:200].astype(int)).max() * 2 > np.abs(before[:200].astype(int)).max()


def test_silence_without_end_is_ended(program: Qwen3TtsProgram, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 2048, (200, 16))
    monkeypatch.setattr(program, "sampler", Forced(program.sampler, codes))
    monkeypatch.setattr("pega_omni_plugin.models.qwen3_tts.ending.SILENCE_PEAK", 32768)
    monkeypatch.setattr("pega_omni_plugin.models.qwen3_tts.ending.SILENCE_FRAMES", 10)
    heard = alone(program, say())
    assert heard.finish == "silence"
    assert len(heard.pieces) == 10
    assert heard.pieces[-1][-1] == 0


# --- Slots and company ---


def test_a_slot_is_as_fresh_after_any_request(program: Qwen3TtsProgram, say: Say) -> None:
    one = say(seed=9, max_new_tokens=6)
    fresh = alone(program, one)
    alone(program, say(text="Something else, and longer than that.", seed=4, max_new_tokens=30))
    assert alone(program, one).pcm.tobytes() == fresh.pcm.tobytes()
    # One that was aborted in the middle.
    run(program, say(text="Never heard to the end.", seed=6), steps=3)
    program.release(1)
    after = alone(program, one)
    assert after.codes == fresh.codes
    assert after.pcm.tobytes() == fresh.pcm.tobytes()


def test_a_slot_after_a_cloned_voice_has_nothing_of_it(load: Load, front_of: FrontOf) -> None:
    """Neither its text beside the frames nor its recording's sound."""
    program, prompt = load("base", 2), clone_prompt(front_of("base"))
    plain = Prompt(prompt.units, {key: value for key, value in prompt.data.items() if key != "reference"})
    plain = Prompt(plain.units, plain.data | {"codec": [max(code, -2) for code in plain.data["codec"]], "trailing": ()})
    speech = Speech(TEXT, "clone", seed=3, extra={"max_new_tokens": 4})
    fresh = speak(program, speech, plain, slot=2)
    assert speak(program, speech, prompt, slot=1).pcm.tobytes() != fresh.pcm.tobytes()
    assert speak(program, speech, plain, slot=1).pcm.tobytes() == fresh.pcm.tobytes()


def clone_prompt(front: Qwen3TtsFront) -> Prompt:
    """The golden recording's voice, without encoding it."""
    from pega_omni_plugin.models.qwen3_tts.prompt import Clone
    from tests.models.qwen3_tts.harness import as_prompt, request_prompt

    arrays = load_arrays("base")
    reference = Clone(arrays["reference/speaker"], arrays["reference/codes"], manifest()["reference_text"])
    return as_prompt(request_prompt(front._builder, {"text": "This is longer than that."}, reference, frames=4))


OTHERS = ("Hi.", "A much longer text than that, so that lengths differ a lot.", "Go on.")


def company(say: Say, one: Coming, slots: int, step: int = 0) -> list[Coming]:
    """``one`` among others in all other slots, of various lengths; they come with it, or so many steps before."""
    others = [
        say(slot, OTHERS[slot % 3], seed=100 + slot, max_new_tokens=4 + slot % 11)
        for slot in range(1, slots + 1)
        if slot != one.slot
    ]
    mine = Coming(one.slot, one.speech, one.prompt, step)
    return sorted([*others, mine], key=lambda coming: coming.slot)


@pytest.mark.parametrize(("slot", "step"), [(1, 0), (3, 0), (4, 0), (2, 3)])
def test_codes_do_not_depend_on_company_and_samples_by_one_step_at_most(
    load: Load, say: Say, slot: int, step: int
) -> None:
    program = load("custom_voice", 4)
    one = say(slot, max_new_tokens=12)
    expected = alone(program, one)
    heard = run(program, *company(say, one, 4, step))
    assert set(heard) == {1, 2, 3, 4}
    assert heard[slot].codes == expected.codes
    assert np.abs(heard[slot].pcm.astype(int) - expected.pcm).max() <= 1


def test_a_cloned_voice_shares_a_step_with_others(load: Load, front_of: FrontOf) -> None:
    """Its text goes on beside its frames, theirs does not."""
    program, front = load("base", 2), front_of("base")
    speech = Speech(TEXT, "clone", seed=3, extra={"max_new_tokens": 4})
    mine = Coming(1, speech, clone_prompt(front))
    other = Coming(2, speech, Prompt(len(mine.prompt.data["text"]), mine.prompt.data | {"trailing": ()}))
    expected = {coming.slot: alone(program, coming) for coming in (mine, other)}
    assert expected[1].codes != expected[2].codes
    heard = run(program, mine, other)
    assert {slot: one.codes for slot, one in heard.items()} == {slot: one.codes for slot, one in expected.items()}


def test_a_recording_is_decoded_once_for_all_who_speak_in_its_voice(
    load: Load, front_of: FrontOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, prompt = load("base", 2), clone_prompt(front_of("base"))
    monkeypatch.setattr(program, "_heard", OrderedDict())
    lengths: list[int] = []
    decode = program.decoder.decode

    def counted(codes: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        lengths.append(codes.shape[1])
        return decode(codes, slots)

    monkeypatch.setattr(program.decoder, "decode", counted)
    speech = Speech("This is longer than that.", "clone", seed=3)
    first = speak(program, speech, prompt, slot=1)
    again = speak(program, speech, prompt, slot=2)
    recording = len(load_arrays("base")["reference/codes"])
    assert [length for length in lengths if length > 1] == [recording]
    assert again.codes == first.codes
    assert np.array_equal(again.pcm, first.pcm)


SLOTS = 16


def test_deterministic_programs_give_the_same_bytes_in_any_company(load: Load, say: Say, one_thread: None) -> None:
    """Alone; first, in the middle and last of sixteen of various lengths; as one that comes later."""
    program = load("custom_voice", SLOTS, deterministic=True)
    expected = alone(program, say(1, max_new_tokens=12))
    assert len(expected.codes) == 12
    places, late = (1, 8, 16), 3
    crowd = [
        say(slot, max_new_tokens=12)
        if slot in places
        else say(slot, OTHERS[slot % 3], seed=100 + slot, max_new_tokens=2 + slot)
        for slot in range(1, SLOTS + 1)
        if slot != late
    ]
    heard = run(program, *crowd, say(late, step=3, max_new_tokens=12))
    few = run(program, say(2, OTHERS[1], seed=1, max_new_tokens=4), say(4, step=2, max_new_tokens=12))
    compared = {f"slot {slot}": heard[slot] for slot in (*places, late)} | {"among few": few[4]}
    for name, one in compared.items():
        assert one.codes == expected.codes, name
        assert np.array_equal(one.pcm, expected.pcm), name


def test_deterministic_programs_draw_from_the_same_states_with_two_threads(
    load: Load, say: Say, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen times the same request in one step: talker and code predictor compute the same bits for every row."""
    torch.set_num_threads(2)
    program = load("custom_voice", SLOTS, deterministic=True)
    logits: list[torch.Tensor] = []
    first, following = program.sampler.first, program.sampler.next

    def seen_first(given: torch.Tensor) -> torch.Tensor:
        logits.append(given)
        return first(given)

    def seen_next(group: int, given: torch.Tensor) -> torch.Tensor:
        logits.append(given)
        return following(group, given)

    monkeypatch.setattr(program.sampler, "first", seen_first)
    monkeypatch.setattr(program.sampler, "next", seen_next)
    run(program, *(say(slot, max_new_tokens=2) for slot in range(1, SLOTS + 1)))
    assert len(logits) == 2 * 16
    for rows in logits:
        assert torch.equal(rows, rows[:1].expand_as(rows))


# --- Loading ---


def test_every_variant_speaks_its_own_sample(load: Load, front_of: FrontOf) -> None:
    for case in ("custom_voice", "custom_voice_narrow", "voice_design", "base", "base_narrow"):
        speech, prompt = front_of(case).sample()
        heard = speak(load(case), speech, prompt)
        assert heard.finish in ("stop", "length")
        assert 1 <= len(heard.pieces) <= 4
        assert heard.pcm.any()


def test_bfloat16_speaks_too(checkpoint_of: Callable[[str], Path], say: Say) -> None:
    parts = dict.fromkeys(PARTS, PartConfig("cpu", "bfloat16"))
    program = Qwen3TtsProgram.load(checkpoint_of("custom_voice"), Qwen3TtsOptions(positions=256), parts, 2)
    heard = alone(program, say(max_new_tokens=3))
    assert heard.finish == "length"
    assert len(heard.pcm) == 3 * FRAME
    assert heard.pcm.any()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"thinker": PartConfig("tpu9")}, "parts.thinker.device: 'tpu9' is no device"),
        ({"decoder": PartConfig("meta")}, "parts.decoder.device: expected cpu or cuda, got 'meta'"),
        ({"codec": PartConfig("cuda:99")}, "parts.codec.device: 'cuda:99', but [0-9]+ GPUs are found"),
        (
            {"thinker": PartConfig("cpu", "float32"), "codec": PartConfig("cpu", "bfloat16")},
            "parts.codec: thinker and codec share their tables",
        ),
    ],
)
def test_parts_that_cannot_run_where_they_are_put_are_refused(
    checkpoint_of: Callable[[str], Path], parts: dict[Part, PartConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3TtsProgram.load(checkpoint_of("custom_voice"), Qwen3TtsOptions(), parts, 1)


def test_the_first_gpu_is_the_same_under_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    placed = {program_module._place("thinker", PartConfig(name)) for name in ("auto", "cuda", "cuda:0")}
    assert placed == {(torch.device("cuda", 0), torch.bfloat16)}


def test_pcm_is_the_decoders_sample_rounded(
    program: Qwen3TtsProgram, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full scale stays within 16 bits, at both ends."""
    samples = torch.linspace(-1, 1, FRAME)[None]
    monkeypatch.setattr(program.decoder, "decode", lambda codes, slots: samples)
    pcm: Pcm = alone(program, say(max_new_tokens=2)).pieces[0]
    assert (pcm[0], pcm[-1]) == (-32767, 32767)
    assert np.abs(pcm - np.linspace(-32767, 32767, FRAME)).max() <= 0.51
