"""The half of the program where requests arrive: checks that need the checkpoint, and prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pega_omni_plugin.engine.program import Prompt, Recording, RequestError, Speech
from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, read_config
from pega_omni_plugin.models.qwen3_tts.ending import frame_limit, frames_needed
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.prompt import ISO_LANGUAGES, Clone, PromptBuilder, TextTokenizer

if TYPE_CHECKING:
    from pega_omni_plugin.models.qwen3_tts.reference import Reference, ReferenceEncoder

_REFERENCES_KEPT = 64
"""Encoded recordings kept: a few kilobytes each."""


class Qwen3TtsFront:
    """``Front`` of a Qwen3-TTS checkpoint."""

    def __init__(self, checkpoint: Path, options: Qwen3TtsOptions, voice: str) -> None:
        self._config = read_config(checkpoint)
        self._options = options
        self._voice = voice
        self._builder = PromptBuilder(self._config, TextTokenizer(checkpoint))
        self._references: _References | None = None
        if self._config.variant == "base":
            from pega_omni_plugin.models.qwen3_tts.reference import ReferenceEncoder

            self._references = _References(ReferenceEncoder.load(checkpoint, self._config.talker.groups))

    def prepare(self, speech: Speech, recording: Recording | None = None) -> Prompt:
        """Lay the talker's prompt out.

        Raises ``RequestError``: an unknown language, nothing to imitate, or a text that a slot cannot hold.
        """
        config, extra = self._config, speech.extra
        if config.variant == "voice_design" and not speech.instructions:
            raise RequestError("instructions", "this model makes the voice that instructions describe; send them")
        if config.variant == "base" and recording is None:
            raise RequestError(
                "ref_audio", "this model imitates voices; send ref_audio, or a voice made with POST /v1/audio/voices"
            )
        clone = None
        if recording is not None and self._references is not None:
            transcript = None if extra.get("x_vector_only_mode") else recording.transcript
            reference = self._references.get(recording)
            clone = Clone(reference.embedding, reference.codes, transcript)
        prompt = self._builder.build(
            speech.input,
            frames=0,
            language=language(config, extra.get("language")),
            speaker=speech.voice if config.variant == "custom_voice" else None,
            instruction=speech.instructions,
            clone=clone,
            whole_text=clone is None or bool(extra.get("non_streaming_mode", False)),
        )
        room = self._options.positions - len(prompt)
        if room < frames_needed(speech.input):
            raise RequestError(
                "input",
                f"the prompt has {len(prompt)} tokens, which leaves {max(room, 0)} frames of a request's "
                f"{self._options.positions} for speech: too few; send the text in pieces",
            )
        wanted = extra.get("max_new_tokens", config.generation.max_frames)
        frames = min(frame_limit(speech.input), room, wanted, config.generation.max_frames)
        return Prompt(len(prompt), prompt.document() | {"frames": frames})

    def sample(self) -> tuple[Speech, Prompt]:
        """A word, at most four frames of it; a hum is imitated where there is something to imitate."""
        recording = None
        if self._config.variant == "base":
            seconds = np.arange(self._config.codec.sample_rate, dtype=np.float32) / self._config.codec.sample_rate
            recording = Recording(np.sin(2 * np.pi * 220 * seconds) * np.float32(0.1), digest="sample")
        instructions = "A calm voice." if self._config.variant == "voice_design" else None
        speech = Speech("Hello.", self._voice, 0, instructions, extra={"max_new_tokens": 4})
        return speech, self.prepare(speech, recording)


def language(config: Qwen3TtsConfig, asked: str | None) -> str | None:
    """A key of the checkpoint's languages for a name or an ISO 639-1 code, with or without a region; ``None`` for
    ``auto``.

    Raises ``RequestError``: unknown.
    """
    if asked is None or asked.lower() in ("auto", ""):
        return None
    known = config.talker.languages
    name = asked.strip().lower()
    for candidate in (name, name.replace("-", "_"), ISO_LANGUAGES.get(name.replace("_", "-").split("-")[0], "")):
        if candidate in known:
            return candidate
    codes = [code for code, full in ISO_LANGUAGES.items() if full in known]
    raise RequestError(
        "language", f"language {asked[:40]!r} is not one of auto, {', '.join(sorted(known))}; or {', '.join(codes)}"
    )


class _References:
    """Encoded recordings by their digest; each is encoded once, even if several requests bring it at the same time."""

    def __init__(self, encoder: ReferenceEncoder) -> None:
        self._encoder = encoder
        self._kept: OrderedDict[str, Reference] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()

    def get(self, recording: Recording) -> Reference:
        known = self._look_up(recording.digest)
        if known is not None:
            return known
        with self._encoding:
            known = self._look_up(recording.digest)  # somebody else's may have been the same
            if known is None:
                known = self._encoder.encode(recording.pcm)
                self._keep(recording.digest, known)
        return known

    def _look_up(self, digest: str) -> Reference | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def _keep(self, digest: str, reference: Reference) -> None:
        with self._lock:
            self._kept[digest] = reference
            if len(self._kept) > _REFERENCES_KEPT:
                self._kept.popitem(last=False)
