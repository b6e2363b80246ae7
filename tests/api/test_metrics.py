from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pega_omni_plugin.api.metrics import Metrics
from pega_omni_plugin.engine.errors import EngineDead
from pega_omni_plugin.engine.shared import BATCH_BOUNDS, TIME_BOUNDS, EngineStats, Histogram, stats_document
from tests.api.fake_engine import FakeEngine


def scrape(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Every sample of a scrape, by name and the values of its labels besides the model."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "model")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def metrics(engine: FakeEngine) -> Metrics:
    return Metrics(CollectorRegistry(), engine, "m")


def test_every_sample_names_the_model(metrics: Metrics, engine: FakeEngine) -> None:
    engine.stats = stats_document(EngineStats())
    metrics.ended("complete")
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    assert families
    assert {sample.labels["model"] for family in families for sample in family.samples} == {"m"}
    assert all(family.name.startswith("pega_") for family in families)


def test_requests_are_counted_by_outcome(metrics: Metrics) -> None:
    for outcome in ("complete", "complete", "failed", "engine_dead"):
        metrics.ended(outcome)
    seen = scrape(metrics.registry)
    assert seen["pega_requests_total", "complete"] == 2
    assert seen["pega_requests_total", "failed"] == seen["pega_requests_total", "engine_dead"] == 1


def test_times_and_audio_are_observed(metrics: Metrics) -> None:
    metrics.first_audio(0.004)
    metrics.complete(0.3)
    metrics.audio(1.5)
    metrics.audio(0.25)
    seen = scrape(metrics.registry)
    assert seen["pega_first_audio_seconds_bucket", "0.002"] == 0
    assert seen["pega_first_audio_seconds_bucket", "0.005"] == 1
    assert seen["pega_request_seconds_sum",] == 0.3
    assert seen["pega_audio_seconds_total",] == 1.75


def test_an_engine_is_up_until_it_is_dead(metrics: Metrics, engine: FakeEngine) -> None:
    assert scrape(metrics.registry)["pega_engine_up",] == 1
    engine.dead = EngineDead("gone")
    assert scrape(metrics.registry)["pega_engine_up",] == 0


def test_before_the_engine_was_asked_there_are_no_counters_of_its(metrics: Metrics) -> None:
    names = {name for name, *_ in scrape(metrics.registry)}
    assert "pega_in_flight" in names
    assert not any(name.startswith(("pega_step", "pega_part", "pega_queue")) for name in names)


def test_the_engines_counters_are_those_it_was_last_asked_for(metrics: Metrics, engine: FakeEngine) -> None:
    stats = EngineStats(
        slots=64, waiting=3, running=5, steps=7, frames=11, messages=13, admitted=17, aborted=1, failed=2
    )
    stats.part_seconds = {"thinker": 1.5, "codec": 0.5}
    stats.finished = {"stop": 9, "silence": 2}
    for seconds in (0.0001, 0.0005, 0.03, 99.0):
        stats.step_seconds.observe(seconds)
    stats.batch.observe(3)
    engine.stats = stats_document(stats)
    seen = scrape(metrics.registry)
    expected = {
        "pega_engine_slots": 64,
        "pega_engine_waiting": 3,
        "pega_engine_running": 5,
        "pega_engine_steps_total": 7,
        "pega_engine_frames_total": 11,
        "pega_engine_messages_total": 13,
        "pega_engine_admitted_total": 17,
        "pega_engine_aborted_total": 1,
        "pega_engine_failed_total": 2,
    }
    assert {name: seen[name,] for name in expected} == expected
    assert seen["pega_part_seconds_total", "thinker"] == 1.5
    assert seen["pega_part_seconds_total", "codec"] == 0.5
    assert {name[1]: count for name, count in seen.items() if name[0] == "pega_finished_total"} == {
        "stop": 9,
        "silence": 2,
    }
    assert seen["pega_step_seconds_bucket", "0.0005"] == 2
    assert seen["pega_step_seconds_bucket", "0.02"] == 2
    assert seen["pega_step_seconds_bucket", "0.04"] == 3
    assert seen["pega_step_seconds_bucket", "10.24"] == 3
    assert seen["pega_step_seconds_bucket", "+Inf"] == seen["pega_step_seconds_count",] == 4
    assert seen["pega_step_seconds_sum",] == pytest.approx(99.0306)
    assert seen["pega_batch_rows_sum",] == 3
    assert seen["pega_queue_seconds_count",] == 0


def test_every_counter_of_the_engine_is_in_a_scrape(metrics: Metrics, engine: FakeEngine) -> None:
    """A new field of the statistics is not forgotten here."""
    engine.stats = stats_document(EngineStats(finished={"stop": 0}, part_seconds={"thinker": 0.0}))
    names = {name for name, *_ in scrape(metrics.registry)}
    for field in stats_document(EngineStats()):
        assert any(field in name or field.removesuffix("s") in name for name in names), field


@pytest.mark.parametrize("bounds", [TIME_BOUNDS, BATCH_BOUNDS])
def test_a_value_counts_in_the_first_bucket_that_holds_it(bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds)
    for bound in bounds:
        histogram.observe(bound)
    histogram.observe(bounds[-1] * 2)
    assert histogram.counts == [1] * (len(bounds) + 1)
    assert histogram.total == pytest.approx(sum(bounds) + bounds[-1] * 2)
