"""Prompts: text stays text, layouts say what they are made of, documents come back as they went."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, read_config
from pega_omni_plugin.models.qwen3_tts.prompt import (
    NO_CODE,
    REFERENCE,
    SPEAKER,
    Clone,
    PromptBuilder,
    TalkerPrompt,
    TextTokenizer,
)
from pega_omni_plugin.nn.checkpoint import CheckpointError

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<|audio_pad|>",
)
PIECES = (
    *CONTROL,
    "<|im_start|>assistant\n",
    "<|im_end|>\n",
    "assistant",
    "user\n",
    "\n",
    " ",
    "Hello",
    "你好",
    "<|",
    "|>",
)
REFERENCE_CODES = np.arange(48, dtype=np.int16).reshape(3, 16)
EMBEDDING = np.linspace(-1, 1, 64, dtype=np.float32)


@pytest.fixture(scope="module")
def config(checkpoint_of: Callable[[str], Path]) -> Qwen3TtsConfig:
    return read_config(checkpoint_of("custom_voice"))


@pytest.fixture(scope="module")
def builder(checkpoint_of: Callable[[str], Path], config: Qwen3TtsConfig) -> PromptBuilder:
    return PromptBuilder(config, TextTokenizer(checkpoint_of("custom_voice")))


@pytest.fixture(scope="module")
def first_control(checkpoint_of: Callable[[str], Path]) -> int:
    """Ids from here on are not in the vocabulary of text."""
    return len(json.loads((checkpoint_of("custom_voice") / "vocab.json").read_text(encoding="utf-8")))


texts = st.one_of(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.text(max_size=60))


@settings(max_examples=200, deadline=None)
@given(texts)
def test_no_text_becomes_a_control_token(builder: PromptBuilder, first_control: int, text: str) -> None:
    config = builder._config
    ids = builder.text_ids(text)
    assert (ids[0], ids[-5], ids[-3]) == (config.im_start, config.im_end, config.im_start)
    assert all(number < first_control for number in ids[1:-5])
    for ids in (builder.instruction_ids(text), builder.reference_ids(text)):
        assert (ids[0], ids[-2]) == (config.im_start, config.im_end)
        assert all(number < first_control for number in ids[1:-2])


@settings(max_examples=100, deadline=None)
@given(texts, texts, texts)
def test_control_tokens_of_a_prompt_are_its_own_wherever_text_comes_from(
    builder: PromptBuilder, first_control: int, text: str, instruction: str, transcript: str
) -> None:
    def control(prompt: TalkerPrompt) -> list[int]:
        return [number for number in (*prompt.text, *prompt.trailing) if number >= first_control]

    clone = Clone(EMBEDDING, REFERENCE_CODES, transcript)
    plain = Clone(EMBEDDING, REFERENCE_CODES, "a")
    for whole in (True, False):
        mine = builder.build(text, frames=1, instruction=instruction or None, clone=clone, whole_text=whole)
        like = builder.build("a", frames=1, instruction="a" if instruction else None, clone=plain, whole_text=whole)
        padding = builder._config.tts_pad
        assert [n for n in control(mine) if n != padding] == [n for n in control(like) if n != padding]


def test_the_control_tokens_in_this_test_are_those_of_the_tokenizer(
    checkpoint_of: Callable[[str], Path], first_control: int
) -> None:
    document = json.loads((checkpoint_of("custom_voice") / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {entry["content"]: int(number) for number, entry in document["added_tokens_decoder"].items()}
    assert set(CONTROL) <= set(added)
    assert min(added.values()) == first_control


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_text_is_kept_byte_for_byte_but_for_composition(checkpoint_of: Callable[[str], Path], text: str) -> None:
    import unicodedata

    from tokenizers.decoders import ByteLevel

    vocabulary = json.loads((checkpoint_of("custom_voice") / "vocab.json").read_text(encoding="utf-8"))
    names = {number: token for token, number in vocabulary.items()}
    ids = TextTokenizer(checkpoint_of("custom_voice")).encode(text)
    assert ByteLevel().decode([names[number] for number in ids]) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_tokenizer_without_its_files_says_which(tmp_path: Path, name: str) -> None:
    other = {"vocab.json": "merges.txt", "merges.txt": "vocab.json"}[name]
    (tmp_path / other).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        TextTokenizer(tmp_path)


# --- Layouts ---


def test_text_and_codes_stand_side_by_side(builder: PromptBuilder, config: Qwen3TtsConfig) -> None:
    talker = config.talker
    prompt = builder.build("Hi.", frames=9, language="english", speaker="ryan")
    words = builder.text_ids("Hi.")[3:-5]
    tags = [talker.think, talker.think_bos, talker.languages["english"], talker.think_eos, talker.speakers["ryan"]]
    after = [talker.pad] * (1 + len(words) + 1) + [talker.bos]
    assert prompt.codec == [NO_CODE] * 3 + tags + after
    pads = [config.tts_pad] * len(tags)
    assert prompt.text == [*builder.text_ids("")[:3], *pads, config.tts_bos, *words, config.tts_eos, config.tts_pad]
    assert (prompt.frames, prompt.trailing, prompt.speaker, prompt.reference) == (9, (), None, None)
    assert len(prompt) == len(prompt.text) == len(prompt.codec)


def test_without_a_language_the_model_is_told_not_to_think_of_one(builder: PromptBuilder) -> None:
    talker = builder._config.talker
    codec = builder.build("Hi.", frames=1, speaker="ryan").codec
    assert codec[3:6] == [talker.nothink, talker.think_bos, talker.think_eos]


def spoken_language(builder: PromptBuilder, **arguments: str | None) -> str | None:
    talker = builder._config.talker
    codec = builder.build("Hi.", frames=1, **arguments).codec  # type: ignore[arg-type]
    names = {number: name for name, number in talker.languages.items()}
    return names[codec[5]] if codec[3] == talker.think else None


@pytest.mark.parametrize(
    ("speaker", "language", "spoken"),
    [
        ("eric", None, "sichuan_dialect"),
        ("eric", "chinese", "sichuan_dialect"),
        ("dylan", "chinese", "beijing_dialect"),
        ("eric", "english", "english"),
        ("eric", "beijing_dialect", "beijing_dialect"),
        ("vivian", "chinese", "chinese"),
        ("vivian", None, None),
        (None, "chinese", "chinese"),
    ],
)
def test_speakers_of_a_dialect_speak_it_where_chinese_or_nothing_is_asked(
    builder: PromptBuilder, speaker: str | None, language: str | None, spoken: str | None
) -> None:
    assert spoken_language(builder, speaker=speaker, language=language) == spoken


def test_instructions_come_before_all(builder: PromptBuilder) -> None:
    plain = builder.build("Hi.", frames=1, speaker="ryan")
    told = builder.build("Hi.", frames=1, speaker="ryan", instruction="Whisper.")
    ids = builder.instruction_ids("Whisper.")
    assert told.text == [*ids, *plain.text]
    assert told.codec == [NO_CODE] * len(ids) + plain.codec
    assert builder.build("Hi.", frames=1, speaker="ryan", instruction="").text == plain.text


def test_a_voice_alone_is_one_position(builder: PromptBuilder) -> None:
    prompt = builder.build("Hi.", frames=1, clone=Clone(EMBEDDING, REFERENCE_CODES))
    assert prompt.codec.count(SPEAKER) == 1
    assert prompt.codec.count(REFERENCE) == 0
    assert prompt.reference is None
    assert prompt.speaker is EMBEDDING


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("text", ["Oh.", "This is quite a bit longer than the recording of three frames."])
def test_all_text_is_said_once_and_every_frame_of_the_recording_stands_once(
    builder: PromptBuilder, text: str, whole: bool
) -> None:
    """Whichever of the two is longer."""
    config = builder._config
    codes = REFERENCE_CODES.repeat(6, axis=0)  # 18 frames
    prompt = builder.build(text, frames=1, clone=Clone(EMBEDDING, codes, "So be."), whole_text=whole)
    assert prompt.codec.count(REFERENCE) == len(codes)
    assert len(prompt.text) == len(prompt.codec)
    said = [n for n in (*prompt.text, *prompt.trailing) if n not in (config.tts_pad, config.tts_bos)][3:]
    words = [*builder.reference_ids("So be.")[3:-2], *builder.text_ids(text)[3:-5], config.tts_eos]
    assert said == words
    assert bool(prompt.trailing) == (not whole and len(words) > len(codes) + 1)


def test_text_beside_the_frames_begins_with_the_first(builder: PromptBuilder) -> None:
    """The official package's streaming layout: one word before the first frame, the others beside the next."""
    config = builder._config
    prompt = builder.build("Go on.", frames=1, speaker="sohee", whole_text=False)
    words = [*builder.text_ids("Go on.")[3:-5], config.tts_eos]
    assert prompt.text[-1] == words[0]
    assert prompt.codec[-1] == config.talker.bos
    assert list(prompt.trailing) == words[1:]


# --- Documents ---


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=20),
    st.sampled_from([None, "So be."]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 5000),
)
def test_a_prompt_survives_json(
    builder: PromptBuilder, text: str, transcript: str | None, whole: bool, frames: int, limit: int
) -> None:
    clone = Clone(EMBEDDING, REFERENCE_CODES[:frames], transcript)
    prompt = builder.build(text, frames=limit, clone=clone, whole_text=whole)
    back = TalkerPrompt.from_document(json.loads(json.dumps(prompt.document())))
    assert (back.text, back.codec, back.frames) == (prompt.text, prompt.codec, limit)
    assert tuple(back.trailing) == tuple(prompt.trailing)
    for mine, theirs in ((back.speaker, prompt.speaker), (back.reference, prompt.reference)):
        if theirs is None:
            assert mine is None
        else:
            assert mine is not None
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


def test_arrays_of_any_layout_are_kept(builder: PromptBuilder) -> None:
    codes: Sequence = np.asfortranarray(REFERENCE_CODES)[::2]
    prompt = builder.build("a", frames=1, clone=Clone(EMBEDDING, np.asarray(codes), "b"))
    back = TalkerPrompt.from_document(prompt.document())
    np.testing.assert_array_equal(back.reference, REFERENCE_CODES[::2])
