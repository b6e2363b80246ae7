"""What cloning a voice needs of a reference recording; only ``base`` checkpoints can."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from pega_omni_plugin.models.qwen3_tts.config import Section
from pega_omni_plugin.models.qwen3_tts.encoder import CodecEncoder, read_encoder_config
from pega_omni_plugin.models.qwen3_tts.speaker import SAMPLE_RATE, SpeakerEncoder, read_speaker_config
from pega_omni_plugin.nn.checkpoint import Weights


@dataclass(frozen=True)
class Reference:
    """A recording as the talker's prompt takes it.

    Attributes:
        embedding: the speaker, float32 [talker's hidden size]
        codes: the speech, int16 [frames, groups], codebook 0 first
    """

    embedding: np.ndarray
    codes: np.ndarray


class ReferenceEncoder:
    """Turns recordings into references.

    Runs in float32 on the CPU wherever the talker runs, so that a recording has the same codes on every device. Nothing
    in it changes after it is loaded: threads may share it.

    Attributes:
        sample_rate: of the recordings that ``encode`` takes, in Hz
        min_samples: of the shortest recording that ``encode`` takes
    """

    def __init__(self, codec: CodecEncoder, speaker: SpeakerEncoder) -> None:
        self.sample_rate = SAMPLE_RATE
        self.min_samples = speaker.min_samples
        self._codec = codec
        self._speaker = speaker

    @classmethod
    def load(cls, checkpoint: Path, groups: int) -> Self:
        """Read both encoders of the checkpoint in folder ``checkpoint``.

        Args:
            groups: codes per frame that the talker knows (``TalkerConfig.groups``)

        Raises:
            CheckpointError: it is no ``base`` checkpoint, a file, key or tensor is missing, or one does not fit.
        """
        root = Section(checkpoint / "config.json")
        variant = root.text("tts_model_type")
        if variant != "base":
            raise root.wrong("tts_model_type", f"only 'base' checkpoints clone voices, this one is {variant!r}")
        speaker = read_speaker_config(root.section("speaker_encoder_config"))
        hidden = root.section("talker_config").integer("hidden_size")
        if speaker.embedding != hidden:
            raise root.wrong("speaker_encoder_config.enc_dim", f"expected the talker's hidden_size, {hidden}")

        tokenizer = checkpoint / "speech_tokenizer"
        codec = read_encoder_config(tokenizer / "config.json")
        if codec.sample_rate != SAMPLE_RATE:
            raise Section(tokenizer / "config.json").wrong(
                "input_sample_rate", f"expected the speaker encoder's {SAMPLE_RATE} Hz, got {codec.sample_rate}"
            )
        if not codec.semantic < groups <= codec.quantizers:
            raise Section(tokenizer / "config.json").wrong(
                "encoder_valid_num_quantizers",
                f"{codec.quantizers} does not go with the talker's {groups} codes a frame",
            )
        return cls(
            CodecEncoder(codec, Weights(tokenizer, torch.float32), groups),
            SpeakerEncoder(speaker, Weights(checkpoint, torch.float32)),
        )

    @torch.inference_mode()
    def encode(self, pcm: np.ndarray) -> Reference:
        """Encode a recording; a last frame that is not whole counts.

        Args:
            pcm: mono, float32 [samples] in [-1, 1] at ``sample_rate``, at least ``min_samples``

        Raises:
            ValueError: ``pcm`` is something else, or too short.
        """
        if pcm.ndim != 1 or pcm.dtype != np.float32:
            raise ValueError(f"pcm: expected one channel of float32, got shape {list(pcm.shape)} of {pcm.dtype}")
        if len(pcm) < self.min_samples:
            raise ValueError(f"pcm: {len(pcm)} samples are too few, at least {self.min_samples} are needed")
        samples = torch.tensor(pcm)  # [samples], a copy: the caller's array may be read-only
        return Reference(
            embedding=self._speaker(samples).numpy(), codes=self._codec(samples).to(torch.int16).contiguous().numpy()
        )
