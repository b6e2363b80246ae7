"""vLLM's fused operations compute what the plain ones do, and programs that run with them speak alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pega_omni_plugin.engine.kernels import vllm_kernels
from pega_omni_plugin.engine.program import Admission, Pcm, Speech
from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.options import Qwen3TtsOptions
from pega_omni_plugin.models.qwen3_tts.program import Qwen3TtsProgram
from pega_omni_plugin.nn import kernels
from pega_omni_plugin.nn.kernels import PLAIN, Kernels

Tensor = torch.Tensor
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = pytest.mark.parametrize("shape", [(1, 32), (3, 64), (17, 2048)])
EPS = 1e-6


@pytest.fixture(scope="module")
def fused() -> Kernels:
    """There are some in every build that this project installs."""
    found = vllm_kernels()
    assert found is not None
    return found


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    digits = 1e-5 if found.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=2 * digits, atol=digits)


@DTYPES
@SHAPES
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(fused: Kernels, dtype: torch.dtype, shape: tuple[int, int], weighted: bool) -> None:
    x = random(*shape, dtype=dtype)
    weight = random(shape[1], dtype=dtype, seed=1) if weighted else None
    before = x.clone()
    assert_alike(fused.rms_norm(x, weight, EPS), PLAIN.rms_norm(before, weight, EPS))
    assert torch.equal(x, before)


@DTYPES
@SHAPES
def test_add_rms_norm(fused: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = (random(*size, dtype=dtype, seed=n) for n, size in enumerate((shape, shape, shape[1:])))
    expected = PLAIN.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    for one, other in zip(fused.add_rms_norm(x, residual, weight, EPS), expected, strict=True):
        assert_alike(one, other)


@DTYPES
@SHAPES
def test_silu_mul(fused: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype)
    assert_alike(fused.silu_mul(gate_up.clone()), PLAIN.silu_mul(gate_up))


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (8, 32), (32, 128)])
def test_turn(fused: Kernels, dtype: torch.dtype, heads: int, dim: int) -> None:
    x, weight = random(6, heads, dim, dtype=dtype), random(heads, dim, dtype=dtype, seed=1)
    positions = torch.tensor([3, 0, 199, 3, 57, 101])
    angles = torch.outer(torch.arange(200.0), 1e6 ** (-torch.arange(dim // 2) / (dim / 2)))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    before = x.clone()
    found = fused.turn(x, weight, positions, table, EPS)
    expected = PLAIN.turn(before, weight, positions, table, EPS)
    assert torch.equal(x, before)
    # Rounding between norm and rotation is where it suits each.
    digits = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, expected, rtol=2 * digits, atol=2 * digits)


# --- A program with them ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom_voice")
    tiny.write(folder)
    return folder


@pytest.fixture
def restored() -> Iterator[None]:
    before, threads = kernels._used, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    kernels._used = before
    torch.set_num_threads(threads)


def speak(checkpoint: Path, used: Kernels, seeds: dict[int, int]) -> dict[int, tuple[list[list[int]], Pcm]]:
    """Requests with their seeds by slot, of eight frames each: codes and samples. No seed here ends before."""
    kernels.use(used)
    options = Qwen3TtsOptions(positions=128, deterministic=True)
    program = Qwen3TtsProgram.load(checkpoint, options, {}, slots=6)
    front = program.front(checkpoint, options, program.info)
    admissions = []
    for slot, seed in seeds.items():
        speech = Speech("Hello there.", "ryan", seed, extra={"max_new_tokens": 8})
        admissions.append(Admission(slot, speech, front.prepare(speech)))
    program.prefill(admissions)
    codes: dict[int, list[list[int]]] = {slot: [] for slot in seeds}
    pieces: dict[int, list[Pcm]] = {slot: [] for slot in seeds}
    for _ in range(8):
        for slot, output in zip(seeds, program.step(list(seeds)), strict=True):
            pieces[slot].append(output.pcm)
            codes[slot].append(program._codes[slot].tolist())
    return {slot: (codes[slot], np.concatenate(pieces[slot])) for slot in seeds}


def test_a_program_speaks_alike_with_either(fused: Kernels, checkpoint: Path, restored: None) -> None:
    (plain_codes, plain), (codes, pcm) = (speak(checkpoint, used, {1: 2})[1] for used in (PLAIN, fused))
    assert codes == plain_codes
    assert len(pcm) == 8 * 1920
    assert np.abs(pcm.astype(int) - plain).max() <= 2


def test_deterministic_programs_stay_so(fused: Kernels, checkpoint: Path, restored: None) -> None:
    """Bit for bit the same, alone and in any place among others."""
    (_, expected) = speak(checkpoint, fused, {1: 2})[1]
    heard = speak(checkpoint, fused, {1: 2, 2: 3, 3: 2, 4: 11, 6: 2})
    for slot in (1, 3, 6):
        assert np.array_equal(heard[slot][1], expected)
