"""A plan covers every seq once, whatever a topic went through: random segments, deletes, floors, compressed and cold
segments; and while a writer appends, deletes, rewrites and relocates between the plan and the tasks.

Tasks verify the conservation law themselves; these tests compare rows with a model of the topic.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from tests.kit.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.unit.spark.helpers import MODES, Mode, SourceEnv, pickled, read, source, source_env

from tidelog.engine.config import ColdCompression
from tidelog.spark import plan
from tidelog.spark.backends.interface import ReadTask, SegmentRun


class TopicModel:
    """A topic under random operations, and the records that it should have."""

    def __init__(self, env: SourceEnv, random: Random) -> None:
        self._env, self._random = env, random
        self._topic = env.engine.topic("orders", durability="memory")
        self.live: dict[int, bytes] = {}
        self.head = 0
        self._cap: int | None = None

    def step(self) -> None:
        steps = (
            *(self.append,) * 4,
            *(self.delete,) * 2,
            *(self._env.engine.checkpoint,) * 3,
            self.rewrite,
            self.relocate,
            self.delete_before,
            self.set_cap,
        )
        self._random.choice(steps)()

    def append(self) -> None:
        random = self._random
        datas = [random.randbytes(random.choice((3, 30, 300))) for _ in range(random.randint(1, 120))]
        self._topic.append(datas)
        for data in datas:
            self.head += 1
            self.live[self.head] = data
        if self._cap is not None:
            self.live = dict(sorted(self.live.items())[-self._cap :])

    def delete(self) -> None:
        seqs = self._random.sample(sorted(self.live), min(len(self.live), self._random.randint(1, 40)))
        if seqs:
            self._topic.delete(seqs=seqs)
            for seq in seqs:
                del self.live[seq]

    def delete_before(self) -> None:
        before = self._random.randint(1, max(self.head // 2, 1))
        self._topic.delete(before_seq=before)
        self.live = {seq: data for seq, data in self.live.items() if seq >= before}

    def set_cap(self) -> None:
        self._cap = self._random.randint(100, 600)
        self._env.engine.topic("orders", cap_records=self._cap)
        self.live = dict(sorted(self.live.items())[-self._cap :])

    def rewrite(self) -> None:
        self._topic.rewrite(force=True)

    def relocate(self) -> None:
        if self._random.random() < 0.3:
            self._env.engine.recall("orders", first_seq=self._random.randint(1, self.head + 1))
        else:
            self._env.engine.relocate("orders", keep_segments=self._random.randint(0, 2))


def rows_of(table: pa.Table) -> list[tuple[int, bytes]]:
    return list(zip(table.column("seq").to_pylist(), table.column("data").to_pylist(), strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(5, 60))])
def test_tasks_read_each_record_once(tmp_path: Path, mode: Mode, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(plan, "PLANNED_DELETIONS_MAX", random.choice((0, 2, 256)))
    cold = str(tmp_path / "cold")
    with source_env(mode, tmp_path, segment_events=random.choice((7, 40, 150)), cold=cold) as env:
        model = TopicModel(env, random)
        model.append()
        for _ in range(4):
            for _ in range(random.randint(1, 8)):
                model.step()
            first = random.choice((1, random.randint(1, model.head)))
            stop = random.choice((model.head + 1, random.randint(first, model.head + 1)))
            options = env.options(
                startingOffsets=f'{{"orders": {first}}}',
                endingOffsets=f'{{"orders": {stop}}}',
                minPartitions=random.choice((1, 2, 7, 40)),
                onGap="skip",
            )
            expected = [(seq, data) for seq, data in sorted(model.live.items()) if first <= seq < stop]
            assert rows_of(read(options).table) == expected

            reader = source(options).reader(source(options).schema())
            tasks = [task for task in pickled(list(reader.partitions())) if isinstance(task, ReadTask)]
            planned = dict(model.live)
            for _ in range(random.randint(0, 5)):
                model.step()
            found = [row for task in tasks for batch in reader.read(task) for row in rows_of(pa.table(batch))]
            assert [seq for seq, _ in found] == sorted({seq for seq, _ in found}), "no record twice, all in order"
            assert set(found) <= {(seq, data) for seq, data in planned.items() if first <= seq < stop}
            kept = {seq for seq in model.live if first <= seq < stop}
            assert kept <= {seq for seq, _ in found}, "what is still there was read"


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("mode", MODES)
def test_cold_segments_are_read_from_a_bucket(
    tmp_path: Path, mode: Mode, compression: ColdCompression, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks find the store by the address that the directory records, and its keys in the environment."""
    prefix = f"spark-{mode}-{compression}"
    cold = s3_server.url(prefix)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3_server.endpoint}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with source_env(mode, tmp_path, segment_events=100, cold=cold, compression=compression) as env:
        topic = env.engine.topic("orders", durability="memory")
        datas = [b"%d " % number * 40 for number in range(1000)]
        for at in range(0, 1000, 50):
            topic.append(datas[at : at + 50])
        topic.delete(seqs=[5, 450, 999])
        topic.seal()
        env.engine.relocate("orders", keep_segments=1)  # the server's own thread may have moved some before
        assert sum(place.tier != "hot" for place in env.engine.segment_places("orders")) >= 8
        for _ in range(3):
            env.engine.checkpoint()
            topic.append(b"x")
        if mode == "path":
            assert len(list((tmp_path / "data").rglob("seg-*.data"))) <= 3, "files of cold segments are gone"
        left = [seq for seq in range(1, 1001) if seq not in (5, 450, 999)]
        found = read(env.options(minPartitions=5))
        assert rows_of(found.table)[: len(left)] == [(seq, datas[seq - 1]) for seq in left]
        assert any(isinstance(part, SegmentRun) for task in found.tasks for part in task.parts)
