"""The Triton operations give what the plain ones give, bit by bit but for the order of sums."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pega_omni_plugin.nn import kernels
from tests.nn.interpreted import interpret

INTERPRETED = """
import numpy, torch, triton
import triton.language as tl
from triton.runtime import interpreter
from pega_omni_plugin.nn.kernels import PLAIN
from pega_omni_plugin.nn.kernels_triton import TRITON

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
truncate = Builder.create_fp_trunc

def round_as_gpus_do(self, source, kind):
    # The interpreter cuts digits off where a GPU rounds to the nearest.
    if kind.scalar != tl.bfloat16:
        return truncate(self, source, kind)
    data = torch.from_numpy(numpy.atleast_1d(source.data).copy()).bfloat16().view(torch.int16).numpy()
    return Handle(data.view(numpy.uint16).reshape(source.data.shape), kind.scalar)

Builder.create_fp_trunc = round_as_gpus_do
torch.manual_seed(0)
eps, last_digit = 1e-6, {torch.float32: 2e-6, torch.bfloat16: 2**-7}

def check(seen, expected, most_different):
    assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
    assert seen.is_contiguous()
    assert (seen != expected).sum() <= most_different * seen.numel()
    tolerance = last_digit[seen.dtype]
    torch.testing.assert_close(seen.float(), expected.float(), atol=tolerance * 4, rtol=tolerance)

for dtype in (torch.float32, torch.bfloat16):
    # Sums in another order change the last of 24 bits, which rounding to 8 seldom shows.
    seldom = 0.005 if dtype == torch.bfloat16 else 1

    def random(*shape):
        return (3 * torch.randn(shape)).to(dtype)

    for shape in ((1, 512), (3, 1024), (2, 2048), (2, 3, 40), (0, 64)):
        x, residual, weight = random(*shape), random(*shape), random(shape[-1])
        gate_up = random(*shape[:-1], 2 * shape[-1])
        kept = x.clone()
        for each in (weight, None):
            check(TRITON.rms_norm(x, each, eps), PLAIN.rms_norm(x, each, eps), seldom)
        assert torch.equal(x, kept)
        check(TRITON.silu_mul(gate_up), PLAIN.silu_mul(gate_up), seldom)
        expected, total = PLAIN.add_rms_norm(x, residual, weight, eps)
        normed, summed = TRITON.add_rms_norm(x, residual, weight, eps)
        check(normed, expected, seldom)
        assert torch.equal(summed, total)
        assert normed.data_ptr() == x.data_ptr() and summed.data_ptr() == residual.data_ptr()
    for rows, heads, head_dim in ((3, 32, 128), (1, 32, 64), (2, 5, 24), (2, 1, 256)):
        x, weight, table = random(rows, heads, head_dim), random(heads, head_dim), random(50, head_dim)
        positions = torch.tensor([49, 0, 7])[:rows]
        kept = x.clone()
        check(TRITON.turn(x, weight, positions, table, eps), PLAIN.turn(x, weight, positions, table, eps), seldom)
        assert torch.equal(x, kept)

def refused(words, operation, *arguments):
    try:
        operation(*arguments)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

refused("contiguous", TRITON.rms_norm, torch.ones(4, 8)[:, :4], None, eps)
refused("float64", TRITON.silu_mul, torch.ones(4, 8).double())
refused("beside", TRITON.rms_norm, torch.ones(4, 8), torch.ones(8).bfloat16(), eps)
refused("hidden", TRITON.rms_norm, torch.ones(1, 8193), None, eps)
"""


def test_every_operation_gives_what_the_plain_one_gives_when_interpreted() -> None:
    interpret(INTERPRETED)


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pega_omni_plugin.nn.kernels_triton import _add_norm_rows, _norm_rows, _silu_rows, _turn_heads, warps

def build(kernel, data, warp_count, fixed, **more):
    signature = {name: data for name in kernel.arg_names if name not in fixed} | more
    source = ASTSource(kernel, signature | dict.fromkeys(fixed, "constexpr"), fixed)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warp_count})
    assert built.asm["cubin"]

for data, size in (("*bf16", 2), ("*fp32", 4)):
    for hidden in (1024, 2048):
        fixed = dict(HIDDEN=hidden, BLOCK=hidden)
        build(_norm_rows, data, warps(hidden, size), fixed, eps="fp32")
        build(_norm_rows, data, warps(hidden, size), fixed | dict(weight=None), eps="fp32")
        build(_add_norm_rows, data, warps(hidden, size), fixed, eps="fp32")
    build(_silu_rows, data, warps(1024, size), dict(INNER=3072, BLOCK=1024))
    for head_dim in (64, 128):
        block, half = 1024 // head_dim, head_dim // 2
        fixed = dict(HEADS=32, HEAD_DIM=head_dim, BLOCK=block, HALF=half)
        build(_turn_heads, data, warps(block * half, size), fixed, positions="*i64", eps="fp32")
"""


def test_every_operation_compiles_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_device_gets_its_own_operations_unless_others_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pega_omni_plugin.nn.kernels_triton import TRITON

    monkeypatch.setattr(kernels, "_used", None)
    assert kernels.current("cpu") is kernels.PLAIN
    assert kernels.current(torch.device("cuda", 1)) is TRITON
    others = kernels.Kernels()
    kernels.use(others)
    assert kernels.current("cpu") is others
    assert kernels.current("cuda") is others
