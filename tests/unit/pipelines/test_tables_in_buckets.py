"""Tables in a bucket of a real S3 server, and of an emulator of Azure's store: export, reconcile and repair, and what a
store may refuse."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyarrow.fs import FileSelector
from tests.kit.emulators import ACCOUNT_KEY, Emulator, run_emulator
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, bucket_files, s3_options, s3_table
from tests.unit.pipelines.test_export import Killed, Killer

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.errors import BadInput, Locked, NotFound, StoreDenied, StoreUnavailable
from tidelog.pipelines import table_formats
from tidelog.pipelines.table_formats import Place
from tidelog.pipelines.table_formats.interface import StagedFileMissing

STORES = ["s3", pytest.param("abfs", marks=pytest.mark.sweep)]


@pytest.fixture(scope="module", params=STORES)
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator | None]:
    """An emulator, or None for the S3 server."""
    if request.param == "s3":
        yield None
        return
    with run_emulator(request.param, tmp_path_factory.mktemp("store")) as emulator:
        yield emulator


@pytest.fixture(params=FORMATS)
def harness(
    request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server, bucket: Emulator | None
) -> PipelineHarness:
    if bucket is None:
        return PipelineHarness(tmp_path, request.param, place=s3_table(s3_server, request.param))
    address = bucket.address(f"{request.param}-{next(_numbers)}")
    return PipelineHarness(
        tmp_path, request.param, place=table_formats.find_place(address, "the table", bucket.options)
    )


_numbers = count()


def objects(harness: PipelineHarness) -> list[str]:
    """The keys of a table, as another client lists them."""
    store, root = bucket_files(harness.disk), harness.table.partition("://")[2]
    found = store.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix(f"{root}/") for info in found if info.is_file)


def test_a_table_is_its_topic(harness: PipelineHarness) -> None:
    harness.fill(300)
    done = harness.export_once()
    assert (done.rows, done.stop) == (300, 301)
    assert done.commits > 1
    harness.check()
    assert harness.export_once().commits == 0
    harness.fill(50, start=300)
    assert harness.export_once().rows == 50
    harness.check()
    assert harness.reconcile().equal


def test_a_difference_is_found_and_repaired(harness: PipelineHarness) -> None:
    harness.fill(200)
    harness.export_once()
    name = next(name for name in objects(harness) if name.startswith("part-"))
    store, path = bucket_files(harness.disk), f"{harness.table.partition('://')[2]}/{name}"
    whole = pq.ParquetFile(store.open_input_file(path))
    rows = whole.read().slice(1)
    with store.open_output_stream(path) as out:
        pq.write_table(rows.replace_schema_metadata(whole.schema_arrow.metadata), out)
    found = harness.reconcile()
    assert found.difference is not None
    assert found.difference.seq == 1
    assert harness.reconcile(repair=True).whole
    harness.check()


def test_an_export_that_is_killed_anywhere_goes_on(harness: PipelineHarness) -> None:
    harness.fill(60)
    steps, place = Killer(), harness.table
    harness.on_step = steps
    harness.table = f"{place}/counted"
    harness.export_once()
    copies = harness.format == "parquet" and harness.table.startswith("abfs:")  # Azurite takes 7 s for some of them
    for at in range(1, len(steps.steps) + 1, 8 if copies else 2):
        harness.table = f"{place}/{at}"
        harness.on_step = Killer(at)
        with pytest.raises(Killed):
            harness.export_once()
        harness.on_step = Killer()
        harness.export_once()
        harness.check()


def test_a_second_exporter_of_a_table_loses(harness: PipelineHarness) -> None:
    harness.fill(40)

    def race(step: str) -> None:
        if step == "write the commit":
            harness.on_step = Killer()
            other.export_once()

    other = PipelineHarness(Path(harness.data).parent, harness.format, place=Place(harness.disk, harness.table))
    harness.on_step = race
    with pytest.raises(Locked, match="nothing was committed"):
        harness.export_once()
    harness.check()


def test_a_staged_object_that_is_gone_is_not_committed(harness: PipelineHarness) -> None:
    harness.fill(20)

    def lose(step: str) -> None:
        if step == "sync the names of staged files":
            for name in objects(harness):
                if "part-" in name:
                    harness.disk.remove(f"{harness.table}/{name}")

    harness.on_step = lose
    with pytest.raises(StagedFileMissing, match="nothing was committed"):
        harness.export_once()
    harness.on_step = Killer()
    harness.export_once()
    harness.check()


def test_duckdb_polars_and_deltalake_read_the_table(tmp_path: Path, s3_server: S3Server) -> None:
    harness = PipelineHarness(tmp_path, "delta", place=s3_table(s3_server, "readers"))
    harness.fill(100)
    harness.export_once()
    options = s3_options(s3_server) | {"AWS_ALLOW_HTTP": "true"}
    assert DeltaTable(harness.table, storage_options=options).to_pyarrow_table().num_rows == 100
    rows = DeltaTable(harness.table, storage_options=options).to_pyarrow_dataset()
    assert duckdb.from_arrow(rows).aggregate("count(*), sum(seq)").fetchall() == [(100, 5050)]
    frame = pl.scan_delta(harness.table, storage_options=options).select(pl.col("seq").sum()).collect()
    assert frame.item() == 5050


def wrong_key(server: S3Server) -> dict[str, str]:
    return s3_options(server) | {"AWS_SECRET_ACCESS_KEY": "not-the-secret-key"}


@pytest.mark.parametrize("write", [True, False])
def test_a_store_that_refuses_is_an_error_without_secrets(s3_server: S3Server, write: bool) -> None:
    for address, options in (
        (f"s3://{BUCKET}/refused", wrong_key(s3_server)),
        ("s3://no-such-bucket-here/refused", s3_options(s3_server)),
    ):
        disk, path, _ = table_formats.find_place(address, "the table", options)
        with pytest.raises(StoreDenied, match="check the bucket, the credentials") as caught:
            table_formats.open_table(disk, path, write=write)
        for secret in (SECRET_KEY, ACCESS_KEY, "not-the-secret-key"):
            assert secret not in str(caught.value)


def test_missing_credentials_are_named_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries look for a machine of Amazon's then, and wait for minutes."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    address, endpoint = "s3://lake/orders", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    with pytest.raises(BadInput, match=r"there are no credentials for the bucket lake; nothing was done, give"):
        table_formats.find_place(address, "the table", endpoint)
    for half, other in (("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), ("SECRET_ACCESS_KEY", "ACCESS_KEY_ID")):
        with pytest.raises(BadInput, match=f"lack AWS_{other}; nothing was done") as caught:
            table_formats.find_place(address, "the table", endpoint | {f"AWS_{half}": "halfofakey"})
        assert "halfofakey" not in str(caught.value)
    assert table_formats.find_place(address, "the table", endpoint | {"AWS_SKIP_SIGNATURE": "true"}).path == address
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    assert table_formats.find_place(address, "the table", endpoint).path == address


def test_a_store_that_is_away_is_an_error(s3_server: S3Server) -> None:
    options = s3_options(s3_server) | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    disk, path, _ = table_formats.find_place(f"s3://{BUCKET}/away", "the table", options)
    with pytest.raises(StoreUnavailable, match="nothing was changed") as caught:
        table_formats.open_table(disk, path, write=True)
    assert caught.value.retryable


def test_no_secret_is_in_a_table_or_a_repr(harness: PipelineHarness) -> None:
    harness.fill(20)
    harness.export_once()
    for name in objects(harness):
        file = harness.disk.open(f"{harness.table}/{name}")
        content = file.read(0, file.size())
        file.close()
        assert SECRET_KEY.encode() not in content
        assert ACCESS_KEY.encode() not in content
    sent = pickle.loads(pickle.dumps(harness.disk))
    assert SECRET_KEY not in f"{harness.disk!r} {sent!r} {sent.options!r}"
    with closing(table_formats.open_table(sent, harness.table, write=False)) as table:
        assert table.last_commit() is not None


def test_there_is_no_table(s3_server: S3Server) -> None:
    disk, path, _ = s3_table(s3_server, "nothing")
    with pytest.raises(NotFound, match="there is no table at s3://"):
        table_formats.open_table(disk, path, write=False)


REFUSED: dict[str, tuple[str, dict[str, str]]] = {
    "an unknown option": ("s3://b/t", {"aws_secret": "hush"}),
    "a whole bucket": ("s3://b", {}),
    "no bucket": ("s3:///t", {}),
    "an option of another store": ("gs://b/t", {"AWS_REGION": "x"}),
    "a user in a bucket of Google": ("gs://u:hush@b/t", {}),
    "a password of a container": ("abfs://c:hush@a.dfs.core.windows.net/t", {}),
    "a fragment": ("s3://b/t#x", {"region": "x"}),
    "options of a directory": ("/lake/t", {"region": "x"}),
    "a query that does not read": ("s3://b/t?hush", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_address_that_is_not_understood_is_refused(case: str) -> None:
    address, options = REFUSED[case]
    with pytest.raises(BadInput, match="nothing was done") as caught:
        table_formats.find_place(address, "the table", options)
    assert "hush" not in str(caught.value)


S3_FORMS: dict[str, Callable[[], tuple[str, dict[str, str]]]] = {
    "deltalake": lambda: (
        "s3://b/t",
        {"aws_access_key_id": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": "http://h:1", "region": "r"},
    ),
    "pyarrow": lambda: (
        "s3a://b/t/",
        {"access_key": "k", "secret_key": "s", "endpoint_override": "h:1", "scheme": "http", "region": "r"},
    ),
    "pyiceberg": lambda: (
        "s3://b/t",
        {"s3.access-key-id": "k", "s3.secret-access-key": "s", "s3.endpoint": "http://h:1", "s3.region": "r"},
    ),
    "address": lambda: ("s3://k:s@b/t?endpoint_override=h:1&scheme=http&region=r", {}),
}


@pytest.mark.parametrize("form", S3_FORMS)
def test_every_form_of_the_options_of_s3_means_the_same(form: str) -> None:
    disk, path, _ = table_formats.find_place(S3_FORMS[form]()[0], "the table", S3_FORMS[form]()[1])
    assert isinstance(disk, BucketDisk)
    assert path == "s3://b/t"
    assert disk.options.to_arrow() == {
        "access_key": "k",
        "secret_key": "s",
        "endpoint_override": "h:1",
        "scheme": "http",
        "region": "r",
    }
    assert disk.options.to_delta() == {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_ENDPOINT_URL": "http://h:1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "r",
    }


def test_the_endpoint_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    disk, _, _ = table_formats.find_place("s3://b/t", "the table", None)
    assert isinstance(disk, BucketDisk)
    assert disk.options.to_delta() == {
        "AWS_ENDPOINT_URL": "http://h:1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }


def test_options_of_google_and_azure() -> None:
    disk, path, _ = table_formats.find_place(
        "abfss://c@acc.dfs.core.windows.net/t", "the table", {"account_key": "a2V5"}
    )
    assert isinstance(disk, BucketDisk)
    assert path == "abfss://c@acc.dfs.core.windows.net/t"
    assert disk.options.to_arrow() == {"account_name": "acc", "account_key": "a2V5"}
    assert disk.options.to_delta() == {
        "AZURE_STORAGE_ACCOUNT_NAME": "acc",
        "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
    }
    disk, path, _ = table_formats.find_place("gcs://b/t", "the table", {"anonymous": "True"})
    assert isinstance(disk, BucketDisk)
    assert (path, disk.options.to_arrow()) == ("gs://b/t", {"anonymous": True})


AZURE_ENDPOINTS: dict[str, dict[str, str]] = {
    "https://acc.blob.core.chinacloudapi.cn": {
        "blob_storage_authority": ".blob.core.chinacloudapi.cn",
        "blob_storage_scheme": "https",
        "dfs_storage_authority": ".dfs.core.chinacloudapi.cn",
        "dfs_storage_scheme": "https",
    },
    "http://127.0.0.1:10000/acc": {
        "blob_storage_authority": "127.0.0.1:10000",
        "blob_storage_scheme": "http",
        "dfs_storage_authority": "127.0.0.1:10000",
        "dfs_storage_scheme": "http",
    },
}


@pytest.mark.parametrize("endpoint", AZURE_ENDPOINTS)
def test_an_endpoint_of_azure_means_the_same_in_every_form(endpoint: str) -> None:
    services = AZURE_ENDPOINTS[endpoint]
    iceberg = {f"adls.{name.replace('_', '-')}": value for name, value in services.items()}
    for given in ({"AZURE_STORAGE_ENDPOINT": endpoint}, services, iceberg):
        disk, _, _ = table_formats.find_place("abfs://c/t", "the table", {"account_name": "acc", **given})
        assert isinstance(disk, BucketDisk)
        assert disk.options.to_arrow() == {"account_name": "acc", **services}
        assert disk.options.to_delta()["AZURE_STORAGE_ENDPOINT"] == endpoint
        assert ("AZURE_ALLOW_HTTP" in disk.options.to_delta()) == endpoint.startswith("http:")
        assert disk.options.to_iceberg() == {"adls.account-name": "acc", **iceberg}


def test_an_endpoint_of_google() -> None:
    for given in ({"GOOGLE_BASE_URL": "http://h:1"}, {"endpoint_override": "h:1", "scheme": "http"}):
        disk, _, _ = table_formats.find_place("gs://b/t", "the table", given)
        assert isinstance(disk, BucketDisk)
        assert disk.options.to_arrow() == {"endpoint_override": "h:1", "scheme": "http"}
        assert disk.options.to_delta() == {"GOOGLE_BASE_URL": "http://h:1", "ALLOW_HTTP": "true"}


def test_the_environment_has_credentials_of_azure_and_google_for_each_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow reads none of these variables: without them its requests go to other places than those of deltalake."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1")
    disk, _, _ = table_formats.find_place("abfs://c/t", "the table")
    assert isinstance(disk, BucketDisk)
    assert disk.options.with_environment().to_arrow() == {"account_name": "acc", "account_key": "a2V5"}
    assert disk.options.to_delta() == {}, "secrets of the environment are not sent to executors"
    disk, _, _ = table_formats.find_place("abfs://c@other.dfs.core.windows.net/t", "the table", {"sas_token": "sv=2"})
    assert isinstance(disk, BucketDisk)
    assert disk.options.with_environment().to_arrow() == {"account_name": "other", "sas_token": "sv=2"}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/key.json")
    disk, _, _ = table_formats.find_place("gs://b/t", "the table")
    assert isinstance(disk, BucketDisk)
    assert disk.options.with_environment().values == {"service_account": "/key.json"}


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["gs", "abfs"])
def test_a_store_of_google_or_azure_is_a_disk_of_tables(scheme: str, tmp_path: Path) -> None:
    with run_emulator(scheme, tmp_path) as emulator:
        disk, path, _ = table_formats.find_place(emulator.address("lake/orders"), "the table", emulator.options)
        assert isinstance(disk, BucketDisk)
        disk.check_bucket()
        assert disk.stat(path) is None
        for name in ("_part-1", "_part-2"):
            made = disk.open(f"{path}/data/{name}", "create")
            made.write(0, b"0123456789" * 10_000)
            made.sync()
            made.close()
        left = disk.open(f"{path}/left", "create")
        left.write(0, b"half of it")
        left.close()
        disk.rename(f"{path}/data/_part-1", f"{path}/data/part-1")
        disk.rename(f"{path}/data/_part-1", f"{path}/data/part-1")  # as another process that ends the same commit
        assert disk.list_dir(f"{path}/data") == ["_part-2", "part-1"]
        stat, folder = disk.stat(f"{path}/data/part-1"), disk.stat(f"{path}/data")
        assert stat is not None
        assert folder is not None
        assert (stat.size, stat.is_dir, folder.is_dir) == (100_000, False, True)
        file = pickle.loads(pickle.dumps(disk)).open(f"{path}/data/part-1")
        assert file.read(50_003, 4) == b"3456"
        file.close()
        disk.remove(f"{path}/data/_part-2")
        with pytest.raises(FileNotFoundError):
            disk.remove(f"{path}/data/_part-2")
        assert disk.stat(f"{path}/left") is None, "a file that was not synced is not there"


@pytest.mark.sweep
def test_azure_is_reached_by_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_emulator("abfs", tmp_path) as emulator:
        place = table_formats.find_place(emulator.address("t"), "the table", {"use_emulator": "true"})
        for name, value in emulator.options.items():
            monkeypatch.setenv(name, value)
        harness = PipelineHarness(tmp_path, "delta", place=place)
        harness.fill(20)
        assert harness.export_once().rows == 20
        assert harness.reconcile().equal
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IHRoZSBrZXk=")
        with pytest.raises(StoreDenied) as caught:
            table_formats.open_table(*pickle.loads(pickle.dumps(place))[:2], write=False)
        assert ACCOUNT_KEY not in str(caught.value)
