from __future__ import annotations

import argparse
import math

import pytest

from pega_omni_plugin.bench.arguments import add_arguments, config


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def test_defaults() -> None:
    args = parse()
    assert (args.base_url, args.model, args.num_requests) == ("http://127.0.0.1:8000", None, 1000)
    assert (args.request_rate, args.max_concurrency, args.timeout, args.seed) == (math.inf, 256, 600, 0)
    assert (args.voice, args.response_format, args.stream_format, args.sample_rate) == ("alloy", "pcm", "audio", 24000)


def test_values() -> None:
    args = parse("--ramp", "1,8,16.5", "--extra", '{"frames": 3}', "--request-rate", "2.5")
    assert (args.ramp, args.extra, args.request_rate) == ([1, 8, 16.5], {"frames": 3}, 2.5)
    assert parse("--request-rate", "inf").request_rate == math.inf


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-requests", "0"), "must be at least 1"),
        (("--num-requests", "-1"), "expected a whole number, got '-1'"),
        (("--max-concurrency", "2.5"), "expected a whole number"),
        (("--request-rate", "0"), "expected a number above 0, or inf"),
        (("--request-rate", "nan"), "expected a number above 0, or inf"),
        (("--request-rate", "fast"), "expected a number above 0, or inf"),
        (("--timeout", "inf"), "must be finite"),
        (("--ramp", "8,8"), "levels must rise"),
        (("--ramp", "8,4"), "levels must rise"),
        (("--ramp", "8,,4"), "expected a number above 0"),
        (("--extra", "{"), "not JSON"),
        (("--body", "[1]"), "expected a JSON object"),
        (("--out", "no/such/directory/x.json"), "no such directory: no/such/directory"),
        (("--ramp", "1", "--baseline"), "not allowed with"),
        (("--response-format", "mp3"), "invalid choice"),
    ],
)
def test_wrong_flag_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit):
        parse(*flags)
    assert message in capsys.readouterr().err


def test_config_holds_every_flag_that_shapes_the_run() -> None:
    flags = set(vars(parse())) - {"out", "chart", "timeout"}
    assert set(config(parse(), "served")) == flags | {"timeout_s"}
    assert config(parse(), "served")["model"] == "served"
