"""What the official package makes of the tiny checkpoints, and what the program makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pega_omni_plugin.engine.program import Speech
from pega_omni_plugin.models.qwen3_tts import sampler
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from pega_omni_plugin.models.qwen3_tts.prompt import Clone, PromptBuilder, TalkerPrompt, TextTokenizer
from pega_omni_plugin.models.qwen3_tts.sampler import CpuSampler
from tests.goldens import COLUMN_STRIDE, PCM_STRIDE, manifest
from tests.goldens import load as load_arrays
from tests.models.qwen3_tts.harness import GREEDY, Forced, Heard, Numbers, Wrapped, as_prompt, request_prompt, speak

MANIFEST = manifest()
CASES: Mapping[str, Any] = MANIFEST["cases"]
ALLOWED = 2048
"""Codes that may be drawn; logits have the end of speech after them."""
DRAWS = (
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "subtalker_temperature",
    "subtalker_top_k",
    "subtalker_top_p",
)


def recorded(*kinds: str) -> list[Any]:
    """Case and request of everything recorded as one of ``kinds``."""
    return [
        pytest.param(case, name, id=f"{case}-{name}")
        for case, described in CASES.items()
        for name, request in described["requests"].items()
        if request["record"] in kinds
    ]


@dataclass(frozen=True)
class Golden:
    """A recorded request beside the program that is to do the same."""

    name: str
    request: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]  # of the case
    program: Qwen3TtsProgram
    folder: Path

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[f"{self.name}/{key}"]

    def __contains__(self, key: str) -> bool:
        return f"{self.name}/{key}" in self.arrays

    @cached_property
    def builder(self) -> PromptBuilder:
        return PromptBuilder(self.program.config, TextTokenizer(self.folder))

    @property
    def least(self) -> int:
        """Frames before the end of speech was let through."""
        return int(self.request.get("min_frames", 2))

    def prompt(self, frames: int = 1) -> TalkerPrompt:
        reference = None
        if "reference/codes" in self.arrays:
            codes, speaker = self.arrays["reference/codes"], self.arrays["reference/speaker"]
            reference = Clone(speaker, codes, MANIFEST["reference_text"])
        request = dict(self.request)
        if not self.program.info.instructions:
            # Requests to these models have none; the package takes them and drops them.
            request.pop("instruct", None)
        return request_prompt(self.builder, request, reference, frames)

    def serve(self, frames: int) -> Heard:
        """Through the program, for so many frames at most."""
        drawn = {key: self.request[key] for key in DRAWS if key in self.request}
        extra = drawn if self.request["record"] == "sampled" else GREEDY
        speech = Speech(self.request["text"], "any", seed=0, extra=extra)
        return speak(self.program, speech, as_prompt(self.prompt(frames)))


GoldenOf = Callable[[str, str], Golden]


@pytest.fixture(scope="module")
def golden(load: Callable[[str], Qwen3TtsProgram], checkpoint_of: Callable[[str], Path]) -> GoldenOf:
    arrays = {case: load_arrays(case) for case in CASES}

    def find(case: str, name: str) -> Golden:
        return Golden(name, CASES[case]["requests"][name], arrays[case], load(case), checkpoint_of(case))

    return find


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[Golden], None]:
    """Holds the end of speech back for as long as the recording did."""
    return lambda one: monkeypatch.setattr(sampler, "MIN_FRAMES", one.least)


class RecordedNumbers(Wrapped):
    """Draws with the numbers of a recording."""

    def __init__(self, inner: CpuSampler, numbers: np.ndarray) -> None:
        super().__init__(inner)
        self._numbers = numbers

    def admit(self, slot: int, *rest: Any) -> None:
        super().admit(slot, *rest)
        self.inner._settings._uniforms[slot] = Numbers(self._numbers)  # type: ignore[call-overload]


@pytest.fixture
def draw_as_recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Golden], None]:
    return lambda one: monkeypatch.setattr(
        one.program, "sampler", RecordedNumbers(one.program.sampler, one["uniforms"])
    )


# --- Prompts ---


@pytest.mark.parametrize(("case", "name"), recorded("ids", "prompt", "greedy", "sampled"))
def test_token_ids_are_those_of_the_official_package(golden: GoldenOf, case: str, name: str) -> None:
    one = golden(case, name)
    assert one.builder.text_ids(one.request["text"]) == one["input_ids"].tolist()
    if "instruct_ids" in one:
        assert one.builder.instruction_ids(one.request["instruct"]) == one["instruct_ids"].tolist()
    if "ref_ids" in one:
        assert one.builder.reference_ids(MANIFEST["reference_text"]) == one["ref_ids"].tolist()


def test_every_kind_of_text_was_compared(golden: GoldenOf) -> None:
    found = [golden(*parameters.values) for parameters in recorded("prompt", "greedy")]
    assert all(any(key in one for one in found) for key in ("instruct_ids", "ref_ids"))
    assert any(len(one["trailing"]) > 1 for one in found)


@pytest.mark.parametrize(("case", "name"), recorded("prompt", "greedy"))
def test_prompts_and_the_text_beside_the_frames_are_those_of_the_official_package(
    golden: GoldenOf, case: str, name: str
) -> None:
    one = golden(case, name)
    prompt, talker = one.prompt(), one.program.talker
    with torch.inference_mode():
        embedded = talker.embed_prompt(prompt).numpy()
        # The package adds the padding itself where we have no text left; a last entry may say so.
        beside = talker.embed_text(torch.tensor([*prompt.trailing, one.program.config.tts_pad])).numpy()
    np.testing.assert_allclose(embedded, one["prompt"], rtol=0, atol=1e-5)
    trailing = one["trailing"]
    assert len(trailing) in (len(beside) - 1, len(beside))
    np.testing.assert_allclose(beside[: len(trailing)], trailing, rtol=0, atol=1e-5)
    np.testing.assert_allclose(beside[-1], one.arrays["tts_pad"], rtol=0, atol=1e-5)


# --- Talker and code predictor, made to say what was recorded ---


@dataclass(frozen=True)
class Followed:
    """What the program computed while it was made to say the recorded codes."""

    heard: Heard
    sampler: Forced
    hidden: np.ndarray  # [frames + 1, hidden]
    states: np.ndarray  # [frames + 1, groups - 1, predictor's hidden]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Golden], Followed]:
    """One step more than there are codes, for the hidden state after them."""

    def forced(one: Golden) -> Followed:
        program, codes = one.program, one["codes"]
        forced = Forced(program.sampler, codes)
        hidden: list[torch.Tensor] = []
        states: list[np.ndarray] = []
        logits, forward = program.talker.logits, program.predictor.stack.forward

        def seen_logits(state: torch.Tensor) -> torch.Tensor:
            hidden.append(state[0].clone())
            return logits(state)

        def seen_forward(*arguments: Any) -> torch.Tensor:
            state = forward(*arguments)
            states.append(state[-1].numpy().copy())  # of one row; the first pass of a frame has two positions
            return state

        monkeypatch.setattr(program, "sampler", forced)
        monkeypatch.setattr(program.talker, "logits", seen_logits)
        monkeypatch.setattr(program.predictor.stack, "forward", seen_forward)
        heard = one.serve(len(codes) + 1)
        groups = program.config.talker.groups
        return Followed(
            heard, forced, torch.stack(hidden).numpy(), np.stack(states).reshape(len(hidden), groups - 1, -1)
        )

    return forced


@pytest.mark.parametrize(("case", "name"), recorded("greedy"))
def test_hidden_states_and_logits_are_those_of_the_official_package(
    golden: GoldenOf, follow: Callable[[Golden], Followed], case: str, name: str
) -> None:
    one = golden(case, name)
    followed = follow(one)
    frames = len(one["codes"])
    assert followed.hidden.shape == one["hidden"].shape == (frames + 1, one.program.config.talker.stack.hidden)
    np.testing.assert_allclose(followed.hidden, one["hidden"], rtol=1e-4, atol=1e-5)
    logits = np.stack(followed.sampler.first_logits)
    columns = [*range(0, ALLOWED, COLUMN_STRIDE), -1]
    kept = one["logits"][:, [*range(len(columns) - 1), -1]]  # without those of codes that may not be drawn
    assert logits.shape == (frames + 1, ALLOWED + 1)
    np.testing.assert_allclose(logits[:, columns], kept, rtol=0, atol=1e-4)
    # All codes, through the recorded states and the checkpoint's own head.
    head = load_file(one.folder / "model.safetensors")["talker.codec_head.weight"].float().numpy()
    whole = one["hidden"] @ head.T
    np.testing.assert_allclose(logits[:, :ALLOWED], whole[:, :ALLOWED], rtol=0, atol=1e-4)
    lse = torch.from_numpy(whole).logsumexp(1).numpy()
    np.testing.assert_allclose(lse, one["logits_lse"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("case", "name"), recorded("greedy"))
def test_the_code_predictor_is_that_of_the_official_package(
    golden: GoldenOf, follow: Callable[[Golden], Followed], case: str, name: str
) -> None:
    one = golden(case, name)
    followed = follow(one)
    frames, groups = one["codes"].shape
    logits = torch.from_numpy(np.stack(followed.sampler.next_logits)).reshape(-1, groups - 1, ALLOWED)[:frames]
    lse = logits.logsumexp(2).numpy()
    np.testing.assert_allclose(lse, one["predictor_lse"], rtol=0, atol=1e-4)
    states, columns = one["predictor_hidden"], one["predictor_logits"]
    np.testing.assert_allclose(followed.states[: len(states)], states, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits[: len(columns), :, ::COLUMN_STRIDE], columns, rtol=0, atol=1e-4)
    assert np.array_equal(logits.argmax(2).numpy(), one["codes"][:, 1:])  # which were the likeliest


# --- The program by itself ---


def assert_speech_is_as_recorded(one: Golden) -> None:
    """Codes equal, samples within two steps of 16 bits, and the same code, or end, after the last frame."""
    codes, after = one["codes"], int(one["first_codes"][-1])
    eos = one.program.config.talker.eos
    heard = one.serve(len(codes) + 1)
    assert [frame for frame in heard.codes[: len(codes)]] == codes.tolist()
    assert heard.codes[len(codes)][0] == (ALLOWED if after == eos else after)
    assert heard.finish == ("stop" if after == eos else "length")
    frame = one.program.info.frame_samples
    pcm = np.concatenate(heard.pieces[: len(codes)])
    assert len(pcm) == len(codes) * frame
    if "pcm" in one:
        wanted = np.round(one["pcm"] * 32767)
        assert np.abs(pcm[::PCM_STRIDE] - wanted).max() <= 2
        assert len(pcm[::PCM_STRIDE]) == len(wanted)


@pytest.mark.parametrize(("case", "name"), recorded("greedy", "far"))
def test_greedy_speech_is_that_of_the_official_package(
    golden: GoldenOf, held_back: Callable[[Golden], None], case: str, name: str
) -> None:
    one = golden(case, name)
    held_back(one)
    assert_speech_is_as_recorded(one)


@pytest.mark.parametrize(("case", "name"), recorded("sampled"))
def test_sampled_codes_are_those_of_the_official_package_for_the_same_random_numbers(
    golden: GoldenOf,
    held_back: Callable[[Golden], None],
    draw_as_recorded: Callable[[Golden], None],
    case: str,
    name: str,
) -> None:
    one = golden(case, name)
    held_back(one)
    draw_as_recorded(one)
    assert_speech_is_as_recorded(one)


def test_a_recorded_end_of_speech_was_met(golden: GoldenOf) -> None:
    found = [golden(*parameters.values) for parameters in recorded("greedy", "sampled")]
    assert any(one["first_codes"][-1] == one.program.config.talker.eos for one in found)
