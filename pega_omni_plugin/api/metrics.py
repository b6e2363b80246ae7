"""Prometheus metrics of a serving process: requests as callers saw them, and the engine's own counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pega_omni_plugin.engine.stream import SpeechEngine

Outcome = Literal["complete", "failed", "cancelled", "invalid", "rejected", "timed_out", "engine_dead"]

_FIRST_AUDIO = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters of this process. ``registry`` is Prometheus' default one under ``vllm serve``."""

    def __init__(self, registry: CollectorRegistry, client: SpeechEngine, model: str) -> None:
        self.registry = registry
        self._requests = Counter(
            "pega_requests", "Speech requests by how they ended", ["model", "outcome"], registry=registry
        )
        self._first_audio = Histogram(
            "pega_first_audio_seconds",
            "From a request's arrival to its first audio",
            ["model"],
            buckets=_FIRST_AUDIO,
            registry=registry,
        ).labels(model)
        self._whole = Histogram(
            "pega_request_seconds",
            "From a request's arrival to its last audio",
            ["model"],
            buckets=_WHOLE,
            registry=registry,
        ).labels(model)
        self._audio = Counter("pega_audio_seconds", "Seconds of audio delivered", ["model"], registry=registry).labels(
            model
        )
        self._model = model
        registry.register(_EngineCollector(client, model))

    def ended(self, outcome: Outcome) -> None:
        """Count a request."""
        self._requests.labels(model=self._model, outcome=outcome).inc()

    def first_audio(self, seconds: float) -> None:
        """Observe the time to first audio."""
        self._first_audio.observe(seconds)

    def complete(self, seconds: float) -> None:
        """Observe the whole duration of a request that completed."""
        self._whole.observe(seconds)

    def audio(self, seconds: float) -> None:
        """Count audio delivered."""
        self._audio.inc(seconds)


class _EngineCollector(Collector):
    """The engine's counters, as the client last read them (once a second)."""

    def __init__(self, client: SpeechEngine, model: str) -> None:
        self._client = client
        self._labels = [model]

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Metric families in Prometheus' form."""
        yield self._gauge("pega_engine_up", "1 while the engine process lives", 0 if self._client.dead else 1)
        yield self._gauge("pega_in_flight", "Requests submitted and not yet over", self._client.in_flight)
        stats = self._client.stats
        if not stats:
            return
        yield self._gauge("pega_engine_slots", "Slots of the program", stats["slots"])
        yield self._gauge("pega_engine_running", "Requests that hold a slot", stats["running"])
        yield self._gauge("pega_engine_waiting", "Requests that wait for a slot", stats["waiting"])
        for name, text in (
            ("steps", "Steps of the program"),
            ("frames", "Frames of completed requests"),
            ("messages", "Messages sent to the API process"),
            ("admitted", "Requests that got a slot"),
            ("aborted", "Requests aborted by their callers"),
            ("failed", "Requests that the program failed"),
        ):
            yield self._counter(f"pega_engine_{name}", text, stats[name])
        finished = CounterMetricFamily("pega_finished", "Requests that ended, by reason", labels=["model", "reason"])
        for reason, count in stats["finished"].items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        parts = CounterMetricFamily("pega_part_seconds", "Time spent in a part", labels=["model", "part"])
        for part, seconds in stats["part_seconds"].items():
            parts.add_metric([*self._labels, part], seconds)
        yield parts
        yield self._histogram("pega_queue_seconds", "Wait for a slot", stats["queue_seconds"])
        yield self._histogram("pega_step_seconds", "Duration of a step", stats["step_seconds"])
        yield self._histogram("pega_batch_rows", "Slots advanced in a step", stats["batch"])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model"])
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, values: Mapping[str, Any]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model"])
        seen = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, values["bounds"]), "+Inf"], values["counts"], strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(self._labels, buckets, sum_value=values["sum"])
        return family
