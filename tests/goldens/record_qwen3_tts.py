"""Record what the official Qwen3-TTS package makes of the tiny checkpoints. Run by hand, in an environment of its own:

    uv venv /tmp/official && . /tmp/official/bin/activate
    uv pip install qwen-tts==0.1.1 transformers==4.57.3 accelerate==1.12.0 torch==2.11.0 torchaudio==2.11.0
    python -m tests.goldens.record_qwen3_tts          # in the root of the repository

All in float32 (the talker's weights are stored in bfloat16 and widened) on one thread, every request by itself.

``manifest.json`` holds the checkpoints' digests, the packages' versions, the requests, and how close each came to
another code: ``margin``, the smallest distance between the two likeliest scores (greedy) or between a draw and the edge
of its code's share of the cumulated probabilities (sampled).

Random weights make the end of speech likely everywhere. ``min_frames`` of a request holds it back for so many frames,
by the rule with which the package holds it back for two (``min_new_tokens``).

``CASE.npz``, one of each variant and width, has for each request, as ``REQUEST/NAME``:

    input_ids, instruct_ids, ref_ids    [tokens] of the whole templates; the latter two where there are such texts
    prompt                              [positions, hidden] the talker's input before the first frame
    trailing                            [steps, hidden] what is added to the input of frame 1, 2, ...; then tts_pad
    codes                               [frames, 16]
    first_codes                         [frames + 1] codebook 0, with the one (or the end of speech) after the frames
    hidden, logits, logits_lse          [frames + 1, hidden], [frames + 1, columns], [frames + 1] of codebook 0
    predictor_lse                       [frames, 15]
    predictor_hidden, predictor_logits  [2, 15, width], [2, 15, columns] of the first two frames
    pcm                                 every PCM_STRIDE-th sample of the answer
    uniforms                            [frames + 1, 16] what the codes were drawn with; of the last row only the first

Logits are what the heads give, before any processor: of ids 0, COLUMN_STRIDE, ... (``logits`` has the end of speech
last), and ``_lse`` is the log-sum-exp over all ids. ``hidden`` is what the head reads, with which all others can be
computed. A code is drawn by inverse CDF in vocabulary order: the first id whose cumulated probability exceeds
uniform * total, in float32.

``tts_pad`` [hidden] belongs to the case. Base cases have ``reference/codes`` [frames, 16] and ``reference/speaker``
[hidden] of ``reference_audio()``. ``codec.npz`` has ``random/pcm`` (every CODEC_PCM_STRIDE-th sample) for
``random/codes``; all checkpoints have the same codec.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from qwen_tts import Qwen3TTSModel

from pega_omni_plugin.models.qwen3_tts import tiny
from tests.goldens import (
    CODEC_PCM_STRIDE,
    COLUMN_STRIDE,
    FOLDER,
    MANIFEST,
    PCM_STRIDE,
    REFERENCE_RATE,
    codes,
    digests,
    reference_audio,
    uniforms,
)

SAMPLED_FRAMES = 8
PREDICTOR_FRAMES = 2
CODEC_FRAMES = 30
LEAST_DRAW_MARGIN = 2e-5
"""Uniforms that come closer to the edge between two codes are replaced: rounding would decide."""

REFERENCE_TEXT = "So be."
GREEDY = {"do_sample": False, "subtalker_dosample": False}
OTHER_SAMPLING = {
    "temperature": 0.6,
    "top_k": 0,
    "top_p": 0.8,
    "repetition_penalty": 1.5,
    "subtalker_temperature": 1.2,
    "subtalker_top_k": 100,
    "subtalker_top_p": 0.7,
}

# ``record``: "ids", also the "prompt", also "greedy" codes; "far", greedy codes and audio only; or "sampled" ones. All
# but ``min_frames`` is passed on to the package.
CUSTOM_VOICE: dict[str, dict[str, Any]] = {
    "english": {
        "record": "greedy",
        "min_frames": 12,
        "text": "Hello there.",
        "speaker": "vivian",
        "language": "English",
    },
    "chinese": {"record": "prompt", "text": "你好。", "speaker": "Serena", "language": "Chinese"},
    "auto": {"record": "prompt", "text": "Hi, Ryan.", "speaker": "ryan"},
    "instruction": {"record": "greedy", "min_frames": 4, "text": "Fine.", "speaker": "aiden", "instruct": "Whisper."},
    "dialect_auto": {"record": "prompt", "text": "Well.", "speaker": "eric", "language": "auto"},
    "dialect_chinese": {"record": "prompt", "text": "好", "speaker": "Dylan", "language": "Chinese"},
    "dialect_english": {"record": "prompt", "text": "Well.", "speaker": "eric", "language": "English"},
    "ending": {"record": "greedy", "text": "Bye.", "speaker": "ryan"},
    "far": {"record": "far", "min_frames": 40, "text": "On and on it goes.", "speaker": "ryan"},
    "streaming": {
        "record": "greedy",
        "min_frames": 12,
        "text": "Go on.",
        "speaker": "sohee",
        "non_streaming_mode": False,
    },
    "one_token": {"record": "prompt", "text": "a", "speaker": "sohee", "non_streaming_mode": False},
    "spaces": {"record": "ids", "text": "  two \n\n lines\t\n", "speaker": "ryan"},
    "emoji": {"record": "ids", "text": "Wow 👋🏽 (ﾉ◕ヮ◕)ﾉ!", "speaker": "ryan"},
    "decomposed": {"record": "ids", "text": "cafe\u0301 ﬁ Å", "speaker": "ryan"},
    "merges": {"record": "ids", "text": "the user and\nthe assistant sing, It'S 2026 …", "speaker": "ryan"},
    "sampled": {"record": "sampled", "text": "Hello there.", "speaker": "vivian", "language": "English"},
    "sampled_otherwise": {"record": "sampled", "min_frames": 8, "text": "Hi.", "speaker": "ryan", **OTHER_SAMPLING},
}
CUSTOM_VOICE_NARROW: dict[str, dict[str, Any]] = {
    "english": CUSTOM_VOICE["english"],
    # The 0.6B takes no instructions: the package drops them.
    "instruction": CUSTOM_VOICE["instruction"] | {"record": "prompt"},
    "far": CUSTOM_VOICE["far"],
    "sampled": CUSTOM_VOICE["sampled"],
}
VOICE_DESIGN: dict[str, dict[str, Any]] = {
    "described": {
        "record": "greedy",
        "min_frames": 4,
        "text": "Hello.",
        "instruct": "An old man.",
        "language": "English",
    },
    "undescribed": {"record": "prompt", "text": "Hello.", "instruct": ""},
    "streaming": {"record": "prompt", "text": "好的。", "instruct": "Old", "non_streaming_mode": False},
}
BASE: dict[str, dict[str, Any]] = {
    # Of text and recording either may be the longer one, as tokens and as frames.
    "short": {"record": "greedy", "min_frames": 4, "text": "Oh.", "language": "English"},
    "long": {"record": "greedy", "min_frames": 12, "text": "This is longer than that."},
    "long_non_streaming": {"record": "prompt", "text": "Longer.", "non_streaming_mode": True},
    "speaker": {
        "record": "greedy",
        "min_frames": 12,
        "text": "Hello.",
        "language": "Chinese",
        "x_vector_only_mode": True,
    },
    "speaker_non_streaming": {
        "record": "prompt",
        "text": "Hello.",
        "x_vector_only_mode": True,
        "non_streaming_mode": True,
    },
    "sampled": {"record": "sampled", "text": "Oh."},
}
BASE_NARROW = {name: BASE[name] for name in ("long", "speaker")}

CASES: dict[str, tuple[str, bool, dict[str, dict[str, Any]]]] = {
    "custom_voice": ("custom_voice", False, CUSTOM_VOICE),
    "custom_voice_narrow": ("custom_voice", True, CUSTOM_VOICE_NARROW),
    "voice_design": ("voice_design", False, VOICE_DESIGN),
    "base": ("base", False, BASE),
    "base_narrow": ("base", True, BASE_NARROW),
}


def main() -> None:
    torch.set_num_threads(1)
    packages = {name: version(name) for name in ("qwen-tts", "transformers", "torch", "numpy", "tokenizers")}
    document: dict[str, Any] = {
        "packages": packages,
        "reference_text": REFERENCE_TEXT,
        "reference_audio": sha256(reference_audio().astype("<i2").tobytes()).hexdigest(),
        "cases": {},
    }
    FOLDER.mkdir(exist_ok=True)
    for case, (variant, narrow, requests) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny.write(Path(folder), variant=variant, narrow=narrow)
            files = digests(Path(folder))
            recorder = Recorder(Qwen3TTSModel.from_pretrained(folder, dtype=torch.float32))
            arrays, told = recorder.record(requests)
        np.savez_compressed(FOLDER / f"{case}.npz", **arrays)
        document["cases"][case] = {"variant": variant, "narrow": narrow, "files": files, "requests": told}
        if case == "custom_voice":
            np.savez_compressed(FOLDER / "codec.npz", **recorder.codec())
    MANIFEST.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Recorder:
    """Sees what passes through one model."""

    def __init__(self, model: Qwen3TTSModel) -> None:
        self.model = model
        self.talker = model.model.talker
        self.ids: list[torch.Tensor] = []
        self.given: dict[str, Any] = {}
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the talker: what its head reads and gives
        self.predictor_rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.answers: Any = None
        self.min_frames = 0

        def keep(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
            def hook(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                rows.append((inputs[0][0, -1], output[0, -1]))

            return hook

        self.talker.codec_head.register_forward_hook(keep(self.rows))
        for head in self.talker.code_predictor.lm_head:
            head.register_forward_hook(keep(self.predictor_rows))
        generate = self.talker.generate

        def watched(**arguments: Any) -> Any:
            self.given = arguments | {"min_new_tokens": max(self.min_frames, arguments["min_new_tokens"])}
            self.answers = generate(**self.given)
            return self.answers

        self.talker.generate = watched
        tokenize = model._tokenize_texts

        def kept(texts: list[str]) -> list[torch.Tensor]:
            found: list[torch.Tensor] = tokenize(texts)
            self.ids += found
            return found

        model._tokenize_texts = kept

    def record(self, requests: dict[str, dict[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays of a case, and its part of the manifest."""
        arrays: dict[str, np.ndarray] = {}
        told: dict[str, Any] = {}
        reference = None
        if self.model.model.tts_model_type == "base":
            audio = (reference_audio().astype(np.float32) / 32768, REFERENCE_RATE)
            reference = self.model.create_voice_clone_prompt(audio, REFERENCE_TEXT)[0]
            arrays["reference/codes"] = reference.ref_code.numpy().astype(np.int16)
            arrays["reference/speaker"] = reference.ref_spk_embedding.numpy()
        for name, request in requests.items():
            found, facts = self._request(**request)
            arrays |= {f"{name}/{key}": value for key, value in found.items()}
            told[name] = request | facts
            print(name, facts, flush=True)
        arrays["tts_pad"] = self.given["tts_pad_embed"][0, 0].numpy()
        return arrays, told

    def _request(
        self, record: str, min_frames: int = 2, **request: Any
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.min_frames = min_frames
        if record == "sampled":
            for seed in range(100):
                draws = Draws(uniforms(seed, SAMPLED_FRAMES + 1))
                found = self._generate(draws, request, SAMPLED_FRAMES)
                if draws.margin >= LEAST_DRAW_MARGIN:
                    break
            kept = ("input_ids", "codes", "first_codes")
            arrays = {key: found[key] for key in kept} | {"uniforms": draws.uniforms[: len(found["first_codes"])]}
            return arrays, {"margin": draws.margin, "uniforms_seed": seed}
        draws = Draws(None)
        found = self._generate(draws, request | GREEDY, min_frames)
        ids = [key for key in found if key.endswith("_ids")]
        kept = {"ids": ids, "prompt": [*ids, "prompt", "trailing"], "greedy": list(found)}
        kept["far"] = [*ids, "codes", "first_codes", "pcm"]
        facts = {"margin": draws.margin} if record in ("greedy", "far") else {}
        return {key: found[key] for key in kept[record]}, facts

    def _generate(self, draws: Draws, request: dict[str, Any], frames: int) -> dict[str, np.ndarray]:
        self.ids.clear()
        self.rows.clear()
        self.predictor_rows.clear()
        if self.model.model.tts_model_type == "base":
            speak = self.model.generate_voice_clone
            audio = (reference_audio().astype(np.float32) / 32768, REFERENCE_RATE)
            text = None if request.get("x_vector_only_mode") else REFERENCE_TEXT
            request = request | {"ref_audio": audio, "ref_text": text}
            second = "ref_ids"
        else:
            speak = getattr(self.model, f"generate_{self.model.model.tts_model_type}")
            second = "instruct_ids"
        with drawing(draws):
            # The last code of codebook 0 makes no frame any more.
            (pcm,), _ = speak(max_new_tokens=frames + 1, **request)
        drawn = self.answers.sequences[0]
        eos = self.talker.config.codec_eos_token_id
        found = {"input_ids": self.ids[0][0]}
        if len(self.ids) > 1:
            found[second] = self.ids[1][0]
        found["prompt"] = self.given["inputs_embeds"][0]
        found["trailing"] = self.given["trailing_text_hidden"][0]
        parts = [step[-1][0] for step in self.answers.hidden_states if step[-1] is not None]
        found["codes"] = torch.stack(parts).to(torch.int16)  # [frames, 16]
        found["first_codes"] = drawn.to(torch.int16)
        hidden, logits = stacked(self.rows)
        found["hidden"] = hidden  # [frames + 1, hidden]
        found["logits"] = torch.cat([logits[:, ::COLUMN_STRIDE], logits[:, eos : eos + 1]], dim=1)
        found["logits_lse"] = logits.logsumexp(dim=1)
        hidden, logits = (rows.unflatten(0, (-1, 15)) for rows in stacked(self.predictor_rows))
        found["predictor_hidden"] = hidden[:PREDICTOR_FRAMES]
        found["predictor_logits"] = logits[:PREDICTOR_FRAMES, :, ::COLUMN_STRIDE]
        found["predictor_lse"] = logits.logsumexp(dim=2)
        arrays = {name: compact(tensor.numpy()) for name, tensor in found.items()}
        return arrays | {"pcm": pcm[::PCM_STRIDE]}

    def codec(self) -> dict[str, np.ndarray]:
        given = codes(seed=1, frames=CODEC_FRAMES)
        (pcm,), _ = self.model.model.speech_tokenizer.decode([{"audio_codes": torch.from_numpy(given).long()}])
        return {"random/codes": given, "random/pcm": pcm[::CODEC_PCM_STRIDE]}


def stacked(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, outputs = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(outputs)


def compact(array: np.ndarray) -> np.ndarray:
    """Ids fit in 16 bits; numbers stay float32."""
    return array if array.dtype == np.float32 else array.astype(np.int16)


class Draws:
    """Chooses codes: with ``uniforms`` by inverse CDF, without the likeliest. Codes come frame by frame, 0 to 15."""

    def __init__(self, uniforms: np.ndarray | None) -> None:
        self.uniforms = uniforms
        self.margin = float("inf")
        self._count = 0

    def multinomial(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert self.uniforms is not None and num_samples == 1 and probabilities.shape[0] == 1
        total = probabilities[0].cumsum(0)
        threshold = float(self.uniforms.flat[self._count]) * total[-1]
        self._count += 1
        self.margin = min(self.margin, float((total[:-1] - threshold).abs().min()))
        return (total > threshold).nonzero()[:1]  # [1, 1]

    def see(self, scores: torch.Tensor) -> None:
        if scores.is_floating_point():
            best, second = scores[0].topk(2).values.tolist()
            self.margin = min(self.margin, best - second)


@contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """The package draws with ``draws``."""
    multinomial, argmax = torch.multinomial, torch.argmax

    def seen(scores: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        draws.see(scores)
        return argmax(scores, *rest, **options)

    torch.multinomial, torch.argmax = draws.multinomial, seen
    try:
        yield
    finally:
        torch.multinomial, torch.argmax = multinomial, argmax


if __name__ == "__main__":
    main()
