"""``python -m pega_omni_plugin.bench.step qwen3-tts``: the step of a program, alone, with random weights.

No server, no scheduler, no sockets: what the model itself takes for a prompt and for a frame, by the number of rows,
beside what the device's memory and arithmetic allow (the roofline). Needs PyTorch and NumPy; Triton on a GPU.

``--engine`` runs the steps as the engine does, with vLLM's fused operations on the CPU, and once more with scheduler
and worker around them, and reports what these add. That needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pega_omni_plugin.engine.program import PARTS, Admission, PartConfig, Prompt, Speech
from pega_omni_plugin.models.qwen3_tts.config import Qwen3TtsConfig, read_config
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions, program_info
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from pega_omni_plugin.models.qwen3_tts.prompt import NO_CODE, TalkerPrompt
from pega_omni_plugin.models.qwen3_tts.tiny_config import CODEC, CODEC_DECODER, GENERATION, PREDICTOR, SPEAKERS, TALKER

PUBLISHED_CODEC: dict[str, Any] = {
    "codebook_dim": 512,
    "decoder_dim": 1536,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "latent_dim": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 16,
    "sliding_window": 72,
}
PUBLISHED_PREDICTOR: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
}
PUBLISHED_TALKER: dict[str, Any] = {
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "text_hidden_size": 2048,
    "text_vocab_size": 151936,
}
DIMS: dict[str, dict[str, Any]] = {
    "tiny": {"talker": {"text_vocab_size": 290}, "predictor": {}, "codec": {}},
    "0.6b": {
        "talker": PUBLISHED_TALKER | {"hidden_size": 1024, "intermediate_size": 3072},
        "predictor": PUBLISHED_PREDICTOR,
        "codec": PUBLISHED_CODEC,
    },
    "1.7b": {
        "talker": PUBLISHED_TALKER | {"hidden_size": 2048, "intermediate_size": 6144},
        "predictor": PUBLISHED_PREDICTOR,
        "codec": PUBLISHED_CODEC,
    },
}
"""What differs from the tiny checkpoint; the published values of Qwen3-TTS-12Hz."""

DEVICES = {"H200": (4.3, 790.0), "H100": (3.35, 790.0), "A100": (2.0, 312.0)}
"""Memory bandwidth in TB/s and dense bfloat16 arithmetic in TFLOP/s, as measured on or published for them."""

PROMPT_TOKENS = 100
FRAME_SECONDS = 0.08


class RandomWeights:
    """In place of ``nn.checkpoint.Weights``: numbers of the right shape, made on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._counts: list[int] = []  # shared by copies: the decoder reads through one

    @property
    def count(self) -> int:
        """Numbers taken so far."""
        return sum(self._counts)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Normal numbers of variance 1 / inputs for matrices; ones where the model divides by them or scales with
        them."""
        self._counts.append(int(np.prod(shape)))
        if name.endswith(("norm.weight", "cluster_usage", "scale", "gamma")):
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        scale = float(np.prod(shape[1:]) or 1) ** -0.5 if len(shape) > 1 else 0.02
        return torch.randn(shape, device=self.device).mul_(scale).to(self.dtype)


@dataclass(frozen=True)
class Work:
    """Bytes that a part must read in a step, and operations for each row; biases and norms left out."""

    read: int
    flops: int


@dataclass(frozen=True)
class StepWork:
    """The parts of a step, and the bytes that the talker reads for a token in a row's cache."""

    talker: Work
    predictor: Work
    codec: Work
    kv_per_token: int

    def seconds(self, rows: int, tokens: int, bandwidth: float, flops: float) -> float:
        """The least time of a step of ``rows`` that have ``tokens`` in their caches, parts one after another.

        Each part takes the longer of reading and computing; see Williams et al. 2009.
        """
        cached = rows * tokens * self.kv_per_token
        return sum(
            max((work.read + more) / bandwidth, rows * work.flops / flops)
            for work, more in ((self.talker, cached), (self.predictor, 0), (self.codec, 0))
        )


def describe(config: Qwen3TtsConfig, codec_parameters: int, width: int) -> StepWork:
    """Count what a step takes, for weights of ``width`` bytes."""

    def body(dims: Any) -> int:
        attention = dims.hidden * dims.head_dim * (2 * dims.heads + 2 * dims.kv_heads)
        return int(dims.layers * (attention + 3 * dims.hidden * dims.intermediate))

    talker, groups = config.talker, config.talker.groups
    spoken = body(talker.stack) + talker.stack.hidden * (talker.vocab - 1023)
    predicted = (groups - 1) * (body(talker.predictor) + talker.predictor.hidden * talker.code_vocab)
    kv = 2 * talker.stack.layers * talker.stack.kv_heads * talker.stack.head_dim * width
    codec = config.codec
    # Samples per frame times channels grow and shrink through the vocoder: counted from its widths.
    channels, steps, vocoder = codec.channels, 1, 0
    for ratio in codec.upsampling_ratios:
        steps *= ratio
        vocoder += steps * (codec.latent * codec.latent + 2 * 4 * codec.latent * codec.latent)
    vocoder += steps * 7 * codec.latent * channels
    for rate in codec.upsample_rates:
        vocoder += steps * channels * (channels // 2) * 2 * rate
        channels, steps = channels // 2, steps * rate
        vocoder += steps * 3 * (7 + 1) * channels * channels
    return StepWork(
        talker=Work(spoken * width, 2 * spoken),
        predictor=Work(predicted * width, 2 * predicted),
        codec=Work(codec_parameters * width, 2 * (vocoder + body(codec.transformer))),
        kv_per_token=kv,
    )


def write_config(folder: Path, dims: str) -> Qwen3TtsConfig:
    """The configuration of a checkpoint of these dimensions."""
    changed = DIMS[dims]
    talker = TALKER | changed["talker"] | {"code_predictor_config": PREDICTOR | changed["predictor"]}
    talker |= {"spk_id": SPEAKERS, "spk_is_dialect": dict.fromkeys(SPEAKERS, False)}
    ids = {f"{name}_token_id": 260 + n for n, name in enumerate(("assistant", "im_start", "im_end"))}
    ids |= {f"tts_{name}_token_id": 270 + n for n, name in enumerate(("pad", "bos", "eos"))}
    root = {
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_type": "custom_voice",
        "tts_model_size": "1b7",
        "talker_config": talker,
        **ids,
    }
    (folder / "speech_tokenizer").mkdir()
    (folder / "config.json").write_text(json.dumps(root))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    codec = CODEC | {"decoder_config": CODEC_DECODER | changed["codec"]}
    (folder / "speech_tokenizer" / "config.json").write_text(json.dumps(codec))
    return read_config(folder)


def build(args: argparse.Namespace) -> tuple[Qwen3TtsProgram, int]:
    """The program with random weights, and how many parameters its decoder has."""
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), args.dims)
    options = Qwen3TtsOptions(positions=args.positions, deterministic=args.deterministic)
    weights, codec_weights = RandomWeights(dtype, device), RandomWeights(dtype, device)
    with torch.inference_mode():
        program = Qwen3TtsProgram(
            config,
            options,
            program_info(config, options, args.dims),
            weights,  # type: ignore[arg-type]
            codec_weights,  # type: ignore[arg-type]
            max(args.rows),
            dict.fromkeys(PARTS, PartConfig().graphs and not args.eager),
        )
    return program, codec_weights.count


def admission(slot: int, program: Qwen3TtsProgram) -> Admission:
    """A request of ``PROMPT_TOKENS`` that never reaches its limit of frames."""
    pad = program.config.talker.pad
    text = np.random.default_rng(slot).integers(0, 256, PROMPT_TOKENS).tolist()
    prompt = TalkerPrompt(text, [NO_CODE] * 4 + [pad] * (PROMPT_TOKENS - 4), frames=1 << 30)
    return Admission(slot, Speech("x", "serena", seed=slot), Prompt(PROMPT_TOKENS, prompt.document()))


def measure(program: Qwen3TtsProgram, rows: int, frames: int) -> dict[str, float]:
    """Milliseconds: the first frame of one request when nothing else runs, a step of ``rows``, and its parts."""
    slots = list(range(1, rows + 1))
    firsts = []
    for _ in range(5):
        begun = time.perf_counter()
        program.prefill([admission(1, program)])
        program.step([1])
        firsts.append(time.perf_counter() - begun)
        program.release(1)
    for slot in slots:
        program.prefill([admission(slot, program)])
    for _ in range(10):
        program.step(slots)
    parts, steps = dict(program.part_seconds), []
    for _ in range(frames):
        begun = time.perf_counter()
        program.step(slots)
        steps.append(time.perf_counter() - begun)
    figures = {"first_ms": statistics.median(firsts), "step_ms": statistics.median(steps)}
    figures["step_p90_ms"] = statistics.quantiles(steps, n=10)[-1]
    figures |= {f"{part}_ms": (program.part_seconds[part] - parts[part]) / frames for part in PARTS}
    for slot in slots:
        program.release(slot)
    return {name: seconds * 1e3 for name, seconds in figures.items()}


def measure_engine(program: Qwen3TtsProgram, rows: int, frames: int) -> float:
    """Milliseconds that scheduler and worker add to a step of ``rows``, all streams running."""
    from pega_omni_plugin.bench.step_engine import overhead_seconds

    return overhead_seconds(program, [admission(slot, program) for slot in range(1, rows + 1)], frames) * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pega_omni_plugin.bench.step", description=__doc__)
    parser.add_argument("family", choices=["qwen3-tts"])
    parser.add_argument("--dims", choices=list(DIMS), default="1.7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--frames", type=int, default=100, help="steps measured (%(default)s)")
    parser.add_argument("--positions", type=int, default=1024, help="length of a slot's cache (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--deterministic", action="store_true", help="every step with as many rows as the largest")
    parser.add_argument("--engine", action="store_true", help="also what scheduler and worker add; needs vLLM")
    parser.add_argument("--bandwidth", type=float, help="of the device's memory, TB/s, for the roofline")
    parser.add_argument("--tflops", type=float, help="of the device, for the roofline")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args(arguments)
    if PROMPT_TOKENS + args.frames + 20 > args.positions:
        parser.error(f"--positions {args.positions}: too few for {PROMPT_TOKENS} + {args.frames} + 20")
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    known = next((figures for part, figures in DEVICES.items() if part in name), (None, None))
    bandwidth, tflops = args.bandwidth or known[0], args.tflops or known[1]
    if args.engine:
        from pega_omni_plugin.bench.step_engine import use_fused_kernels

        use_fused_kernels()
    program, codec_parameters = build(args)
    work = describe(program.config, codec_parameters, program._hidden.element_size())
    print(f"{args.family} {args.dims} on {name}, torch {torch.__version__}")
    rows_of_figures = []
    for rows in args.rows:
        figures: dict[str, float] = {"rows": rows, **measure(program, rows, args.frames)}
        figures["audio_s_per_s"] = rows * FRAME_SECONDS / figures["step_ms"] * 1e3
        if bandwidth and tflops:
            tokens = PROMPT_TOKENS + args.frames // 2
            figures["roofline_ms"] = work.seconds(rows, tokens, bandwidth * 1e12, tflops * 1e12) * 1e3
        if args.engine:
            figures["engine_adds_ms"] = measure_engine(program, rows, args.frames)
        rows_of_figures.append(figures)
        print("  ".join(f"{key} {value:.2f}" if key != "rows" else f"rows {rows:3d}" for key, value in figures.items()))
    if args.json is not None:
        args.json.write_text(json.dumps({"device": name, "dims": args.dims, "rows": rows_of_figures}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
