"""The broker's metrics in the format of Prometheus."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition import yielding
from portalmq.broker.server.gauges import KEPT_S, MANY_LAGS, GaugeCollector, Gauges, GroupLag, PartitionGauge

SERIES = 50


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_messages_are_counted_by_topic_and_group():
    metrics = Metrics("1.2.3")
    metrics.published("t", 3, 30)
    metrics.published("t", 2, 20)
    metrics.delivered("t", "g", 4, 1)
    metrics.acked("t", "g", 4)
    metrics.dead("t", "g", 2)
    metrics.expired("t", "g", 7)
    metrics.committed(0.002)
    found = samples(metrics)
    assert found["portalmq_messages_published_total", (("topic", "t"),)] == 5
    assert found["portalmq_bytes_published_total", (("topic", "t"),)] == 50
    assert found["portalmq_messages_delivered_total", (("group", "g"), ("topic", "t"))] == 4
    assert found["portalmq_messages_redelivered_total", (("group", "g"), ("topic", "t"))] == 1
    assert found["portalmq_messages_acked_total", (("group", "g"), ("topic", "t"))] == 4
    assert found["portalmq_messages_dead_total", (("group", "g"), ("topic", "t"))] == 2
    assert found["portalmq_messages_expired_total", (("group", "g"), ("topic", "t"))] == 7
    assert found["portalmq_storage_commit_duration_seconds_count", ()] == 1
    assert found["portalmq_build_info", (("version", "1.2.3"),)] == 1


def test_a_deleted_topic_and_a_deleted_group_lose_their_series():
    metrics = Metrics("0")
    for topic in ("t", "u"):
        metrics.published(topic, 1, 1)
        metrics.delivered(topic, "g", 1, 0)
    metrics.acked("t", "g", 1)
    metrics.forget_topic("t")
    metrics.forget_topic("never there")
    assert not [key for key in samples(metrics) if ("topic", "t") in key[1]]
    metrics.forget_group("g")
    assert not [key for key in samples(metrics) if ("group", "g") in key[1]]


def test_the_state_is_read_when_it_is_asked_for():
    metrics = Metrics("0")
    lags = [GroupLag("t", 0, "g", 5, 1.5, True)]
    state = Gauges(lags, [PartitionGauge("t", 0, True, 2, 9)], {"log": 100}, True, open_orders=7)
    asked = []
    metrics.registry.register(GaugeCollector(lambda: asked.append(1) or state))
    assert not asked
    found = samples(metrics)
    place = (("partition", "0"), ("topic", "t"))
    assert found["portalmq_group_lag_messages", (("group", "g"), *place)] == 5
    assert found["portalmq_oldest_unacked_age_seconds", (("group", "g"), *place)] == 1.5
    assert found["portalmq_group_paused", (("group", "g"), *place)] == 1
    assert found["portalmq_outbox_orders", ()] == 7
    assert found["portalmq_partition_leader", place] == 1
    assert found["portalmq_partition_high_watermark", place] == 9
    assert found["portalmq_storage_bytes", (("file", "log"),)] == 100
    assert found["portalmq_coordinator_connected", ()] == 1
    assert found["portalmq_waiting_calls", ()] == 0


def test_a_topics_name_cannot_break_the_format():
    metrics = Metrics("0")
    metrics.published('a"b\\c', 1, 1)
    assert samples(metrics)["portalmq_messages_published_total", (("topic", 'a"b\\c'),)] == 1


def test_a_few_gauges_describe_replication():
    metrics = Metrics("0")
    partitions = [
        PartitionGauge("t", 0, True, 0, 9, under_replicated=True, backlog=4),
        PartitionGauge("t", 1, True, 0, 9, backlog=0),
        PartitionGauge("t", 2, False, 0, 9, under_replicated=True, quarantined=True),
    ]
    metrics.registry.register(
        GaugeCollector(lambda: Gauges([], partitions, {}, True, is_controller=True, offline_partitions=2))
    )
    metrics.elected()
    metrics.in_sync_changed(1, 0)
    metrics.in_sync_changed(0, 2)
    found = samples(metrics)
    assert found["portalmq_under_replicated_partitions", ()] == 1, "a follower does not count its partition"
    assert found["portalmq_quarantined_partitions", ()] == 1
    assert found["portalmq_offline_partitions", ()] == 2
    assert found["portalmq_is_controller", ()] == 1
    assert found["portalmq_leader_elections_total", ()] == 1
    assert (found["portalmq_isr_shrinks_total", ()], found["portalmq_isr_expands_total", ()]) == (1, 2)
    backlog = {key[1]: value for key, value in found.items() if key[0] == "portalmq_partition_backlog_offsets"}
    assert backlog == {
        (("partition", "0"), ("topic", "t")): 4,
        (("partition", "1"), ("topic", "t")): 0,
    }


def test_every_series_has_a_help_text():
    metrics = Metrics("0")
    metrics.registry.register(
        GaugeCollector(lambda: Gauges([], [PartitionGauge("t", 0, True, 0, 9)], {"log": 1}, True))
    )
    text = metrics.exposition().decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    explained = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP") and len(line.split()) > 3}
    assert families == explained
    assert all(name.startswith("portalmq_") for name in families)


def test_memory_and_disk_are_shown_where_the_system_reports_them():
    metrics = Metrics("0")
    state = [Gauges(memory_bytes=5, memory_limit_bytes=10, disk_free_bytes=3, disk_low_water_bytes=2), Gauges()]
    metrics.registry.register(GaugeCollector(lambda: state[0]))
    found = samples(metrics)
    names = ("memory_bytes", "memory_limit_bytes", "disk_free_bytes", "disk_low_water_bytes")
    assert [found[f"portalmq_{name}", ()] for name in names] == [5, 10, 3, 2]
    state.pop(0)
    assert not [key for key in samples(metrics) if "memory" in key[0] or "disk" in key[0]]


def test_the_state_of_very_many_groups_is_read_once_a_second():
    now, read = [100.0], []

    def gauges(count: int) -> Gauges:
        read.append(count)
        return Gauges([GroupLag("t", 0, f"g{number}", 1, 0.0) for number in range(count)])

    many = Metrics("0")
    many.registry.register(GaugeCollector(lambda: gauges(MANY_LAGS + 1), clock=lambda: now[0]))
    many.exposition()
    many.exposition()
    assert len(read) == 1
    now[0] += KEPT_S
    many.exposition()
    assert len(read) == 2
    few = Metrics("0")
    few.registry.register(GaugeCollector(lambda: gauges(1), clock=lambda: now[0]))
    few.exposition()
    few.exposition()
    assert len(read) == 4


def test_other_greenlets_run_while_very_many_series_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are made one after the other, as they are written."""
    monkeypatch.setattr(yielding, "TURN_S", 0)
    metrics, made = Metrics("0"), [0]

    class Row(GroupLag):
        def __getattribute__(self, name: str) -> Any:
            made[-1] += name == "lag"
            return super().__getattribute__(name)

    def children(counter: Counter) -> Any:
        made[-1] += 1
        return read(counter)

    read = Counter._child_samples
    monkeypatch.setattr(Counter, "_child_samples", children)
    for number in range(SERIES):
        metrics.acked("t", f"g{number}", 1)
    metrics.registry.register(GaugeCollector(lambda: Gauges([Row("t", 0, f"g{n}", 1, 0.0) for n in range(SERIES)])))

    def serve() -> None:
        while True:
            gevent.sleep(0)
            made.append(0)

    other = gevent.spawn(serve)
    found = samples(metrics)
    other.kill()
    assert len([key for key in found if key[0] == "portalmq_messages_acked_total"]) == SERIES
    assert len([key for key in found if key[0] == "portalmq_group_lag_messages"]) == SERIES
    assert sum(made) > 6 * SERIES
    assert max(made) <= 3
