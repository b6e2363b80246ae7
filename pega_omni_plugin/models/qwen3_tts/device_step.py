"""The step on a GPU: three CUDA graphs per bucket of rows, one copy in, one copy out.

A step draws the frame's codes from the hidden states that are there, and decodes them on a second stream. Meanwhile
the talker already takes the frame in and makes the next hidden states, before anybody knows whether the speech has
ended; if it has, that work is void. The host only waits for the samples.

Without capture the same functions run one by one, on any device: so the tests run them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pega_omni_plugin.engine.program import Part
from pega_omni_plugin.models.qwen3_tts.codec import CodePredictor
from pega_omni_plugin.models.qwen3_tts.decoder import CodecDecoder
from pega_omni_plugin.models.qwen3_tts.sampler import MIN_FRAMES, DrawSettings, SlotSettings
from pega_omni_plugin.models.qwen3_tts.thinker import Talker
from pega_omni_plugin.nn import sampling
from pega_omni_plugin.nn.attention import DecodeRows
from pega_omni_plugin.nn.graphs import BucketedGraph, bucket, buckets

_SLOT, _POSITION, _EARLY, _TOP_K, _SUB_TOP_K = range(5)
_TEMPERATURE, _TOP_P, _PENALTY, _SUB_TEMPERATURE, _SUB_TOP_P, _NUMBERS = range(6)


class _Inbox:
    """What a step is told, ``[fields, rows]``: written on the host, copied to the device at once."""

    def __init__(self, rows: int, groups: int, device: torch.device) -> None:
        whole, real = 5 * rows * 8, (_NUMBERS + groups) * rows * 4
        host = torch.zeros(whole + real, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host = host
        self._device = host.to(device, copy=True)

        def parts(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            whole_part, real_part = buffer[:whole].view(torch.int64), buffer[whole:].view(torch.float32)
            return whole_part.view(-1, rows), real_part.view(-1, rows)

        host_ints, host_floats = parts(host)
        self.host_ints, self.host_floats = host_ints.numpy(), host_floats.numpy()
        self.ints, self.floats = parts(self._device)

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class DeviceStep:
    """Runs steps of up to ``slots`` rows.

    ``codes`` ``[slots + 1, groups]`` and ``hidden`` ``[slots + 1, hidden]`` are every slot's last frame and next hidden
    state; ``padding`` ``[hidden]`` is the text that is added to frames after the text has ended.
    """

    def __init__(
        self,
        talker: Talker,
        predictor: CodePredictor,
        decoder: CodecDecoder,
        codes: torch.Tensor,
        hidden: torch.Tensor,
        padding: torch.Tensor,
        frame_samples: int,
        *,
        capture: Mapping[Part, bool],
        fixed_rows: bool,
    ) -> None:
        self._talker, self._predictor, self._decoder = talker, predictor, decoder
        self._codes, self._hidden, self._padding = codes, hidden, padding
        self._most = slots = len(codes) - 1
        groups, device = codes.shape[1], codes.device
        audio_device = decoder.device
        self._settings = SlotSettings(slots, groups)
        self._seen = torch.zeros((slots + 1, talker.allowed + 1), dtype=torch.bool, device=device)
        self._inbox = _Inbox(slots, groups, device)
        self._text = padding.repeat(slots, 1)
        self._text_is_padding = True
        self._row_codes = torch.zeros((slots, groups), dtype=torch.int64, device=device)
        # The decoder may be on another device, and has its own copies of what it reads.
        self._audio_codes = torch.zeros((slots, 1, groups), dtype=torch.int64, device=audio_device)
        self._audio_slots = torch.zeros(slots, dtype=torch.int64, device=audio_device)
        # A row's samples, and at last its code of group 0, which says whether the speech has ended.
        self._out = torch.zeros((slots, frame_samples + 1), dtype=torch.int16, device=audio_device)
        self._result = torch.zeros(self._out.shape, dtype=torch.int16, pin_memory=device.type == "cuda")
        self._draw, self._draw_first = _draws(device)
        self._clock = _Clock(device)
        self._audio_stream = torch.cuda.Stream(audio_device) if audio_device.type == "cuda" else None  # type: ignore[no-untyped-call]
        sizes = (slots,) if fixed_rows else buckets(slots)
        self._sizes = sizes
        on_device, on_audio_device = device.type == "cuda", audio_device.type == "cuda"
        self._code = BucketedGraph(self._make_codes, sizes, device, capture["codec"] and on_device)
        self._talk = BucketedGraph(self._make_hidden, sizes, device, capture["thinker"] and on_device)
        self._audio = BucketedGraph(self._make_audio, sizes, audio_device, capture["decoder"] and on_audio_device)

    def admit(self, slot: int, settings: DrawSettings, seed: int) -> None:
        """A new request in ``slot``, whose hidden state is there."""
        self._settings.admit(slot, settings, seed)
        self._seen[slot] = False

    def run(
        self,
        slots: Sequence[int],
        frames: Sequence[int],
        lengths: Sequence[int],
        beside: Mapping[int, torch.Tensor],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
        """Make a frame for every slot: codes of group 0 ``[rows]`` and samples ``[rows, frame_samples]``.

        ``frames`` says how many each has had, ``lengths`` how long its prompt was. ``beside`` has by slot the text that
        is fed beside the frames, ``[tokens, hidden]``, where there is some.
        """
        count = len(slots)
        self._stage(slots, lengths, frames)
        self._inbox.send()
        with self._clock.time("codec"):
            size = self._code.run(count)
        self._hand_over(size)
        with self._clock.time("decoder", self._audio_stream), self._on_audio_stream():
            self._audio.run(count)
            self._result.copy_(self._out, non_blocking=True)
        self._fill_text(slots, frames, beside)
        with self._clock.time("thinker"):
            self._talk.run(count)
        if self._audio_stream is not None:
            self._audio_stream.synchronize()
        result = self._result[:count].numpy().copy()
        return result[:, -1].astype(np.int64), result[:, :-1]

    def seconds(self) -> Mapping[Part, float]:
        """Time of each part since it was last asked, as far as the device has told it."""
        return self._clock.read()

    def _stage(self, slots: Sequence[int], lengths: Sequence[int], frames: Sequence[int]) -> None:
        """Write where the rows stand and how their codes are drawn."""
        size = bucket(len(slots), self._most) if len(self._sizes) > 1 else self._most
        count, ints, floats = len(slots), self._inbox.host_ints, self._inbox.host_floats
        ints[:, :size] = 0
        rows, made = np.asarray(slots), np.asarray(frames)
        own = self._settings
        ints[_SLOT, :count] = rows
        ints[_POSITION, :count] = np.asarray(lengths) + made
        ints[_EARLY, :count] = made < MIN_FRAMES
        ints[_TOP_K, :count], ints[_SUB_TOP_K, :count] = own.talker.top_k[rows], own.predictor.top_k[rows]
        floats[:, :size] = 0
        for field, values in (
            (_TEMPERATURE, own.talker.temperature),
            (_TOP_P, own.talker.top_p),
            (_PENALTY, own.penalty),
            (_SUB_TEMPERATURE, own.predictor.temperature),
            (_SUB_TOP_P, own.predictor.top_p),
        ):
            floats[field, :count] = values[rows]
        floats[_PENALTY, count:size] = 1
        floats[_NUMBERS:, :count] = own.numbers(slots, made).T

    def _fill_text(self, slots: Sequence[int], frames: Sequence[int], beside: Mapping[int, torch.Tensor]) -> None:
        """The text beside frame number ``frames`` of every row: the padding, unless the row has text left."""
        left = [
            (row, beside[slot][frame])
            for row, (slot, frame) in enumerate(zip(slots, frames, strict=True))
            if slot in beside and frame < len(beside[slot])
        ]
        if left or not self._text_is_padding:
            self._text.copy_(self._padding.expand_as(self._text))
        for row, embedded in left:
            self._text[row].copy_(embedded)
        self._text_is_padding = not left

    def _hand_over(self, size: int) -> None:
        """Codes and slots to the decoder's device, in its stream, once the codes are made, and once new requests'
        state of the decoder is, which their prefill left to that device's own stream."""
        if self._audio_stream is not None:
            for device in {self._codes.device, self._audio_codes.device}:
                self._audio_stream.wait_stream(torch.cuda.current_stream(device))
        with self._on_audio_stream():
            ordered = self._audio_stream is not None  # a decoder on the CPU reads at once what is copied here
            self._audio_codes[:size, 0].copy_(self._row_codes[:size], non_blocking=ordered)
            self._audio_slots[:size].copy_(self._inbox.ints[_SLOT, :size], non_blocking=ordered)

    def _on_audio_stream(self) -> Any:
        return nullcontext() if self._audio_stream is None else torch.cuda.stream(self._audio_stream)

    # What is captured. Each reads and writes the buffers above, up to ``rows``.

    @torch.inference_mode()
    def _make_codes(self, rows: int) -> None:
        ints, floats = self._inbox.ints[:, :rows], self._inbox.floats[:, :rows]
        slots, numbers = ints[_SLOT], floats[_NUMBERS:]
        hidden = self._hidden.index_select(0, slots)
        first = self._draw_first(
            self._talker.logits(hidden),
            self._seen,
            slots,
            floats[_PENALTY],
            ints[_EARLY].bool(),
            numbers[0],
            floats[_TEMPERATURE],
            ints[_TOP_K],
            floats[_TOP_P],
        )
        settings = floats[_SUB_TEMPERATURE], ints[_SUB_TOP_K], floats[_SUB_TOP_P]

        def draw(group: int, scores: torch.Tensor) -> torch.Tensor:
            return self._draw(scores, numbers[group], *settings, most_k=scores.shape[1], nucleus=True)

        codes = torch.stack(self._predictor.frame(hidden, first, draw), dim=1)
        self._codes.index_copy_(0, slots, codes)
        self._row_codes[:rows] = codes

    @torch.inference_mode()
    def _make_audio(self, rows: int) -> None:
        codes = self._audio_codes[:rows]
        samples = self._decoder.decode(codes, self._audio_slots[:rows])
        self._out[:rows, :-1] = (samples.float() * 32767).round_().to(torch.int16)
        self._out[:rows, -1] = codes[:, 0, 0].to(torch.int16)

    @torch.inference_mode()
    def _make_hidden(self, rows: int) -> None:
        slots, positions = self._inbox.ints[_SLOT, :rows], self._inbox.ints[_POSITION, :rows]
        x = self._talker.embed_codes(self._codes.index_select(0, slots)) + self._text[:rows]
        read = DecodeRows.on_device(slots, positions + 1, self._talker.positions)
        self._hidden.index_copy_(0, slots, self._talker.step(x, positions, read))


def _draws(device: torch.device) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """How codes are drawn, and how the first of a frame is: one kernel each on CUDA."""
    if device.type == "cuda":
        from pega_omni_plugin.nn import sampling_triton

        return sampling_triton.draw, sampling_triton.draw_first
    return sampling.draw, sampling.draw_first


class _Clock:
    """How long the parts take: by events on a GPU, whose times are read when they are long over."""

    def __init__(self, device: torch.device) -> None:
        self._measures = device.type == "cuda"
        self._open: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, part: Part, stream: torch.cuda.Stream | None = None) -> Any:
        return _Span(self._open, part, stream) if self._measures else nullcontext()

    def read(self) -> Mapping[Part, float]:
        seconds: dict[Part, float] = {}
        later = []
        for part, begun, ended in self._open:
            if ended.query():  # type: ignore[no-untyped-call]
                seconds[part] = seconds.get(part, 0.0) + begun.elapsed_time(ended) / 1e3
            else:
                later.append((part, begun, ended))
        self._open = later
        return seconds


class _Span:
    def __init__(self, kept: list[Any], part: Part, stream: torch.cuda.Stream | None) -> None:
        self._kept, self._part, self._stream = kept, part, stream

    def __enter__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begun.record(self._stream)

    def __exit__(self, *_: object) -> None:
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        self._kept.append((self._part, self._begun, ended))
