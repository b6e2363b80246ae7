"""Configuration of the tiny Qwen3-TTS checkpoints: the keys of the published ones, with small dimensions.

What other code fixes keeps its published value: the codec vocabulary and its special ids (vLLM-Omni stops at id 2150,
masks are cut at ``vocab_size - 1024``), 16 codebooks of 2048, 1920 samples a frame. Everything else is as small as it
can be while different things have different sizes.
"""

from __future__ import annotations

from typing import Any

VARIANTS = ("custom_voice", "voice_design", "base")
"""Named voices; voices made from a description; clones of a recording, for which ``base`` adds a speaker encoder."""

LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
    "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}
SPEAKERS = {
    "serena": 3066,
    "vivian": 3065,
    "uncle_fu": 3010,
    "ryan": 3061,
    "aiden": 2861,
    "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875,
    "dylan": 2878,
}
DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}

PREDICTOR: dict[str, Any] = {
    "model_type": "qwen3_tts_talker_code_predictor",
    "attention_bias": False,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "num_attention_heads": 2,
    "num_code_groups": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "use_sliding_window": False,
    "vocab_size": 2048,
}
TALKER: dict[str, Any] = {
    "model_type": "qwen3_tts_talker",
    "attention_bias": False,
    "attention_dropout": 0,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_language_id": LANGUAGES,
    "codec_nothink_id": 2155,
    "codec_pad_id": 2148,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "codec_think_id": 2154,
    "code_predictor_config": PREDICTOR,
    "head_dim": 32,  # the smallest that vLLM's attention on CPU takes
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_code_groups": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "position_id_per_seconds": 13,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000,
    "sliding_window": None,
    "text_hidden_size": 96,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 3072,
}
NARROW_TALKER: dict[str, Any] = {"hidden_size": PREDICTOR["hidden_size"], "intermediate_size": 96}
"""What differs in a talker as wide as its predictor."""

SPEAKER_ENCODER: dict[str, Any] = {
    "enc_attention_channels": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_dim": TALKER["hidden_size"],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_res2net_scale": 4,
    "enc_se_channels": 8,
    "mel_dim": 128,
    "sample_rate": 24000,
}
CODEC_DECODER: dict[str, Any] = {
    "codebook_dim": 32,
    "codebook_size": 2048,
    "decoder_dim": 64,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "latent_dim": 64,
    "layer_scale_initial_scale": 0.01,
    "max_position_embeddings": 8000,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_quantizers": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "sliding_window": 8,  # a short utterance passes it
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
}
CODEC_ENCODER: dict[str, Any] = {
    "_frame_rate": 12.5,
    "codebook_dim": 16,
    "codebook_size": 2048,
    "frame_rate": 12.5,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_filters": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_quantizers": 16,
    "sampling_rate": 24000,
    "sliding_window": 250,
    "upsample_groups": 32,
    "upsampling_ratios": [8, 6, 5, 4],
    "vector_quantization_hidden_dimension": 16,
}
CODEC: dict[str, Any] = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "model_type": "qwen3_tts_tokenizer_12hz",
    "decode_upsample_rate": 1920,
    "decoder_config": CODEC_DECODER,
    "dtype": "float32",
    "encode_downsample_rate": 1920,
    "encoder_config": CODEC_ENCODER,
    "encoder_valid_num_quantizers": 16,
    "input_sample_rate": 24000,
    "output_sample_rate": 24000,
}
FEATURES: dict[str, Any] = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "chunk_length_s": None,
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}
GENERATION: dict[str, Any] = {
    "do_sample": True,
    "max_new_tokens": 8192,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
}
