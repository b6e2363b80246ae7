"""The step as a GPU runs it, on the CPU: without capture and streams, but with everything else."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from pega_omni_plugin.engine.program import PARTS, Admission, Recording, Speech
from pega_omni_plugin.models.qwen3_tts.device_step import DeviceStep
from pega_omni_plugin.models.qwen3_tts.front import Qwen3TtsFront
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from pega_omni_plugin.models.qwen3_tts.tiny import write
from tests.goldens import reference_audio
from tests.models.qwen3_tts.harness import GREEDY, Coming, run

OPTIONS = Qwen3TtsOptions(positions=512)
SLOTS = 6


@pytest.fixture(scope="module", params=["custom_voice", "base"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write(folder, variant=request.param)
    return folder


def load(checkpoint: Path, *, device_step: bool, fixed_rows: bool = False) -> Qwen3TtsProgram:
    program = Qwen3TtsProgram.load(checkpoint, OPTIONS, {}, SLOTS)
    if device_step:
        with torch.inference_mode():
            program._device_step = DeviceStep(
                program.talker,
                program.predictor,
                program.decoder,
                program._codes,
                program._hidden,
                program._padding,
                program.info.frame_samples,
                capture=dict.fromkeys(PARTS, True),  # has a meaning on a GPU only
                fixed_rows=fixed_rows,
            )
        program.sampler = program._device_step
    return program


def requests(checkpoint: Path) -> list[Coming]:
    """Of all kinds: with text beside the frames, late, greedy, drawn the longer way, cut, ending by themselves."""
    program = Qwen3TtsProgram.load(checkpoint, OPTIONS, {}, 1)
    front = Qwen3TtsFront(checkpoint, OPTIONS, program.info.default_voice)
    recording = None
    if program.info.clones is not None:
        recording = Recording(front.encode(reference_audio().astype(np.float32) / 32768), "So be it.")
    coming = []
    for slot, text, step, extra in (
        (1, "Hello there.", 0, {"max_new_tokens": 30}),
        (2, "A longer text for this one, which goes on and on.", 0, {"max_new_tokens": 30}),
        (3, "Late.", 3, GREEDY | {"max_new_tokens": 20}),
        (5, "Another.", 5, {"max_new_tokens": 20, "top_p": 0.7, "top_k": 0, "subtalker_temperature": 1.3}),
        (4, "Many codes.", 6, {"max_new_tokens": 12, "top_k": 200}),
    ):
        speech = Speech(text, program.info.default_voice, seed=slot, extra=extra)
        coming.append(Coming(slot, speech, front.prepare(speech, recording), step))
    return coming


@pytest.mark.parametrize("fixed_rows", [False, True])
def test_both_steps_make_the_same(checkpoint: Path, fixed_rows: bool) -> None:
    coming = requests(checkpoint)
    ours = run(load(checkpoint, device_step=True, fixed_rows=fixed_rows), *coming)
    plain = run(load(checkpoint, device_step=False), *coming)
    assert ours.keys() == plain.keys()
    for slot, heard in plain.items():
        assert ours[slot].finish == heard.finish
        assert ours[slot].codes == heard.codes
        assert np.abs(ours[slot].pcm.astype(int) - heard.pcm).max() <= 2


def test_a_slot_left_out_of_a_step_goes_on_where_it_was(checkpoint: Path) -> None:
    coming = requests(checkpoint)[:2]
    whole = run(load(checkpoint, device_step=True), *coming)
    program = load(checkpoint, device_step=True)
    program.prefill([Admission(one.slot, one.speech, one.prompt) for one in coming])
    pieces: list[np.ndarray] = []
    for step in range(12):
        slots = [1] if step in (3, 4, 8) else [1, 2]
        outputs = dict(zip(slots, program.step(slots), strict=True))
        if 2 in outputs:
            pieces.append(outputs[2].pcm)
            if outputs[2].finish is not None:
                break
    made = np.concatenate(pieces)
    assert np.abs(made.astype(int) - whole[2].pcm[: len(made)]).max() <= 2
    assert len(made) > 3 * program.info.frame_samples


def test_the_decoder_waits_for_the_codes_and_for_what_a_prefill_left_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resets and recordings are decoded on the second GPU's usual stream, steps on another."""
    step = DeviceStep.__new__(DeviceStep)
    step._audio_stream = MagicMock()
    step._codes = MagicMock(device=torch.device("cuda", 0))
    step._audio_codes = MagicMock(device=torch.device("cuda", 1))
    step._audio_slots = step._row_codes = step._inbox = MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    step._hand_over(4)
    assert {call.args for call in step._audio_stream.wait_stream.mock_calls} == {("cuda:0",), ("cuda:1",)}


def test_a_decoder_on_the_cpu_has_the_codes_before_it_reads_them() -> None:
    step = DeviceStep.__new__(DeviceStep)
    step._audio_stream = None
    step._audio_codes, step._audio_slots, step._row_codes, step._inbox = (MagicMock() for _ in range(4))
    step._hand_over(4)
    for copied in (step._audio_codes, step._audio_slots):
        assert copied[:4].copy_.call_args.kwargs == {"non_blocking": False}
