"""SnakeBeta in one Triton kernel is what it is in PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import itertools, torch
import triton, triton.language as tl
from pega_omni_plugin.nn.conv import SnakeBeta
from pega_omni_plugin.nn.snake_triton import _cos, snake

generator = torch.Generator().manual_seed(0)

def random(*shape):
    return torch.randn(shape, generator=generator)

# One digit of bfloat16: the interpreter cuts off where PyTorch rounds.
tolerance = {torch.float32: dict(atol=2e-5, rtol=1e-5), torch.bfloat16: dict(atol=1e-3, rtol=2**-7)}
# Rows, channels, steps: tiles that fit, tiles left over in both directions, tiny, none.
shapes = ((2, 24, 32), (1, 3, 160), (2, 130, 7), (3, 5, 1), (2, 4, 0))
for (rows, channels, steps), dtype in itertools.product(shapes, tolerance):
    for last, scaled, shifted in itertools.product((False, True), repeat=3):
        alpha, beta = random(channels), random(channels)
        offset = random(channels) if shifted and not scaled else None
        layer = SnakeBeta(alpha, beta, dtype, offset=offset, last=last, scaled=scaled)
        x = (3 * random(rows, channels, steps)).to(dtype)
        if last:
            x = x.transpose(1, 2).contiguous()
        kept = x.clone()
        seen, expected = layer.fused(x), layer(x)
        assert seen.dtype == dtype and seen.is_contiguous() and torch.equal(x, kept)
        torch.testing.assert_close(seen.float(), expected.float(), **tolerance[dtype])

@triton.jit
def cosines(angles, results, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(results + at, _cos(tl.load(angles + at)))

count = 1 << 16
for span in (4, 100, 20_000):
    angles = (torch.rand(count, generator=generator) * 2 - 1) * span
    results = torch.empty_like(angles)
    cosines[(1,)](angles, results, COUNT=count)
    assert (results - angles.double().cos()).abs().max() < 2e-7

def refused(x, magnitude):
    try:
        snake(x, magnitude, None, None, None)
    except ValueError as error:
        assert "dense" in str(error)
    else:
        raise AssertionError

refused(torch.ones(1, 4, 6).transpose(1, 2), torch.ones(6, 1))
refused(torch.ones(1, 4, 6), torch.ones(4, 1).double())
"""


def test_every_kind_of_snake_is_that_of_pytorch_when_interpreted() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-"],
        input=INTERPRETED,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pega_omni_plugin.nn.snake_triton import _snake

parameters = ("magnitude", "frequency", "phase", "lift")
for data in ("*bf16", "*fp32"):
    for last, columns, absent in ((True, 128, ()), (False, 32, ()), (False, 128, ("frequency", "phase", "lift"))):
        fixed = dict(LAST=last, LINES=1024 // columns, COLUMNS=columns) | dict.fromkeys(absent)
        types = dict(x=data, y=data) | dict.fromkeys(parameters, "*fp32")
        types |= dict.fromkeys(("lines", "width", "channels"), "i32") | dict.fromkeys(fixed, "constexpr")
        source = ASTSource(_snake, types, fixed)
        built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert built.asm["cubin"]
        assert ".local" not in built.asm["ptx"]  # all in registers
"""


def test_snakes_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
