"""The plain operations are their equations; which ones run is chosen when a program is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pega_omni_plugin.nn import kernels
from pega_omni_plugin.nn.kernels import PLAIN

Tensor = torch.Tensor
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}.get(
        dtype, {"rtol": 2e-2, "atol": 2e-2}
    )


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + EPS)
    return normed if weight is None else normed * weight.double()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (2, 3, 16)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], weighted: bool) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1) if weighted else None
    before = x.clone()
    found = PLAIN.rms_norm(x, weight, EPS)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), norm(x, weight), **tolerance(dtype))
    assert torch.equal(x, before)


def test_rms_norm_of_nothing_and_of_little_is_finite() -> None:
    """``eps`` bounds it: the norm of zeros is zeros."""
    assert not PLAIN.rms_norm(torch.zeros(2, 8), None, EPS).any()
    assert PLAIN.rms_norm(torch.full((1, 8), 1e-20), None, EPS).abs().max() < 1e-16


def test_rms_norm_is_made_in_float32() -> None:
    """In bfloat16, a sum of a thousand squares would not be."""
    x = torch.ones(1, 1024, dtype=torch.bfloat16)
    assert torch.equal(PLAIN.rms_norm(x, None, 0.0), x)


@DTYPES
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (random(4, 32, dtype=dtype, seed=seed) for seed in range(3))
    total = x + residual
    normed, summed = PLAIN.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed.double(), norm(total, weight), **tolerance(dtype))


@DTYPES
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(3, 40, dtype=dtype)
    gate, up = gate_up[:, :20].double(), gate_up[:, 20:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(PLAIN.silu_mul(gate_up.clone()).double(), expected, **tolerance(dtype))


@DTYPES
def test_turn_norms_heads_and_rotates_them_by_their_position(dtype: torch.dtype) -> None:
    rows, heads, dim = 4, 3, 16
    x, weight = random(rows, heads, dim, dtype=dtype), random(heads, dim, dtype=dtype, seed=1)
    positions = torch.tensor([5, 0, 29, 5])
    angles = torch.outer(torch.arange(30.0), 100.0 ** (-torch.arange(dim // 2) / (dim / 2)))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    before = x.clone()
    found = PLAIN.turn(x, weight, positions, table, EPS)
    assert torch.equal(x, before)
    # As complex numbers: dimension i is real, dimension i + dim / 2 imaginary.
    normed = norm(x, weight)
    numbers = torch.complex(normed[..., : dim // 2], normed[..., dim // 2 :])
    turned = numbers * torch.polar(torch.ones(1, dtype=torch.float64), angles.double())[positions][:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    # The table is rounded to the dtype.
    torch.testing.assert_close(
        found.double(), expected, **(tolerance(dtype) if dtype != torch.float64 else {"rtol": 1e-6, "atol": 1e-6})
    )
    assert found.dtype == dtype


def test_operations_put_in_place_serve_what_is_loaded_from_then_on() -> None:
    assert kernels.current("cpu") is PLAIN
    other = replace(PLAIN, silu_mul=lambda gate_up: gate_up)
    kernels.use(other)
    assert kernels.current("cpu") is other
    assert kernels.current(torch.device("cuda:0")) is other
