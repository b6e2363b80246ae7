"""What end-to-end tests ask of a server besides audio."""

from __future__ import annotations

import asyncio
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

BAD_BODIES: list[tuple[str, bytes, int, str | None]] = [
    ("not JSON", b"{input:", 400, None),
    ("an array", b"[1]", 400, None),
    ("a wrong type", b'{"input": 5}', 400, "input"),
    ("no input", b"{}", 400, "input"),
    ("an unknown field", b'{"input": "a", "temprature": 1}', 400, "temprature"),
    ("empty input", b'{"input": ""}', 400, "input"),
    ("blank input", b'{"input": " \\n "}', 400, "input"),
    ("over-long input", b'{"input": "' + b"a" * 4097 + b'"}', 400, "input"),
    ("an unknown voice", b'{"input": "a", "voice": "nobody"}', 400, "voice"),
    ("an unknown model", b'{"input": "a", "model": "gpt-9"}', 404, "model"),
    ("a NUL", b'{"input": "a\\u0000b"}', 400, "input"),
    ("5 MB", b'{"input": "' + b"a" * 5_000_000 + b'"}', 413, None),
    ("speed 9", b'{"input": "a", "speed": 9}', 400, "speed"),
    ("an unknown format", b'{"input": "a", "response_format": "exe"}', 400, "response_format"),
    ("an unknown option", b'{"input": "a", "extra": {"pitch": 1}}', 400, "extra"),
]


def metric(text: str, name: str, **labels: str) -> float:
    """The value of a sample in Prometheus' text format, summed over what ``labels`` leave open; 0 when absent."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
    )


async def eventually(url: str, name: str, value: float, seconds: float = 10.0, **labels: str) -> None:
    """Wait until a metric has ``value``."""
    deadline = time.monotonic() + seconds
    async with httpx.AsyncClient() as http:
        while True:
            seen = metric((await http.get(url + "/metrics")).text, name, **labels)
            if seen == value:
                return
            assert time.monotonic() < deadline, f"{name} is {seen}, expected {value}"
            await asyncio.sleep(0.2)
