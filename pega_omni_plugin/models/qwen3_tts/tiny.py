"""Tiny Qwen3-TTS checkpoints with random weights, for development and tests.

File names, tensor names and configuration keys are those of the published Qwen3-TTS-12Hz checkpoints, so that whatever
loads one of those loads these.

The same bytes come out everywhere: each tensor is drawn from the raw stream of a PCG64 generator, which NumPy keeps
stable, seeded with a hash of the tensor's name, by arithmetic that IEEE 754 defines exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel  # type: ignore[import-untyped]

from pega_omni_plugin.models.qwen3_tts.tiny_config import (
    CODEC,
    CODEC_DECODER,
    CODEC_ENCODER,
    DIALECTS,
    FEATURES,
    GENERATION,
    LANGUAGES,
    NARROW_TALKER,
    PREDICTOR,
    SPEAKER_ENCODER,
    SPEAKERS,
    TALKER,
    VARIANTS,
)

EOS_LOGIT = 5.0
"""Weight of the constant in the logit of the end of speech, which random weights alone never reach.

With this one speech ends after 22 frames on average, 2 to about 60, sampled as the generation settings say.
"""

_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
_WORDS = ("assistant", "user", "system", "Ġthe", "Ġand", "ing")
"""Tokens of several characters. Prompts are cut by position, which takes "assistant" for one token."""


def write(folder: Path, *, variant: str = "custom_voice", narrow: bool = False) -> None:
    """Write a checkpoint of about 12 MB into ``folder``, which is made if needed.

    ``narrow`` gives the talker the code predictor's width, as in the published 0.6B, so that there is no projection
    between them; without it the talker is twice as wide, as in the 1.7B.

    Raises:
        ValueError: when ``variant`` is not one of ``tiny_config.VARIANTS``.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant: {variant!r} is not known; use one of {', '.join(VARIANTS)}")
    codec = folder / "speech_tokenizer"
    codec.mkdir(parents=True, exist_ok=True)

    vocabulary = _write_tokenizer(folder)
    config = _config(vocabulary, variant, narrow)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", GENERATION)
    weights = _Weights()
    _talker(weights, config["talker_config"])
    if variant == "base":
        _speaker_encoder(weights, config["speaker_encoder_config"])
    weights.save(folder / "model.safetensors", torch.bfloat16)

    _write_json(codec / "config.json", CODEC)
    _write_json(codec / "preprocessor_config.json", FEATURES)
    weights = _Weights()
    _codec_decoder(weights)
    _codec_encoder(weights)
    weights.save(codec / "model.safetensors", torch.float32)


def _config(vocabulary: Mapping[str, int], variant: str, narrow: bool) -> dict[str, Any]:
    voices = SPEAKERS if variant == "custom_voice" else {}
    # Dialects come with the voices that speak them.
    languages = {name: number for name, number in LANGUAGES.items() if voices or name not in DIALECTS.values()}
    talker = TALKER | {
        "text_vocab_size": len(vocabulary),
        "codec_language_id": languages,
        "spk_id": voices,
        "spk_is_dialect": {voice: DIALECTS.get(voice, False) for voice in voices},
    }
    if narrow:
        talker |= NARROW_TALKER
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "assistant_token_id": vocabulary["assistant"],
        "dtype": "bfloat16",
        "im_end_token_id": vocabulary["<|im_end|>"],
        "im_start_token_id": vocabulary["<|im_start|>"],
        "speaker_encoder_config": SPEAKER_ENCODER | {"enc_dim": talker["hidden_size"]},
        "talker_config": talker,
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_bos_token_id": vocabulary["<tts_text_bos>"],
        "tts_eos_token_id": vocabulary["<tts_text_eod>"],
        "tts_model_size": "0b6" if narrow else "1b7",
        "tts_model_type": variant,
        "tts_pad_token_id": vocabulary["<tts_pad>"],
    }


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a byte-level BPE tokenizer; returns every token's id, special tokens last."""
    tokens = sorted(ByteLevel.alphabet())
    merges = []
    for word in _WORDS:
        for end in range(1, len(word)):
            merges.append(f"{word[:end]} {word[end]}")
            tokens.append(word[: end + 1])
    plain = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    special = {token: len(plain) + number for number, token in enumerate(_SPECIALS)}
    _write_json(folder / "vocab.json", plain)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges), ""]), encoding="utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): {"content": token} | flags for token, number in special.items()},
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "unk_token": None,
    }
    _write_json(folder / "tokenizer_config.json", config)
    return plain | special


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Weights:
    """Named random tensors; each depends on nothing but its name, shape and spread."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def save(self, path: Path, dtype: torch.dtype) -> None:
        save_file({name: tensor.to(dtype) for name, tensor in self.tensors.items()}, path, metadata={"format": "pt"})

    def add(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        """Draw uniformly with the given spread.

        Uniform, because a normal draw goes through functions that platforms round differently.
        """
        seed = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        raw = np.random.PCG64(seed).random_raw(math.prod(shape))
        unit = (raw >> np.uint64(11)) * 2.0**-53  # [0, 1)
        values = mean + std * math.sqrt(12.0) * (unit - 0.5)
        self.tensors[name] = torch.from_numpy(values.astype(np.float32).reshape(shape))

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", outputs, inputs, std=gain * inputs**-0.5)
        if bias:
            self.add(f"{name}.bias", outputs, std=0.1)

    def conv(self, name: str, outputs: int, inputs: int, kernel: int, *, bias: bool = True, gain: float = 1.0) -> None:
        """Weight [outputs, inputs per group, kernel]."""
        self.add(f"{name}.weight", outputs, inputs, kernel, std=gain * (inputs * kernel) ** -0.5)
        if bias:
            self.add(f"{name}.bias", outputs, std=0.05)

    def upsampling(self, name: str, inputs: int, outputs: int, stride: int, overlap: int) -> None:
        """A transposed convolution, weight [inputs, outputs, stride * overlap]."""
        self.add(f"{name}.weight", inputs, outputs, stride * overlap, std=(inputs * overlap) ** -0.5)
        self.add(f"{name}.bias", outputs, std=0.05)

    def scale(self, name: str, width: int, mean: float = 1.0) -> None:
        """Factors of a norm or of a layer. Never exactly the initial value, which would hide a missing product."""
        self.add(name, width, std=0.2 * mean, mean=mean)

    def decoder_layer(self, name: str, config: Mapping[str, Any]) -> None:
        """A Qwen3 layer, without the norms of queries and keys."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        self.linear(f"{name}.self_attn.q_proj", queries, hidden)
        self.linear(f"{name}.self_attn.k_proj", keys, hidden)
        self.linear(f"{name}.self_attn.v_proj", keys, hidden)
        self.linear(f"{name}.self_attn.o_proj", hidden, queries)
        self.linear(f"{name}.mlp.gate_proj", inner, hidden)
        self.linear(f"{name}.mlp.up_proj", inner, hidden)
        self.linear(f"{name}.mlp.down_proj", hidden, inner)
        self.scale(f"{name}.input_layernorm.weight", hidden)
        self.scale(f"{name}.post_attention_layernorm.weight", hidden)

    def qwen3(self, name: str, config: Mapping[str, Any]) -> None:
        """A whole Qwen3 stack with its final norm."""
        for number in range(config["num_hidden_layers"]):
            layer = f"{name}.layers.{number}"
            self.decoder_layer(layer, config)
            self.scale(f"{layer}.self_attn.q_norm.weight", config["head_dim"])
            self.scale(f"{layer}.self_attn.k_norm.weight", config["head_dim"])
        self.scale(f"{name}.norm.weight", config["hidden_size"])


def _talker(weights: _Weights, config: Mapping[str, Any]) -> None:
    hidden, text = config["hidden_size"], config["text_hidden_size"]
    weights.add("talker.model.text_embedding.weight", config["text_vocab_size"], text, std=1.0)
    weights.linear("talker.text_projection.linear_fc1", text, text, bias=True)
    weights.linear("talker.text_projection.linear_fc2", hidden, text, bias=True)
    weights.add("talker.model.codec_embedding.weight", config["vocab_size"], hidden, std=0.5)
    weights.qwen3("talker.model", config)
    weights.linear("talker.codec_head", config["vocab_size"], hidden)

    small = PREDICTOR["hidden_size"]
    if small != hidden:
        weights.linear("talker.code_predictor.small_to_mtp_projection", small, hidden, bias=True)
    weights.qwen3("talker.code_predictor.model", PREDICTOR)
    for number in range(PREDICTOR["num_code_groups"] - 1):
        table = f"talker.code_predictor.model.codec_embedding.{number}.weight"
        weights.add(table, PREDICTOR["vocab_size"], hidden, std=0.2)
        weights.linear(f"talker.code_predictor.lm_head.{number}", PREDICTOR["vocab_size"], small)
    _let_speech_end(weights.tensors)


def _let_speech_end(tensors: dict[str, torch.Tensor]) -> None:
    """Make the end of speech as likely in every frame: channel 0 carries a constant, which only its logit reads."""
    tensors["talker.text_projection.linear_fc2.weight"][0] = 0
    tensors["talker.text_projection.linear_fc2.bias"][0] = 0.5
    tensors["talker.model.codec_embedding.weight"][:, 0] = 0.5
    for number in range(PREDICTOR["num_code_groups"] - 1):
        tensors[f"talker.code_predictor.model.codec_embedding.{number}.weight"][:, 0] = 0
    for number in range(TALKER["num_hidden_layers"]):
        tensors[f"talker.model.layers.{number}.self_attn.o_proj.weight"][0] = 0
        tensors[f"talker.model.layers.{number}.mlp.down_proj.weight"][0] = 0
    head = tensors["talker.codec_head.weight"]
    head[:, 0] = 0
    head[TALKER["codec_eos_token_id"]] = 0
    head[TALKER["codec_eos_token_id"], 0] = EOS_LOGIT


def _speaker_encoder(weights: _Weights, config: Mapping[str, Any]) -> None:
    """The ECAPA-TDNN of the base model (arXiv 2005.07143): recording to one embedding."""
    first, *middle, last = config["enc_channels"]
    attention, squeeze, parts = config["enc_attention_channels"], config["enc_se_channels"], config["enc_res2net_scale"]
    first_kernel, *kernels, last_kernel = config["enc_kernel_sizes"]
    weights.conv("speaker_encoder.blocks.0.conv", first, config["mel_dim"], first_kernel)
    for number, (width, kernel) in enumerate(zip(middle, kernels, strict=True), start=1):
        block = f"speaker_encoder.blocks.{number}"
        weights.conv(f"{block}.tdnn1.conv", width, width, 1)
        for part in range(parts - 1):
            weights.conv(f"{block}.res2net_block.blocks.{part}.conv", width // parts, width // parts, kernel)
        weights.conv(f"{block}.tdnn2.conv", width, width, 1)
        weights.conv(f"{block}.se_block.conv1", squeeze, width, 1)
        weights.conv(f"{block}.se_block.conv2", width, squeeze, 1)
    weights.conv("speaker_encoder.mfa.conv", last, last, last_kernel)
    weights.conv("speaker_encoder.asp.tdnn.conv", attention, 3 * last, 1)
    weights.conv("speaker_encoder.asp.conv", last, attention, 1)
    weights.conv("speaker_encoder.fc", config["enc_dim"], 2 * last, 1)


def _codec_decoder(weights: _Weights) -> None:
    """Codes to waveform, in the order that data takes."""
    config = CODEC_DECODER
    width, latent, hidden = config["codebook_dim"], config["latent_dim"], config["hidden_size"]
    for group, books in (("rvq_first", 1), ("rvq_rest", config["num_quantizers"] - 1)):
        name = f"decoder.quantizer.{group}"
        weights.conv(f"{name}.input_proj", width // 2, width, 1, bias=False)
        weights.conv(f"{name}.output_proj", width, width // 2, 1, bias=False, gain=books**-0.5)
        for book in range(books):
            layer = f"{name}.vq.layers.{book}._codebook"
            weights.add(f"{layer}.embedding_sum", config["codebook_size"], width // 2, std=1.0)
            weights.scale(f"{layer}.cluster_usage", config["codebook_size"])

    weights.conv("decoder.pre_conv.conv", latent, width, 3)
    weights.linear("decoder.pre_transformer.input_proj", hidden, latent, bias=True)
    for number in range(config["num_hidden_layers"]):
        layer = f"decoder.pre_transformer.layers.{number}"
        weights.decoder_layer(layer, config)
        weights.scale(f"{layer}.self_attn_layer_scale.scale", hidden, mean=0.5)
        weights.scale(f"{layer}.mlp_layer_scale.scale", hidden, mean=0.5)
    weights.scale("decoder.pre_transformer.norm.weight", hidden)
    weights.linear("decoder.pre_transformer.output_proj", latent, hidden, bias=True)

    for number, ratio in enumerate(config["upsampling_ratios"]):
        block = f"decoder.upsample.{number}"
        weights.upsampling(f"{block}.0.conv", latent, latent, ratio, overlap=1)
        weights.conv(f"{block}.1.dwconv.conv", latent, 1, 7)
        weights.scale(f"{block}.1.norm.weight", latent)
        weights.add(f"{block}.1.norm.bias", latent, std=0.1)
        weights.linear(f"{block}.1.pwconv1", 4 * latent, latent, bias=True)
        weights.linear(f"{block}.1.pwconv2", latent, 4 * latent, bias=True)
        weights.scale(f"{block}.1.gamma", latent, mean=0.5)

    channels = config["decoder_dim"]
    weights.conv("decoder.decoder.0.conv", channels, latent, 7)
    for number, rate in enumerate(config["upsample_rates"], start=1):
        block = f"decoder.decoder.{number}.block"
        _snake(weights, f"{block}.0", channels)
        weights.upsampling(f"{block}.1.conv", channels, channels // 2, rate, overlap=2)
        channels //= 2
        for unit in (2, 3, 4):
            _snake(weights, f"{block}.{unit}.act1", channels)
            weights.conv(f"{block}.{unit}.conv1.conv", channels, channels, 7, gain=0.5)
            _snake(weights, f"{block}.{unit}.act2", channels)
            weights.conv(f"{block}.{unit}.conv2.conv", channels, channels, 1, gain=0.5)
    last = len(config["upsample_rates"]) + 1
    _snake(weights, f"decoder.decoder.{last}", channels)
    weights.conv(f"decoder.decoder.{last + 1}.conv", 1, channels, 7, gain=0.07)


def _snake(weights: _Weights, name: str, channels: int) -> None:
    """The logarithms of a SnakeBeta activation's frequency and magnitude."""
    weights.add(f"{name}.alpha", channels, std=0.3)
    weights.add(f"{name}.beta", channels, std=0.3)


def _codec_encoder(weights: _Weights) -> None:
    """Waveform to codes, a Mimi encoder (arXiv 2410.00037) under the names of its transformers implementation."""
    config = CODEC_ENCODER
    channels, hidden = config["num_filters"], config["hidden_size"]
    convolutions = "encoder.encoder.layers"
    weights.conv(f"{convolutions}.0.conv", channels, 1, 7)
    # Each ratio takes three places in the list: residual block, activation (no weights), strided convolution.
    place = 1
    for ratio in reversed(config["upsampling_ratios"]):
        weights.conv(f"{convolutions}.{place}.block.1.conv", channels // 2, channels, 3)
        weights.conv(f"{convolutions}.{place}.block.3.conv", channels, channels // 2, 1)
        weights.conv(f"{convolutions}.{place + 2}.conv", 2 * channels, channels, 2 * ratio)
        channels *= 2
        place += 3
    weights.conv(f"{convolutions}.{place + 1}.conv", hidden, channels, 3)

    inner = config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{number}"
        for projection in ("q_proj", "k_proj", "v_proj"):
            weights.linear(f"{layer}.self_attn.{projection}", heads, hidden)
        weights.linear(f"{layer}.self_attn.o_proj", hidden, heads)
        weights.linear(f"{layer}.mlp.fc1", inner, hidden)
        weights.linear(f"{layer}.mlp.fc2", hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights.scale(f"{layer}.{norm}.weight", hidden)
            weights.add(f"{layer}.{norm}.bias", hidden, std=0.1)
        weights.scale(f"{layer}.self_attn_layer_scale.scale", hidden, mean=0.5)
        weights.scale(f"{layer}.mlp_layer_scale.scale", hidden, mean=0.5)
    weights.conv("encoder.downsample.conv", hidden, hidden, 4, bias=False)

    width = config["vector_quantization_hidden_dimension"]
    for group, books in (("semantic", 1), ("acoustic", config["num_quantizers"] - 1)):
        name = f"encoder.quantizer.{group}_residual_vector_quantizer"
        weights.conv(f"{name}.input_proj", width, hidden, 1, bias=False)
        weights.conv(f"{name}.output_proj", hidden, width, 1, bias=False)
        for book in range(books):
            layer = f"{name}.layers.{book}.codebook"
            weights.add(f"{layer}.embed_sum", config["codebook_size"], config["codebook_dim"], std=1.0)
            weights.scale(f"{layer}.cluster_usage", config["codebook_size"])
            weights.tensors[f"{layer}.initialized"] = torch.ones(1)
