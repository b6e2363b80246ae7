"""The half of the program where requests arrive: checks that need the checkpoint, and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pega_omni_plugin.engine.program import Prompt, Recording, RequestError, Speech
from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, read_config
from pega_omni_plugin.models.qwen3_tts.ending import frame_limit, frames_needed
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.prompt import ISO_LANGUAGES, Clone, PromptBuilder, TextTokenizer

if TYPE_CHECKING:
    from pega_omni_plugin.models.qwen3_tts.reference import ReferenceEncoder


_SAMPLED_BYTES = 4 << 20


class Qwen3TtsFront:
    """``Front`` of a Qwen3-TTS checkpoint."""

    def __init__(self, checkpoint: Path, options: Qwen3TtsOptions, voice: str) -> None:
        self._config = read_config(checkpoint)
        self._options = options
        self._voice = voice
        self._builder = PromptBuilder(self._config, TextTokenizer(checkpoint))
        self._encoder: ReferenceEncoder | None = None
        self.key = ""
        if self._config.variant == "base":
            from pega_omni_plugin.models.qwen3_tts.reference import ReferenceEncoder

            self._encoder = ReferenceEncoder.load(checkpoint, self._config.talker.groups)
            self.key = _fingerprint(checkpoint)

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
        if recording is not None:
            transcript = None if extra.get("x_vector_only_mode") else recording.transcript
            clone = Clone(recording.encoding["embedding"], recording.encoding["codes"], transcript)
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
        needed = frames_needed(speech.input)
        if room < needed:
            raise RequestError(
                "input",
                f"input of {len(speech.input.encode())} bytes takes about {needed} frames to speak, and a prompt of "
                f"{len(prompt)} tokens leaves {max(room, 0)} of the {self._options.positions} that a request may "
                "have; send the text in pieces",
            )
        wanted = extra.get("max_new_tokens", config.generation.max_frames)
        frames = min(frame_limit(speech.input), room, wanted, config.generation.max_frames)
        return Prompt(len(prompt), prompt.document() | {"frames": frames})

    def encode(self, pcm: npt.NDArray[np.float32]) -> Mapping[str, npt.NDArray[Any]]:
        """``embedding`` ``[hidden]`` of the voice and ``codes`` ``[frames, groups]`` of the recording."""
        if self._encoder is None:
            raise ValueError("only base checkpoints imitate recordings")
        reference = self._encoder.encode(pcm)
        return {"embedding": reference.embedding, "codes": reference.codes}

    def sample(self) -> tuple[Speech, Prompt]:
        """A word, at most four frames of it; a hum is imitated where there is something to imitate."""
        recording = None
        if self._config.variant == "base":
            seconds = np.arange(self._config.codec.sample_rate, dtype=np.float32) / self._config.codec.sample_rate
            recording = Recording(self.encode(np.sin(2 * np.pi * 220 * seconds) * np.float32(0.1)))
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


def _fingerprint(checkpoint: Path) -> str:
    """Of the files that decide what is made of a recording: weights by name, size and their first and last megabytes,
    which no two trainings share; the configuration itself."""
    digest = sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")) + sorted(checkpoint.rglob("config.json")):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(checkpoint)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()[:32]
