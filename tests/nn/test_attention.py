"""Attention over slots: right for every row, by either implementation, whatever shares the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pega_omni_plugin.nn.attention import READ_POSITIONS, DecodeRows, decode_attention, prefill_attention, sdpa_decode
from tests.nn.interpreted import interpret

Tensor = torch.Tensor
HEADS = [(4, 2, 32), (16, 8, 128), (8, 2, 64), (8, 1, 64), (4, 4, 16), (3, 1, 32)]
"""Heads, key heads, head dimension; the first two are those of Qwen3-TTS, tiny and real; the last have odd groups."""


@dataclass(frozen=True)
class Case:
    heads: int
    keys: Tensor
    values: Tensor
    slots: list[int]
    lengths: list[int]
    query: Tensor  # [rows, heads, head_dim]
    scale: float


@st.composite
def cases(draw: st.DrawFn, exact: bool = False) -> Case:
    """Rows in any order over any slots, some of them padding. ``exact``: shapes that promise equal bits."""
    heads, kv_heads, head_dim = draw(st.sampled_from(HEADS[:4] if exact else HEADS))
    positions = draw(st.integers(1, 30)) * READ_POSITIONS if exact else draw(st.integers(1, 700))
    slots = draw(st.permutations(range(1, 9)))[: draw(st.integers(1, 8))]
    if draw(st.booleans()):
        slots = sorted(slots)
    lengths = [draw(st.integers(1, positions)) for _ in slots]
    padding = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys, values = (random(9, positions, kv_heads, head_dim) for _ in range(2))
    query = random(len(slots) + padding, heads, head_dim)
    return Case(heads, keys, values, [*slots, *[0] * padding], [*lengths, *[1] * padding], query, head_dim**-0.5)


def expected(case: Case) -> Tensor:
    """Row by row, head by head, in float64."""
    group = case.heads // case.keys.shape[2]
    rows = []
    for query, slot, length in zip(case.query.double(), case.slots, case.lengths, strict=True):
        keys = case.keys[slot, :length].double().repeat_interleave(group, dim=1)  # [length, heads, head_dim]
        values = case.values[slot, :length].double().repeat_interleave(group, dim=1)
        weights = torch.einsum("hd,lhd->hl", query * case.scale, keys).softmax(-1)
        rows.append(torch.einsum("hl,lhd->hd", weights, values))
    return torch.stack(rows)


def attend(case: Case, rows: list[int]) -> Tensor:
    """The given rows of the case in one batch, in the given order."""
    prepared = DecodeRows.prepare([case.slots[row] for row in rows], [case.lengths[row] for row in rows], "cpu")
    return decode_attention(case.query[rows], case.keys, case.values, prepared, case.scale)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_every_row_attends_to_its_own_past(case: Case) -> None:
    seen = attend(case, list(range(len(case.slots))))
    real = torch.tensor(case.slots) > 0
    torch.testing.assert_close(seen[real].double(), expected(case)[real], atol=2e-5, rtol=1e-4)
    assert seen.isfinite().all()


@given(cases())
@settings(max_examples=25, deadline=None)
def test_rows_known_on_the_device_only_give_the_same(case: Case) -> None:
    rows = DecodeRows.on_device(torch.tensor(case.slots), torch.tensor(case.lengths), case.keys.shape[1])
    seen = sdpa_decode(case.query, case.keys, case.values, rows, case.scale)
    torch.testing.assert_close(seen.double(), expected(case), atol=2e-5, rtol=1e-4)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(case=cases(exact=True), data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bit_of_a_row_depends_on_company_or_place(dtype: torch.dtype, case: Case, data: st.DataObject) -> None:
    case = replace(case, keys=case.keys.to(dtype), values=case.values.to(dtype), query=case.query.to(dtype))
    count = len(case.slots)
    together = attend(case, list(range(count)))
    order = data.draw(st.permutations(range(count)))
    real = [row for row in order if case.slots[row]]
    assert torch.equal(attend(case, order)[[order.index(row) for row in real]], together[real])
    # The same number of rows, all padding but one.
    row = data.draw(st.sampled_from(real))
    place = data.draw(st.integers(0, count - 1))
    slots, lengths, query = [0] * count, [1] * count, torch.zeros_like(case.query)
    slots[place], lengths[place], query[place] = case.slots[row], case.lengths[row], case.query[row]
    alone = replace(case, slots=slots, lengths=lengths, query=query)
    assert torch.equal(attend(alone, list(range(count)))[place], together[row])


def test_what_lies_beyond_a_length_is_never_seen() -> None:
    keys, values = torch.randn(2, 4, 64, 2, 32)
    query = torch.randn(3, 4, 32)
    before = decode_attention(query, keys, values, DecodeRows.prepare([1, 2, 3], [5, 64, 9], "cpu"), 0.2)
    for cache in (keys, values):
        cache[1, 5:] = 1e9
        cache[3, 9:] = -1e9
    after = decode_attention(query, keys, values, DecodeRows.prepare([1, 2, 3], [5, 64, 9], "cpu"), 0.2)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("slots", "first", "ordered"),
    [
        ([3], 3, False),
        ([2, 3, 4], 2, False),
        ([4, 2, 3], 2, True),
        ([1, 2, 4, 5], 1, True),
        ([7, 8, 0, 0, 0, 0], 7, True),
        ([0, 5, 0], 5, True),
        ([0], 0, False),
        ([0, 0], 0, True),
        ([1, 8], None, False),
        ([2, 8, 0, 0], None, False),
    ],
)
def test_only_slots_far_apart_are_copied(slots: list[int], first: int | None, ordered: bool) -> None:
    rows = DecodeRows.prepare(slots, [1] * len(slots), "cpu")
    assert rows.first == first
    assert (rows.order is not None) == (rows.back is not None) == ordered
    cache = torch.randn(9, 3, 2, 16)
    assert (rows.read(cache).untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()) == (first is not None)


def test_caches_may_be_a_part_of_a_larger_tensor() -> None:
    both = torch.randn(3, 5, 8, 2, 2, 32)  # [layers, slots, positions, keys or values, kv_heads, head_dim]
    keys, values = both[1].unbind(2)
    query = torch.randn(2, 4, 32)
    rows = DecodeRows.prepare([2, 3], [8, 3], "cpu")
    seen = decode_attention(query, keys, values, rows, 0.2)
    assert torch.equal(seen, decode_attention(query, keys.clone(), values.clone(), rows, 0.2))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [[7], [1, 40, 300]])
def test_a_prompt_at_once_equals_one_position_after_another(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int
) -> None:
    tokens = sum(lengths)
    query = torch.randn(tokens, heads, head_dim)
    keys, values = torch.randn(2, tokens, kv_heads, head_dim)
    spans = [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
    seen = prefill_attention(query, keys, values, spans, 0.1)
    for start, length in spans:
        # Every position as a row of its own, over one cache that all of them read.
        part = slice(start, start + length)
        one = DecodeRows.on_device(torch.zeros(length, dtype=torch.int64), torch.arange(1, length + 1), length)
        steps = sdpa_decode(query[part], keys[None, part], values[None, part], one, 0.1)
        torch.testing.assert_close(seen[part], steps, atol=1e-5, rtol=1e-4)


def test_a_prompt_is_the_same_to_the_bit_in_any_company() -> None:
    query, keys, values = torch.randn(60, 4, 32), torch.randn(60, 2, 32), torch.randn(60, 2, 32)
    together = prefill_attention(query, keys, values, [(0, 11), (11, 30), (41, 19)], 0.2)
    alone = prefill_attention(query[11:41], keys[11:41], values[11:41], [(0, 30)], 0.2)
    assert torch.equal(together[11:41], alone)


INTERPRETED = """
import torch
from pega_omni_plugin.nn.attention import READ_POSITIONS, DecodeRows, sdpa_decode, triton_decode
from pega_omni_plugin.nn import attention_triton

torch.manual_seed(0)
# The interpreter multiplies bfloat16 as if it were integers.
tolerance = {torch.float32: 2e-6, torch.float16: 2e-3}
for heads, kv_heads, head_dim, positions, rows, dtype, programs in [
    (4, 2, 32, 270, 2, torch.float32, 256),
    (4, 2, 32, 120, 3, torch.float32, 1),  # one split of several tiles, as where rows fill the device
    (16, 8, 128, 150, 2, torch.float16, 32),
    (8, 1, 64, 90, 2, torch.float32, 256),
    (2, 1, 16, 20, 2, torch.float32, 256),
]:
    attention_triton.PROGRAMS = programs
    keys, values = torch.randn(2, rows + 1, positions, kv_heads, head_dim).to(dtype)
    # As models have it: a part of a fused projection.
    query = torch.randn(rows, heads + kv_heads, head_dim).to(dtype)[:, :heads]
    slots = torch.randperm(rows) + 1
    lengths = torch.randint(1, positions + 1, (rows,))
    lengths[0], slots[-1], lengths[-1] = positions, 0, 1
    every = DecodeRows.on_device(slots, lengths, positions)
    scale = head_dim**-0.5
    seen = triton_decode(query, keys, values, every, scale)
    assert seen.dtype == dtype
    expected = sdpa_decode(query.float(), keys.float(), values.float(), every, scale)
    torch.testing.assert_close(seen.float(), expected, atol=tolerance[dtype], rtol=tolerance[dtype])
    tile = 32 if dtype == torch.float32 else 64
    print("splits", attention_triton.splits(rows, kv_heads, positions, tile))
    # Bits of a row do not depend on the others.
    slots[1:], lengths[1:] = 0, 1
    again = triton_decode(query, keys, values, DecodeRows.on_device(slots, lengths, positions), scale)
    assert torch.equal(again[0], seen[0])
"""


def test_triton_kernels_agree_with_sdpa_when_interpreted() -> None:
    printed = interpret(INTERPRETED)
    assert {line for line in printed.splitlines() if line.startswith("splits")} == {
        "splits 1",
        "splits 2",
        "splits 8",
    }


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pega_omni_plugin.nn.attention_triton import _attend, _combine

hopper = GPUTarget("cuda", 90, 32)
data, state = "*bf16", "*fp32"
signature = dict(query=data, keys=data, values=data, slots="*i64", lengths="*i64", output=data)
signature |= dict(sums=state, totals=state, scale="fp32")
signature |= dict.fromkeys(("query_stride", "slot_stride", "position_stride", "head_stride"), "i32")
for parts in (1, 8):
    fixed = dict(SPLITS=parts, GROUP=2, HEAD_DIM=128, TILE=64)
    source = ASTSource(_attend, signature | dict.fromkeys(fixed, "constexpr"), fixed)
    built = compile(source, target=hopper, options={"num_warps": 4, "num_stages": 2})
    assert built.asm["cubin"]
    assert built.metadata.shared <= 99 * 1024
fixed = dict(SPLITS=8, HEAD_DIM=128)
signature = dict(sums=state, totals=state, output=data) | dict.fromkeys(fixed, "constexpr")
assert compile(ASTSource(_combine, signature, fixed), target=hopper, options={"num_warps": 1}).asm["cubin"]
"""


def test_triton_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
