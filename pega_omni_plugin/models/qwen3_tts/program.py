"""Qwen3-TTS as a program: talker, code predictor and waveform decoder in one step.

A prompt is prefilled in the step that makes the request's first frame. Each further step adds one position to the
talker, draws the frame's 16 codes and decodes them to 80 ms of audio. Everything a request has stands in tensors
indexed by its slot.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from pega_omni_plugin.engine.program import (
    PARTS,
    Admission,
    FinishReason,
    Front,
    Part,
    PartConfig,
    Pcm,
    ProgramInfo,
    StepOutput,
)
from pega_omni_plugin.models.qwen3_tts.codec import CodePredictor
from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, read_config
from pega_omni_plugin.models.qwen3_tts.decoder import CodecDecoder
from pega_omni_plugin.models.qwen3_tts.device_step import DeviceStep
from pega_omni_plugin.models.qwen3_tts.ending import Watch, fade_out
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions, draw_settings, program_info
from pega_omni_plugin.models.qwen3_tts.prompt import TalkerPrompt
from pega_omni_plugin.models.qwen3_tts.sampler import CpuSampler
from pega_omni_plugin.models.qwen3_tts.thinker import Talker
from pega_omni_plugin.nn.attention import DecodeRows
from pega_omni_plugin.nn.checkpoint import Weights
from pega_omni_plugin.nn.graphs import current

RECORDINGS_KEPT = 32
"""Recordings whose decoding is kept: 3 MB each with the published dimensions."""

_NOTHING = np.zeros(0, np.int16)


@dataclass(slots=True)
class _Request:
    """What the host knows of a slot: frames made, length of the prompt, and how many frames there may be."""

    frames: int
    length: int
    limit: int


class Qwen3TtsProgram:
    """Program ``qwen3_tts``."""

    Options: ClassVar[type] = Qwen3TtsOptions

    def __init__(
        self,
        config: Qwen3TtsConfig,
        options: Qwen3TtsOptions,
        info: ProgramInfo,
        weights: Weights,
        codec_weights: Weights,
        slots: int,
        graphs: Mapping[Part, bool],
    ) -> None:
        self.config = config
        self.options = options
        self.info = info
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.part_seconds: Mapping[Part, float] = self._seconds
        self._slots = slots
        talker = config.talker
        self.talker = Talker(talker, weights, slots, options.positions)
        self.predictor = CodePredictor(talker, weights, slots)
        self.decoder = CodecDecoder(config.codec, codec_weights, slots)
        self._watch = Watch(slots)
        self._requests: dict[int, _Request] = {}
        device, dtype = weights.device, weights.dtype
        self._codes = torch.zeros((slots + 1, talker.groups), dtype=torch.int64, device=device)
        self._hidden = torch.zeros((slots + 1, talker.stack.hidden), dtype=dtype, device=device)
        self._padding = self.talker.embed_text(torch.tensor([config.tts_pad], device=device))[0]  # [hidden]
        # Text that is fed beside the frames, only for cloned voices: [tokens, hidden] by slot.
        self._beside: dict[int, torch.Tensor] = {}
        self._heard: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()
        self.sampler: CpuSampler | DeviceStep
        self._device_step: DeviceStep | None = None
        if device.type == "cpu":
            self.sampler = CpuSampler(slots, talker.groups, self.talker.allowed)
        else:
            self.sampler = self._device_step = DeviceStep(
                self.talker,
                self.predictor,
                self.decoder,
                self._codes,
                self._hidden,
                self._padding,
                config.codec.frame_samples,
                capture=graphs,
                fixed_rows=options.deterministic,
            )

    @classmethod
    def load(cls, checkpoint: Path, options: Qwen3TtsOptions, parts: Mapping[Part, PartConfig], slots: int) -> Self:
        """Load a Qwen3-TTS-12Hz checkpoint of any variant.

        Raises:
            CheckpointError: a file is missing or does not fit.
            ValueError: a part is to run where it cannot.
        """
        config = read_config(checkpoint)
        placed = {part: _place(part, parts.get(part, PartConfig())) for part in PARTS}
        if placed["thinker"] != placed["codec"]:
            raise ValueError("parts.codec: thinker and codec share their tables: give both one device and dtype")
        if placed["thinker"][0].type == "cpu" and placed["decoder"][0].type != "cpu":
            raise ValueError("parts.decoder: runs on a GPU only where the thinker does")
        device, dtype = placed["thinker"]
        weights = Weights(checkpoint, dtype, device)
        device, dtype = placed["decoder"]
        if device.type == "cuda" and dtype == torch.float32:
            # cuDNN rounds what it multiplies to 10 bits otherwise, and float32 was asked for.
            torch.backends.cudnn.allow_tf32 = False
        codec_weights = Weights(checkpoint / "speech_tokenizer", dtype, device)
        info = program_info(config, options, checkpoint.resolve().name)
        with torch.inference_mode():
            graphs = {part: parts.get(part, PartConfig()).graphs for part in PARTS}
            return cls(config, options, info, weights, codec_weights, slots, graphs)

    @classmethod
    def front(cls, checkpoint: Path, options: Qwen3TtsOptions, info: ProgramInfo) -> Front:
        """Tokenizer, layouts, and the encoder of reference recordings."""
        from pega_omni_plugin.models.qwen3_tts.front import Qwen3TtsFront

        return Qwen3TtsFront(checkpoint, options, info.default_voice)

    @torch.inference_mode()
    def prefill(self, batch: Sequence[Admission]) -> None:
        """Run the prompts into their slots, all in one pass; one by one where draws must not depend on company."""
        begun = time.perf_counter()
        prompts = [TalkerPrompt.from_document(admission.prompt.data) for admission in batch]
        embedded = [self.talker.embed_prompt(prompt) for prompt in prompts]
        slots = [admission.slot for admission in batch]
        with current(self._hidden.device):
            if self.options.deterministic:
                pairs = zip(embedded, slots, strict=True)
                hidden = torch.cat([self.talker.prefill([one], [slot]) for one, slot in pairs])
            else:
                hidden = self.talker.prefill(embedded, slots)
        index = torch.tensor(slots, device=hidden.device)
        self._hidden.index_copy_(0, index, hidden)
        decoded = time.perf_counter()
        self._seconds["thinker"] += decoded - begun
        self.decoder.reset(index.to(self.decoder.device))
        for admission, prompt in zip(batch, prompts, strict=True):
            slot, speech = admission.slot, admission.speech
            if prompt.reference is not None:
                self._hear(slot, prompt.reference)
            self._beside.pop(slot, None)
            if prompt.trailing:
                self._beside[slot] = self.talker.embed_text(torch.tensor(prompt.trailing, device=hidden.device))
            self.sampler.admit(slot, draw_settings(self.config, speech), speech.seed)
            self._watch.admit(slot)
            self._requests[slot] = _Request(frames=0, length=len(prompt), limit=prompt.frames)
        self._seconds["decoder"] += time.perf_counter() - decoded

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> Sequence[StepOutput]:
        """One frame for every slot."""
        if not slots:
            return []
        requests = [self._requests[slot] for slot in slots]
        if self._device_step is None:
            codes, pcm = self._run(slots, requests)
        else:
            frames, lengths = [one.frames for one in requests], [one.length for one in requests]
            codes, pcm = self._device_step.run(slots, frames, lengths, self._beside)
            for part, seconds in self._device_step.seconds().items():
                self._seconds[part] += seconds
        return self._collect(slots, requests, codes, pcm)

    def release(self, slot: int) -> None:
        """Forget the request; its tensors are overwritten by the next."""
        self._requests.pop(slot, None)
        self._beside.pop(slot, None)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _hear(self, slot: int, reference: npt.NDArray[np.int16]) -> None:
        """Let the decoder go on from the recording, as the official package decodes both and cuts.

        Everybody waits while it is decoded, so where that ends is kept for the next request in this voice.
        """
        name = reference.tobytes()
        if name in self._heard:
            self._heard.move_to_end(name)
            self.decoder.resume(slot, self._heard[name])
            return
        codes = torch.from_numpy(reference).long().to(self.decoder.device)
        with current(codes.device):
            self.decoder.decode(codes[None], torch.tensor([slot], device=codes.device))
        self._heard[name] = self.decoder.save(slot)
        if len(self._heard) > RECORDINGS_KEPT:
            self._heard.popitem(last=False)

    def _run(self, slots: Sequence[int], requests: list[_Request]) -> tuple[npt.NDArray[np.int64], Pcm]:
        """A frame for every slot, on the CPU: codes of group 0 ``[rows]`` and samples ``[rows, samples]``."""
        begun = time.perf_counter()
        rows = self._slots if self.options.deterministic else len(slots)
        padded = [*slots, *[0] * (rows - len(slots))]
        frames = np.array([request.frames for request in requests] + [0] * (rows - len(slots)))
        index = torch.tensor(padded)
        hidden = self._advance(padded, requests, index)
        spoken = time.perf_counter()
        sampler = self.sampler
        assert not isinstance(sampler, DeviceStep)
        sampler.begin(padded, frames)
        first = sampler.first(self.talker.logits(hidden))
        codes = torch.stack(self.predictor.frame(hidden, first, sampler.next), dim=1)  # [rows, groups]
        self._codes.index_copy_(0, index, codes)
        coded = time.perf_counter()
        samples = self.decoder.decode(codes[:, None], index)  # [rows, samples]
        pcm = (samples.float() * 32767).round_().to(torch.int16).numpy()
        for part, seconds in zip(PARTS, (spoken - begun, coded - spoken, time.perf_counter() - coded), strict=True):
            self._seconds[part] += seconds
        return first[: len(slots)].numpy(), pcm[: len(slots)]

    def _advance(self, rows: list[int], requests: list[_Request], index: torch.Tensor) -> torch.Tensor:
        """Hidden states for the next frame of every row: new requests have theirs from the prompt, the others add a
        position for their last frame."""
        if not any(request.frames for request in requests):
            return self._hidden[index]
        places = [one.length + max(one.frames - 1, 0) for one in requests] + [0] * (len(rows) - len(requests))
        x = self.talker.embed_codes(self._codes[index]) + self._text(rows, requests)
        read = DecodeRows.prepare(rows, [place + 1 for place in places], x.device)
        hidden = self.talker.step(x, torch.tensor(places), read)
        for row, request in enumerate(requests):
            if not request.frames:
                hidden[row] = self._hidden[rows[row]]
        return hidden

    def _text(self, rows: list[int], requests: list[_Request]) -> torch.Tensor:
        """The text beside the frame that each row made last: the padding, unless the row has text left."""
        if not self._beside:
            return self._padding
        text = self._padding.repeat(len(rows), 1)
        for number, request in enumerate(requests):
            beside = self._beside.get(rows[number])
            if beside is not None and 0 < request.frames <= len(beside):
                text[number] = beside[request.frames - 1]
        return text

    def _collect(self, slots: Sequence[int], requests: list[_Request], codes: np.ndarray, pcm: Pcm) -> list[StepOutput]:
        ended = self._watch.look(slots, codes, pcm)
        outputs: list[StepOutput] = []
        for row, request in enumerate(requests):
            request.frames += 1
            if codes[row] == self.talker.allowed:
                outputs.append(StepOutput(_NOTHING, finish="stop"))
                continue
            reason: FinishReason | None = ended.get(row)
            if reason is not None:
                outputs.append(StepOutput(fade_out(pcm[row]), finish=reason))
            else:
                outputs.append(StepOutput(pcm[row], finish="length" if request.frames >= request.limit else None))
        return outputs


def _place(part: Part, config: PartConfig) -> tuple[torch.device, torch.dtype]:
    """Where a part runs and in which precision."""
    found = torch.cuda.is_available()
    try:
        device = torch.device(("cuda:0" if found else "cpu") if config.device == "auto" else config.device)
    except RuntimeError as error:
        raise ValueError(f"parts.{part}.device: {config.device!r} is no device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"parts.{part}.device: expected cpu or cuda, got {config.device!r}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)  # so that both names of it are the same
    if device.type == "cuda" and (not found or device.index >= torch.cuda.device_count()):
        count = torch.cuda.device_count() if found else 0
        raise ValueError(f"parts.{part}.device: {config.device!r}, but {count} GPUs are found")
    wide = device.type == "cpu" if config.dtype == "auto" else config.dtype == "float32"
    return device, torch.float32 if wide else torch.bfloat16
