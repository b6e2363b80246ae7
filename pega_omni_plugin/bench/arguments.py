"""The flags of ``pega-omni bench speech``, checked one by one."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import orjson


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``pega-omni bench speech``."""
    parser.description = (
        "Send speech requests and report time to first audio, real-time factor and playback underruns. Times count "
        "from the moment a request was due. Exit code 2 if any request failed, 1 if the run could not be made."
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="with or without /v1 (%(default)s)")
    server.add_argument("--model", help="default: the one that /v1/models lists")
    server.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="per request (%(default)g)")

    request = parser.add_argument_group("requests")
    request.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line, used in turn")
    request.add_argument("--input-chars", type=positive, default=120, help="of made-up prompts (%(default)s)")
    request.add_argument("--voice", default="alloy", help="(%(default)s)")
    request.add_argument("--response-format", choices=("pcm", "wav"), default="pcm", help="(%(default)s)")
    request.add_argument("--stream-format", choices=("audio", "sse"), default="audio", help="(%(default)s)")
    request.add_argument("--sample-rate", type=positive, default=24000, help="of pcm; wav tells its own (%(default)s)")
    request.add_argument("--extra", type=_json_object, default={}, metavar="JSON", help="the request's extra object")
    request.add_argument(
        "--body", type=_json_object, default={}, metavar="JSON", help='more top-level fields, as {"stream": true}'
    )

    load = parser.add_argument_group("load")
    load.add_argument("--num-requests", type=positive, default=1000, help="per level (%(default)s)")
    load.add_argument(
        "--request-rate", type=_rate, default=math.inf, help="Poisson arrivals a second; inf: closed loop (%(default)s)"
    )
    load.add_argument("--max-concurrency", type=positive, default=256, help="requests under way (%(default)s)")
    load.add_argument("--warmup", type=natural, default=0, help="uncounted requests first, at once (%(default)s)")
    load.add_argument("--seed", type=natural, default=0, help="of the arrival times (%(default)s)")
    form = load.add_mutually_exclusive_group()
    form.add_argument("--ramp", type=_levels, metavar="A,B,C", help="rising levels, up to the first that is not clean")
    form.add_argument(
        "--baseline", action="store_true", help="as many requests again, in turn, to a bare route with as much audio"
    )
    load.add_argument(
        "--ramp-by", choices=("concurrency", "rate"), default="concurrency", help="what --ramp raises (%(default)s)"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=writable, metavar="FILE", help="JSON of config, summary and records")
    output.add_argument("--chart", type=writable, metavar="FILE", help="PNG of the levels of --ramp")
    output.add_argument("--label", default="", help="title of the tables and the chart")


def config(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What the JSON document says of the run: the flags that shape it, with the model that was served."""
    return {
        "base_url": args.base_url,
        "model": model,
        "timeout_s": args.timeout,
        "prompts": args.prompts and str(args.prompts),
        "input_chars": args.input_chars,
        "voice": args.voice,
        "response_format": args.response_format,
        "stream_format": args.stream_format,
        "sample_rate": args.sample_rate,
        "extra": args.extra,
        "body": args.body,
        "num_requests": args.num_requests,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "warmup": args.warmup,
        "seed": args.seed,
        "ramp": args.ramp,
        "ramp_by": args.ramp_by if args.ramp else None,
        "baseline": args.baseline,
        "label": args.label,
    }


def natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    value = natural(text)
    if not value:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, or inf, got {text!r}")
    return value


def _seconds(text: str) -> float:
    value = _rate(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("must be finite")
    return value


def _levels(text: str) -> list[float]:
    levels = [_seconds(part) for part in text.split(",")]
    if any(later <= earlier for earlier, later in itertools.pairwise(levels)):
        raise argparse.ArgumentTypeError(f"levels must rise, got {text!r}")
    return levels


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def writable(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {path.parent}")
    return path
