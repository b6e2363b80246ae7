"""Draws in one Triton kernel are those of ``nn.sampling``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.nn.interpreted import interpret

INTERPRETED = """
import numpy, torch
from pega_omni_plugin.nn import sampling
from pega_omni_plugin.nn.sampling_triton import draw, draw_first

generator = torch.Generator().manual_seed(0)

def settings(rows):
    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]
    return pick(0.0, 0.3, 0.9, 2.0), pick(0, 1, 3, 50, 299, 5000), pick(1.0, 0.95, 0.5, 0.0)

def reference(logits, uniforms, temperature, top_k, top_p):
    drawn = sampling.draw(logits, uniforms, temperature, top_k, top_p, most_k=logits.shape[1], nucleus=True)
    rows = sampling.RowSettings(temperature.numpy(), top_k.numpy(), top_p.numpy())
    assert drawn.tolist() == sampling.draw_numpy(logits.numpy(), uniforms.numpy(), rows).tolist()
    return drawn

# Rows of any settings beside each other; the vocabulary of the predictor, and those that fill no block.
for rows, vocabulary in ((24, 300), (4, 2048), (2, 2049), (12, 5)):
    logits = 3 * torch.randn(rows, vocabulary + 3, generator=generator)[:, :vocabulary]
    logits[1::3, ::7] = -torch.inf
    uniforms = torch.rand(rows, generator=generator)
    temperature, top_k, top_p = settings(rows)
    expected = reference(logits, uniforms, temperature, top_k, top_p)
    seen = draw(logits, uniforms, temperature, top_k, top_p, most_k=vocabulary, nucleus=True)
    assert seen.dtype == torch.int64 and seen.tolist() == expected.tolist()

# Ties: with the k-th largest, at zero of either sign, in a greedy row.
logits = (torch.randn(20, 60, generator=generator) * 2).round() / 2
logits[::2] -= 2.0
logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum()), generator=generator) < 0.5, -1.0, 1.0)
assert (logits == 0).sum() > 50 and torch.signbit(logits[logits == 0]).float().mean() > 0.3
uniforms, (temperature, _, _) = torch.rand(20, generator=generator), settings(20)
for top_k in (2, 7, 30):
    arguments = logits, uniforms, temperature, torch.full((20,), top_k), torch.ones(20)
    assert draw(*arguments, most_k=60, nucleus=False).tolist() == reference(*arguments).tolist()

def reachable(logits, top_k, top_p):
    # Every code that any number draws.
    uniforms = torch.linspace(0, 1 - 2**-24, 16)
    many = [torch.full((16,), value) for value in (1.0, top_k, top_p)]
    return set(draw(torch.tensor(logits).repeat(16, 1), uniforms, *many, most_k=5, nucleus=True).tolist())

# The edge of top_p within a tie keeps the whole tie; the likeliest code stays even for 0.
tie = [1.0, 3.0, 1.0, 1.0, -20.0]
assert reachable(tie, 0, 0.8) == {0, 1, 2, 3}
assert reachable(tie, 0, 0.7) == {1}
assert reachable(tie, 0, 0.0) == {1}
assert reachable(tie, 2, 1.0) == {0, 1, 2, 3}

# Logits that are no numbers give a code at least.
code = draw(torch.full((2, 5), torch.nan), torch.rand(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 3]), torch.ones(2),
            most_k=5, nucleus=True)
assert ((code >= 0) & (code < 5)).all()

# The frame's first code: slots in any order, three frames one after the other.
rows, slots, vocabulary = 9, 12, 70
seen = torch.rand(slots + 1, vocabulary, generator=generator) < 0.3
expected_seen = seen.clone()
order = torch.randperm(slots, generator=generator)[:rows] + 1
penalty = torch.tensor([1.0, 1.05, 3.0] * 3)
marked = 0
for early in (torch.tensor([1, 0, 1] * 3), torch.zeros(rows, dtype=torch.bool), torch.ones(rows, dtype=torch.int64)):
    logits = 2 * torch.randn(rows, vocabulary, generator=generator)
    logits[:, -1] = 6.0
    kept = logits.clone()
    uniforms, chosen = torch.rand(rows, generator=generator), settings(rows)
    scores = sampling.penalise(logits, expected_seen[order], penalty)
    scores[early.bool(), -1] = -torch.inf
    expected = reference(scores, uniforms, *chosen)
    expected_seen[order, expected] = True
    drawn = draw_first(logits, seen, order, penalty, early, uniforms, *chosen)
    assert drawn.dtype == torch.int64 and drawn.tolist() == expected.tolist()
    assert torch.equal(seen, expected_seen) and torch.equal(logits, kept)
    ended = drawn == vocabulary - 1
    assert not ended[early.bool()].any()
    marked += int(ended.sum())
assert marked > 1

def refused(words, logits):
    try:
        draw(logits, *(torch.ones(1) for _ in range(4)), most_k=1, nucleus=True)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

refused("4096", torch.zeros(1, 4097))
refused("dense", torch.zeros(5, 2).T[:1])
"""


def test_every_draw_is_that_of_pytorch_and_numpy_when_interpreted() -> None:
    interpret(INTERPRETED)


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pega_omni_plugin.nn.sampling_triton import _draw, _draw_first, warps

floats = ("uniforms", "temperature", "top_p", "penalty")
signature = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("top_k", "codes", "slots", "early"), "*i64")
signature |= dict(seen="*i1", row_stride="i32")

def build(kernel, logits, fixed):
    types = {name: (signature | dict(logits=logits))[name] for name in kernel.arg_names if name not in fixed}
    source = ASTSource(kernel, types | dict.fromkeys(fixed, "constexpr"), fixed)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps(fixed["BLOCK"])})
    assert built.asm["cubin"]

build(_draw, "*fp32", dict(VOCABULARY=2048, BLOCK=2048))
build(_draw_first, "*bf16", dict(VOCABULARY=2049, BLOCK=4096))
"""


def test_draws_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
