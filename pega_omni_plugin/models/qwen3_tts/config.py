"""Dimensions and ids of a Qwen3-TTS checkpoint, all of them read from its configuration files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pega_omni_plugin.nn.checkpoint import CheckpointError, read_json
from pega_omni_plugin.nn.transformer import StackDims

Variant = Literal["custom_voice", "voice_design", "base"]


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    """The talker (text and codes to codebook 0) and its code predictor (codebooks 1 to ``groups - 1``)."""

    stack: StackDims
    predictor: StackDims
    text_hidden: int
    text_vocab: int
    vocab: int
    code_vocab: int
    groups: int
    bos: int
    eos: int
    pad: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The speech tokenizer's decoder: one frame of codes to ``frame_samples`` samples at ``sample_rate`` Hz."""

    sample_rate: int
    frame_samples: int
    quantizers: int
    codebook_size: int
    codebook_dim: int
    latent: int
    channels: int
    transformer: StackDims
    window: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How codes are drawn. ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 keep all."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The checkpoint's own settings for drawing codes."""

    talker: Sampling
    predictor: Sampling
    repetition_penalty: float
    max_frames: int


@dataclass(frozen=True, slots=True)
class Qwen3TtsConfig:
    """Everything but the speaker encoder and the reference encoder, which only ``base`` checkpoints use."""

    variant: Variant
    size: str
    talker: TalkerConfig
    codec: CodecConfig
    generation: GenerationConfig
    assistant: int
    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


def read_config(folder: Path) -> Qwen3TtsConfig:
    """Read ``config.json``, ``generation_config.json`` and ``speech_tokenizer/config.json``.

    Raises:
        CheckpointError: a file or a key is missing, or a value does not fit; names it.
    """
    root = Section(folder / "config.json")
    if root.text("model_type") != "qwen3_tts":
        raise root.wrong("model_type", f"expected 'qwen3_tts', got {root.text('model_type')!r}")
    tokenizer = root.text("tokenizer_type")
    if tokenizer != "qwen3_tts_tokenizer_12hz":
        raise root.wrong("tokenizer_type", f"only the 12 Hz tokenizer is supported, got {tokenizer!r}")
    variant = root.text("tts_model_type")
    if variant not in get_args(Variant):
        raise root.wrong("tts_model_type", f"expected one of {', '.join(get_args(Variant))}, got {variant!r}")
    config = Qwen3TtsConfig(
        variant=variant,  # type: ignore[arg-type]
        size=root.text("tts_model_size"),
        talker=_talker(root.section("talker_config")),
        codec=_codec(Section(folder / "speech_tokenizer" / "config.json")),
        generation=_generation(Section(folder / "generation_config.json")),
        **{
            name: root.integer(f"{name}_token_id")
            for name in ("assistant", "im_start", "im_end", "tts_pad", "tts_bos", "tts_eos")
        },
    )
    if config.codec.quantizers != config.talker.groups:
        raise root.wrong(
            "talker_config.num_code_groups",
            f"{config.talker.groups}, but the speech tokenizer has {config.codec.quantizers} codebooks",
        )
    return config


def _talker(section: Section) -> TalkerConfig:
    predictor = section.section("code_predictor_config")
    groups = section.integer("num_code_groups")
    if predictor.integer("num_code_groups") != groups:
        raise predictor.wrong("num_code_groups", f"expected the talker's {groups}")
    if section.boolean("attention_bias") or predictor.boolean("attention_bias"):
        raise section.wrong("attention_bias", "attention with bias is not supported")
    if section.optional("sliding_window") is not None or predictor.boolean("use_sliding_window"):
        raise section.wrong("sliding_window", "a talker with sliding attention is not supported")
    languages = section.integers("codec_language_id")
    speakers = {name.lower(): number for name, number in section.integers("spk_id").items()}
    dialects = {
        name.lower(): dialect for name, dialect in section.mapping("spk_is_dialect").items() if dialect is not False
    }
    for name, dialect in dialects.items():
        if dialect not in languages:
            raise section.wrong("spk_is_dialect", f"{name} speaks {dialect!r}, which codec_language_id has not")
    vocab = section.integer("vocab_size")
    for key, ids in (("codec_language_id", languages), ("spk_id", speakers)):
        for name, number in ids.items():
            if not 0 <= number < vocab:
                raise section.wrong(key, f"{name} is {number}, which is not below vocab_size {vocab}")
    return TalkerConfig(
        stack=_stack(section),
        predictor=_stack(predictor),
        text_hidden=section.integer("text_hidden_size"),
        text_vocab=section.integer("text_vocab_size"),
        vocab=section.integer("vocab_size"),
        code_vocab=predictor.integer("vocab_size"),
        groups=groups,
        bos=section.integer("codec_bos_id"),
        eos=section.integer("codec_eos_token_id"),
        pad=section.integer("codec_pad_id"),
        think=section.integer("codec_think_id"),
        nothink=section.integer("codec_nothink_id"),
        think_bos=section.integer("codec_think_bos_id"),
        think_eos=section.integer("codec_think_eos_id"),
        languages=languages,
        speakers=speakers,
        dialects=dialects,
    )


def _codec(root: Section) -> CodecConfig:
    section = root.section("decoder_config")
    frame_samples = root.integer("decode_upsample_rate")
    ratios, rates = section.integer_list("upsampling_ratios"), section.integer_list("upsample_rates")
    if math.prod(ratios) * math.prod(rates) != frame_samples:
        raise section.wrong("upsample_rates", f"these and upsampling_ratios do not multiply to {frame_samples}")
    return CodecConfig(
        sample_rate=root.integer("output_sample_rate"),
        frame_samples=frame_samples,
        quantizers=section.integer("num_quantizers"),
        codebook_size=section.integer("codebook_size"),
        codebook_dim=section.integer("codebook_dim"),
        latent=section.integer("latent_dim"),
        channels=section.integer("decoder_dim"),
        transformer=_stack(section),
        window=section.integer("sliding_window"),
        upsampling_ratios=ratios,
        upsample_rates=rates,
    )


def _generation(section: Section) -> GenerationConfig:
    """Keys that a checkpoint leaves out have the values of the official package (``_merge_generate_kwargs``)."""

    def sampling(prefix: str, do_sample: str) -> Sampling:
        greedy = not section.boolean(do_sample, default=True)
        return Sampling(
            temperature=0.0 if greedy else section.number(f"{prefix}temperature", default=0.9),
            top_k=section.integer(f"{prefix}top_k", default=50),
            top_p=section.number(f"{prefix}top_p", default=1.0),
        )

    return GenerationConfig(
        talker=sampling("", "do_sample"),
        predictor=sampling("subtalker_", "subtalker_dosample"),
        repetition_penalty=section.number("repetition_penalty", default=1.05),
        max_frames=section.integer("max_new_tokens", default=2048),
    )


def _stack(section: Section) -> StackDims:
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        if section.integer(key) < 1:
            raise section.wrong(key, f"expected 1 or more, got {section.integer(key)}")
    heads, kv_heads = section.integer("num_attention_heads"), section.integer("num_key_value_heads")
    if kv_heads < 1 or heads % kv_heads:
        raise section.wrong("num_key_value_heads", f"{kv_heads} does not divide the {heads} heads")
    return StackDims(
        hidden=section.integer("hidden_size"),
        intermediate=section.integer("intermediate_size"),
        layers=section.integer("num_hidden_layers"),
        heads=section.integer("num_attention_heads"),
        kv_heads=section.integer("num_key_value_heads"),
        head_dim=section.integer("head_dim"),
        eps=section.number("rms_norm_eps"),
        rope_theta=section.number("rope_theta"),
    )


class Section:
    """An object of a configuration file that knows where it stands."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self._path = path
        self._values = read_json(path) if values is None else values
        self._prefix = prefix

    def wrong(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {self._prefix}{key}: {reason}")

    def optional(self, key: str) -> Any:
        return self._values.get(key)

    def section(self, key: str) -> Section:
        return Section(self._path, self.mapping(key), f"{self._prefix}{key}.")

    def mapping(self, key: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._get(key, dict, "an object")
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, str, "a string"))

    def boolean(self, key: str, default: bool = False) -> bool:
        return bool(self._get(key, bool, "true or false", default))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, int, "an integer", default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), "a number", default))

    def integers(self, key: str) -> dict[str, int]:
        values = self.mapping(key)
        if not all(isinstance(value, int) for value in values.values()):
            raise self.wrong(key, "expected an object of integers")
        return dict(values)

    def integer_list(self, key: str) -> tuple[int, ...]:
        values = self._get(key, list, "a list of integers")
        if not all(isinstance(value, int) and value > 0 for value in values):
            raise self.wrong(key, f"expected a list of integers above 0, got {values!r}")
        return tuple(values)

    def _get(self, key: str, kind: type | tuple[type, ...], wanted: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if value is None and default is None:
            raise self.wrong(key, "missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(key, f"expected {wanted}, got {value!r}")
        return value
