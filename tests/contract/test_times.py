"""Times as datetimes, durations as timedeltas, paths as paths, and the history of jobs right after an ack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import get_type_hints

import pytest
from tests.kit import processes
from tests.kit.commands import COMMAND

import tidelog
from tidelog import backup, errors, protocols
from tidelog.channels import ChannelConfig
from tidelog.channels.rules import ChannelSettings
from tidelog.commitlog import SegmentedLog
from tidelog.engine.config import KNOWN, EngineConfig, EngineSettings, TopicConfig, TopicFields
from tidelog.times import duration_ms, seconds, time_ms

Name = Callable[..., str]
OLD = datetime(2001, 2, 3, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def test_topics_take_times(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), ttl_ms=timedelta(days=1), idempotency_window_ms=MINUTE)
    assert (topic.config.ttl_ms, topic.config.idempotency_window_ms) == (86_400_000, 60_000)
    assert database.topic(name(), ttl_ms=timedelta(days=1)).config.ttl_ms == 86_400_000
    configured, _ = database.configure(name(), {"ttl_ms": timedelta(days=2)})
    assert configured.config.ttl_ms == 172_800_000
    topic.append([1, 2])
    later = datetime.now(timezone(timedelta(hours=5))) + timedelta(hours=1)
    assert (topic.seek(OLD), topic.seek(later)) == (1, 3)
    topic.delete(seqs=[1])
    assert [len(each.gaps(from_ms=when)) for each in (topic,) for when in (OLD, later)] == [1, 0]
    assert len(database.gaps(name(), OLD)) == 1
    assert topic.read(2, timeout=timedelta(milliseconds=10)).records == []
    assert list(topic.follow(2, timeout=timedelta(0))) == []
    assert topic.simulate_retention(ttl_ms=timedelta(hours=5)).records == 0


def test_groups_and_queues_take_times(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([1, 2])
    group = topic.group("readers")
    assert (group.reset(OLD), group.preview(datetime.now(UTC) + MINUTE).records) == (0, 2)
    batch = group.claim("c", 1, lease_ms=MINUTE, timeout=timedelta(0))
    assert batch is not None
    assert group.extend("c", batch.lease_id, MINUTE)
    queue = database.queue(name("q"), lease_ms=MINUTE)
    assert queue.lease_ms == 60_000
    queue.put("now", run_at_ms=OLD)
    queue.put("later", delay_ms=MINUTE)
    queue.put("later", run_at_ms=datetime.now(UTC) + MINUTE)
    (job,) = queue.claim("w", 3, lease_ms=MINUTE)
    assert queue.extend("w", job, lease_ms=2 * MINUTE).count == 1
    assert queue.nack("w", job, delay_ms=MINUTE).count == 1
    assert list(queue.jobs("w", lease_ms=MINUTE, timeout=timedelta(milliseconds=10))) == []


def test_channels_take_times(database: protocols.Database, name: Name) -> None:
    channel = database.channel(f"!{name()}@localhost", user="ann@localhost")
    channel.join(persist=True, message_flush_interval=timedelta(seconds=2))
    assert channel.state().config.message_flush_interval == 2000
    assert channel.configure(message_flush_interval=timedelta(seconds=1)).message_flush_interval == 1000
    channel.publish(b"x")
    assert [each.payload for each in channel.history(since_ms=OLD).messages] == [b"x"]
    assert channel.history(until_ms=OLD).messages == []


def test_times_without_a_zone_and_of_other_types_are_refused() -> None:
    assert time_ms("t", datetime(1970, 1, 1, 0, 0, 1, 999_999, tzinfo=UTC)) == 1999
    assert time_ms("t", datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)) == -1
    assert (duration_ms("t", timedelta(seconds=1, microseconds=999)), duration_ms("t", 5)) == (1000, 5)
    assert (seconds("t", timedelta(milliseconds=1500)), seconds("t", 2), seconds("t", None)) == (1.5, 2.0, None)
    with pytest.raises(errors.BadInput, match="without a time zone"):
        time_ms("t", datetime(2026, 1, 1))
    for call in (time_ms, duration_ms, seconds):
        for wrong in ("5", True, [], object(), float("nan")):
            with pytest.raises(errors.BadInput, match="t is a"):
                call("t", wrong)


def test_connections_take_times(contract_server: str) -> None:
    with tidelog.connect(contract_server, key="root", timeout_s=MINUTE, retry_s=timedelta(0)) as database:
        assert database.health().ok
    for wrong in (timedelta(0), -1, "x", None):
        with pytest.raises(errors.BadInput, match="timeout_s is a"):
            tidelog.connect(contract_server, timeout_s=wrong)  # type: ignore[arg-type]


def test_settings_are_typed_and_paths_are_paths(tmp_path: Path) -> None:
    assert set(get_type_hints(TopicFields)) == set(KNOWN)
    assert {field.name for field in fields(TopicConfig)} <= set(KNOWN)
    assert set(get_type_hints(EngineSettings)) == {field.name for field in fields(EngineConfig)}
    assert set(get_type_hints(ChannelSettings)) == set(ChannelConfig.__struct_fields__)
    with tidelog.open(tmp_path / "data", sync_interval_ms=timedelta(milliseconds=20)) as log:
        assert log.limits.sync_interval_ms == 20
        log.topic("t").append(1)
        made = log.backup(tmp_path / "backups")
    assert backup.verify(tmp_path / "backups").problems == []
    made_at = datetime.fromtimestamp(made.created_ms / 1000, UTC)
    assert backup.restore(tmp_path / "backups", tmp_path / "restored", to_time_ms=made_at).id == made.id
    for wrong in (5, b"x", None, object()):
        with pytest.raises(errors.BadInput, match=r"the directory to open is text or a pathlib\.Path"):
            tidelog.open(wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.BadInput, match=r"is text or a pathlib\.Path"):
            backup.list_backups(wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.BadInput, match=r"the directory of a log is text or a pathlib\.Path"):
            SegmentedLog.open(wrong)  # type: ignore[arg-type]
    with SegmentedLog.open(tmp_path / "log") as segments:
        assert segments.append(b"x") == segments.lowest
    with pytest.raises(errors.BadInput, match="there is no setting 'wal_shard', the nearest is wal_shards"):
        tidelog.open(tmp_path / "new", wal_shard=1)  # type: ignore[call-arg]
    assert not (tmp_path / "new").exists()


def test_the_module_is_the_command_line(tmp_path: Path) -> None:
    done = [
        processes.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for command in ([COMMAND[0], "-m", "tidelog", "--version"], [*COMMAND, "--version"])
    ]
    assert [(each.returncode, each.stdout) for each in done] == [(0, f"tidelog {tidelog.__version__}\n")] * 2


# ── history ───────────────────────────────────────────────────────────────────────────────────────


def test_history_is_complete_right_after_an_ack(database: protocols.Database, name: Name) -> None:
    queue = database.queue(name())
    for number in range(40):
        queue.put(number)
        queue.ack("w", queue.claim("w"))
        steps = [step["event"] for step in queue.history().read(3 * number, 10)]
        assert steps == ["enqueued", "claimed", "acked"]


def test_history_survives_a_close(tmp_path: Path) -> None:
    with tidelog.open(tmp_path) as log:
        log.queue("jobs").put([1, 2])
    with tidelog.open(tmp_path) as log:
        queue = log.queue("jobs")
        assert [(step["event"], step["last_seq"]) for step in queue.history().read()] == [("enqueued", 2)]
        queue.ack("w", queue.claim("w"))
    with tidelog.open(tmp_path, read_only=True) as log:
        events = [step["event"] for step in log.queue("jobs", create=False).history().read()]
    assert events == ["enqueued", "restarted", "claimed", "acked"]
