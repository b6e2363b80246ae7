"""What a stage file may say about Qwen3-TTS, and what a request may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pega_omni_plugin.engine.program import Option, ProgramInfo, Speech, Voice
from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, Sampling
from pega_omni_plugin.models.qwen3_tts.sampler import DrawSettings

MAX_INPUT_CHARS = 4096
"""OpenAI's limit."""

TASK_TYPES = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}
"""How other servers' requests name a checkpoint's variant."""

ALIASES = {
    "alloy": "serena",
    "ash": "ryan",
    "ballad": "dylan",
    "cedar": "aiden",
    "coral": "vivian",
    "echo": "aiden",
    "fable": "ono_anna",
    "marin": "serena",
    "nova": "vivian",
    "onyx": "uncle_fu",
    "sage": "sohee",
    "shimmer": "ono_anna",
    "verse": "eric",
}
"""OpenAI's voice names, and the speaker of the published CustomVoice checkpoints that stands in for each."""

SPEAKER_LANGUAGES = {
    "serena": "zh",
    "vivian": "zh",
    "uncle_fu": "zh",
    "ryan": "en",
    "aiden": "en",
    "ono_anna": "ja",
    "sohee": "ko",
    "eric": "zh",
    "dylan": "zh",
}
"""Native languages of the published speakers, from the model card; the checkpoint does not say. All speak all
languages."""


@dataclass(frozen=True, slots=True)
class Qwen3TtsOptions:
    """``positions`` is the length of a slot's cache: prompt and frames of one request together. ``deterministic`` runs
    every step with the same number of rows, so that a seed gives the same bytes whatever shares the step. ``aliases``
    replaces the table of OpenAI's voice names. ``reference_urls`` lets requests name their reference recording by URL,
    whose length without silence the other two bound."""

    positions: int = 6144
    deterministic: bool = False
    max_input_chars: int = MAX_INPUT_CHARS
    aliases: Mapping[str, str] | None = None
    reference_urls: bool = False
    min_reference_seconds: float = 1.0
    max_reference_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("positions", 128, 1 << 20),
            ("max_input_chars", 1, 1 << 20),
            ("min_reference_seconds", 0.1, 60.0),
            ("max_reference_seconds", self.min_reference_seconds, 60.0),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {getattr(self, name)}")


def program_info(config: Qwen3TtsConfig, options: Qwen3TtsOptions, model: str) -> ProgramInfo:
    """What a checkpoint offers."""
    voices = _voices(config)
    known = {voice.id for voice in voices}
    table = ALIASES if options.aliases is None else {name.lower(): voice for name, voice in options.aliases.items()}
    if options.aliases is not None and (unknown := set(table.values()) - known):
        raise ValueError(f"aliases: no such voice: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    if config.variant != "custom_voice":
        # Clients that must name one of OpenAI's voices mean nothing by it here.
        table = dict.fromkeys(ALIASES, voices[0].id)
    return ProgramInfo(
        model=model,
        kind="speech",
        sample_rate=config.codec.sample_rate,
        frame_samples=config.codec.frame_samples,
        voices=voices,
        default_voice=voices[0].id,
        max_input_chars=options.max_input_chars,
        max_frames=min(config.generation.max_frames, options.positions),
        # The official package drops instructions for the small CustomVoice checkpoint, which was not taught them.
        instructions=config.variant == "voice_design" or (config.variant == "custom_voice" and config.size != "0b6"),
        options=_request_options(config, options),
        aliases={alias: voice for alias, voice in table.items() if voice in known},
        clones={"base": "recording", "voice_design": "description"}.get(config.variant),  # type: ignore[arg-type]
        recording_seconds=(options.min_reference_seconds, options.max_reference_seconds),
        recording_urls=options.reference_urls,
    )


def _voices(config: Qwen3TtsConfig) -> tuple[Voice, ...]:
    """The speakers; where there are none, one entry that says where the voice comes from."""
    if config.variant == "voice_design":
        return (Voice("designed", "As the instructions say"),)
    if config.variant == "base":
        return (Voice("clone", "As the reference recording speaks"),)
    if not config.talker.speakers:
        raise ValueError("config.json: talker_config.spk_id: a custom_voice checkpoint without speakers")
    return tuple(
        Voice(name, name.replace("_", " ").title(), SPEAKER_LANGUAGES.get(name)) for name in config.talker.speakers
    )


def draw_settings(config: Qwen3TtsConfig, speech: Speech) -> DrawSettings:
    """A request's settings over the checkpoint's own."""
    own, extra = config.generation, speech.extra

    def merged(settings: Sampling, prefix: str) -> Sampling:
        return Sampling(
            temperature=float(extra.get(f"{prefix}temperature", settings.temperature)),
            top_k=int(extra.get(f"{prefix}top_k", settings.top_k)),
            top_p=float(extra.get(f"{prefix}top_p", settings.top_p)),
        )

    return DrawSettings(
        talker=merged(own.talker, ""),
        predictor=merged(own.predictor, "subtalker_"),
        repetition_penalty=float(extra.get("repetition_penalty", own.repetition_penalty)),
    )


def _request_options(config: Qwen3TtsConfig, options: Qwen3TtsOptions) -> dict[str, Option]:
    own = config.generation
    declared = {
        "language": Option("text", "A language by name or ISO code, or auto.", maximum=32),
        "task_type": Option(
            "choice", "What the checkpoint does; need not be sent.", choices=(TASK_TYPES[config.variant],)
        ),
        "max_new_tokens": Option("integer", "Most frames of 80 ms.", 2, min(own.max_frames, options.positions)),
        "repetition_penalty": Option("number", f"Of codes already drawn; {own.repetition_penalty:g}.", 0.5, 2.0),
    }
    for prefix, settings, what in (("", own.talker, "first codes"), ("subtalker_", own.predictor, "other codes")):
        declared |= {
            f"{prefix}temperature": Option(
                "number", f"Of {what}; {settings.temperature:g}, and 0 takes the likeliest.", 0.0, 2.0
            ),
            f"{prefix}top_k": Option(
                "integer", f"Of {what}; {settings.top_k}, and 0 keeps all.", 0, config.talker.code_vocab
            ),
            f"{prefix}top_p": Option("number", f"Of {what}; {settings.top_p:g}.", 0.0, 1.0),
        }
    if config.variant == "base":
        declared |= {
            "ref_audio": Option("text", "The voice to imitate: wav, flac, mp3 or ogg as a data URL or in base64."),
            "ref_text": Option("text", "What the recording says; makes the likeness closer.", maximum=1024),
            "x_vector_only_mode": Option("boolean", "Imitate the voice only, not how the recording speaks."),
            "non_streaming_mode": Option("boolean", "Read the whole text before speaking; false."),
        }
    return declared
