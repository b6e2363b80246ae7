"""The benchmark of the step: it runs, and what it holds the figures against is counted right."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from pega_omni_plugin.bench.step import StepWork, Work, build, describe, main, write_config


def test_every_size_that_was_asked_for_gives_a_line_and_the_same_figures_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    options = ["--dims", "tiny", "--rows", "1", "2", "--frames", "3", "--positions", "128", "--device", "cpu"]
    roofline = ["--bandwidth", "4.3", "--tflops", "790"]
    assert main(["qwen3-tts", *options, *roofline, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [row["rows"] for row in document["rows"]] == [1, 2]
    assert all(row["step_ms"] > row["roofline_ms"] > 0 and row["first_ms"] > 0 for row in document["rows"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines[1:]] == ["rows   1", "rows   2"]


def test_all_parameters_of_the_decoder_are_counted() -> None:
    program, parameters = build(
        Namespace(device="cpu", dims="tiny", positions=128, deterministic=False, rows=[1], eager=False)
    )
    codec = program.config.codec
    assert parameters > codec.quantizers * codec.codebook_size * codec.codebook_dim // 2  # its codebooks alone


@pytest.mark.parametrize(("dims", "published"), [("0.6b", 0.44e9), ("1.7b", 1.41e9)])
def test_the_published_talkers_have_as_many_parameters_as_published(
    tmp_path: Path, dims: str, published: float
) -> None:
    work = describe(write_config(tmp_path, dims), 114_000_000, 2)
    assert work.talker.read / 2 == pytest.approx(published, rel=0.02)
    assert work.talker.flops == work.talker.read
    assert work.kv_per_token == 114_688


def test_each_part_takes_the_longer_of_reading_and_computing() -> None:
    work = StepWork(Work(100, 1), Work(10, 40), Work(1, 1), kv_per_token=2)
    # Reading 100 + 3 rows * 5 tokens * 2; computing 3 * 40; computing 3 * 1.
    assert work.seconds(3, 5, bandwidth=1.0, flops=1.0) == 130 + 120 + 3
