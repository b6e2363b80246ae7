"""From a checked request to the talker's prompt: two tracks, text and codes, position by position.

The layouts are those of the official package (qwen-tts 0.1.1, ``Qwen3TTSForConditionalGeneration.generate``). A prompt
is plain data, so that it is made where requests arrive and travels to where the weights are.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig
from pega_omni_plugin.nn.checkpoint import CheckpointError

NO_CODE = -1
"""On the code track: nothing is added to the text here."""
SPEAKER = -2
"""On the code track: the speaker's embedding is added."""
REFERENCE = -3
"""On the code track: the next frame of the reference recording is added, all its codebooks."""

ISO_LANGUAGES = {
    "zh": "chinese",
    "en": "english",
    "de": "german",
    "it": "italian",
    "pt": "portuguese",
    "es": "spanish",
    "ja": "japanese",
    "ko": "korean",
    "fr": "french",
    "ru": "russian",
}
"""ISO 639-1 codes of the languages that the published checkpoints name."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer cuts text before it merges bytes; a fact of its vocabulary, which no file of it states."""


class TextTokenizer:
    """Qwen2's byte-level BPE without its control tokens: whatever a text says, it comes out as text."""

    def __init__(self, folder: Path) -> None:
        # Here, so that a machine without it can run and measure the model.
        from tokenizers import (  # type: ignore[import-untyped]
            Regex,
            Tokenizer,
            models,
            normalizers,
            pre_tokenizers,
        )

        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        for path in (vocabulary, merges):
            if not path.is_file():
                raise CheckpointError(f"{path}: missing; the checkpoint is incomplete, download it again")
        self._tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
        self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """What the talker is given before the first frame, and beside each frame.

    ``text`` and ``codec`` are as long as each other; ``codec`` holds codes of group 0, ``NO_CODE``, ``SPEAKER`` or
    ``REFERENCE``. ``trailing`` are text ids that are added one a frame, from the second frame's input on; after them,
    and without them, the padding text is. ``frames`` bounds the speech. ``speaker`` is ``[hidden]``, ``reference`` the
    codes of the reference recording, ``[frames, groups]``.
    """

    text: list[int]
    codec: list[int]
    frames: int
    trailing: tuple[int, ...] = ()
    speaker: npt.NDArray[np.float32] | None = None
    reference: npt.NDArray[np.int16] | None = None

    def __len__(self) -> int:
        return len(self.text)

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        arrays = {"speaker": self.speaker, "reference": self.reference}
        return {
            "text": self.text,
            "codec": self.codec,
            "frames": self.frames,
            "trailing": self.trailing,
            **{name: _packed(array) for name, array in arrays.items() if array is not None},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """What ``document`` gave."""
        kinds = {"speaker": np.float32, "reference": np.int16}
        arrays = {name: _unpacked(document[name], kind) for name, kind in kinds.items() if name in document}
        return cls(document["text"], document["codec"], document["frames"], tuple(document["trailing"]), **arrays)


@dataclass(frozen=True, slots=True)
class Clone:
    """A voice to imitate: its embedding ``[hidden]`` and its recording's codes ``[frames, groups]``.

    With ``transcript``, what the recording says, both become part of the prompt; without it, only the embedding does.
    """

    embedding: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int16]
    transcript: str | None = None


class PromptBuilder:
    """Makes prompts for one checkpoint."""

    def __init__(self, config: Qwen3TtsConfig, tokenizer: TextTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        (self._newline,) = tokenizer.encode("\n")

    def text_ids(self, text: str) -> list[int]:
        """``<|im_start|>assistant\\n{text}<|im_end|>\\n<|im_start|>assistant\\n``.

        The line break after ``assistant`` is tokenized together with the text: a text that begins with line breaks
        merges with it.
        """
        config = self._config
        tail = [config.im_end, self._newline, config.im_start, config.assistant, self._newline]
        return [config.im_start, *self._tokenizer.encode(f"assistant\n{text}"), *tail]

    def instruction_ids(self, text: str) -> list[int]:
        """``<|im_start|>user\\n{text}<|im_end|>\\n``."""
        ids = self._tokenizer.encode(f"user\n{text}")
        return [self._config.im_start, *ids, self._config.im_end, self._newline]

    def reference_ids(self, transcript: str) -> list[int]:
        """``<|im_start|>assistant\\n{transcript}<|im_end|>\\n``."""
        ids = self._tokenizer.encode(f"assistant\n{transcript}")
        return [self._config.im_start, *ids, self._config.im_end, self._newline]

    def build(
        self,
        text: str,
        *,
        frames: int,
        language: str | None = None,
        speaker: str | None = None,
        instruction: str | None = None,
        clone: Clone | None = None,
        whole_text: bool = True,
    ) -> TalkerPrompt:
        """Lay a prompt out.

        ``language`` and ``speaker`` are keys of the checkpoint's tables. ``whole_text`` puts all of the text before the
        first frame; without it, text is fed beside the frames, as the official package does for cloned voices.
        """
        config, talker = self._config, self._config.talker
        ids = self.text_ids(text)
        role, words = ids[:3], ids[3:-5]
        if speaker is not None and language in (None, "chinese"):
            language = talker.dialects.get(speaker, language)
        if language is None:
            tags = [talker.nothink, talker.think_bos, talker.think_eos]
        else:
            tags = [talker.think, talker.think_bos, talker.languages[language], talker.think_eos]
        if clone is not None:
            tags.append(SPEAKER)
        elif speaker is not None:
            tags.append(talker.speakers[speaker])

        tracks = _Tracks()
        if instruction:
            tracks.add(self.instruction_ids(instruction), NO_CODE)
        tracks.add(role, NO_CODE)
        tracks.add(config.tts_pad, tags)
        tracks.add(config.tts_bos, [talker.pad])
        codes, reference = [talker.bos], None
        if clone is not None and clone.transcript is not None:
            reference = clone.codes
            words = self.reference_ids(clone.transcript)[3:-2] + words
            codes += [REFERENCE] * len(clone.codes)
        spoken = [*words, config.tts_eos]
        trailing: list[int] = []
        if whole_text:
            tracks.add(spoken, talker.pad)
            tracks.add(config.tts_pad, codes)
        else:
            # Text and codes side by side; what text is left follows the frames.
            beside = spoken[: len(codes)]
            tracks.add(beside + [config.tts_pad] * (len(codes) - len(beside)), codes)
            trailing = spoken[len(codes) :]
        return TalkerPrompt(
            text=tracks.text,
            codec=tracks.codec,
            frames=frames,
            trailing=tuple(trailing),
            speaker=None if clone is None else clone.embedding,
            reference=reference,
        )


class _Tracks:
    """Both tracks as they grow; one side of ``add`` may be a single value for all the positions of the other."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.codec: list[int] = []

    def add(self, text: list[int] | int, codec: list[int] | int) -> None:
        if isinstance(text, int):
            text = [text] * (len(codec) if isinstance(codec, list) else 1)
        self.text += text
        self.codec += codec if isinstance(codec, list) else [codec] * len(text)


def _packed(array: npt.NDArray[Any]) -> dict[str, Any]:
    return {"shape": array.shape, "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}


def _unpacked(document: Mapping[str, Any], kind: type) -> npt.NDArray[Any]:
    return np.frombuffer(bytearray(base64.b64decode(document["data"])), dtype=kind).reshape(document["shape"])
