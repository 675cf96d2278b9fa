"""Backups over HTTP: made by a server while it serves, only where its operator allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract_http.api import ANY, expect_error, expect_success
from tests.contract_http.server import Server
from tidelog import backup
from tidelog.cli.main import main
from tidelog.client import Client, RemoteDatabase


def test_a_server_backs_itself_up_while_it_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "backups"
    with Server(tmp_path / "server", backup_targets=f"{target}, s3://bucket/x").start() as server:
        url = f"http://127.0.0.1:{server.address.port}"
        with server.client() as api:
            api.write("orders", 1, 2, 3)
            made = expect_success(api.post("/v0/backups", {}), 201)
            assert (made["target"], made["backup"]["topics"]) == (str(target), {"orders": 3})
            api.write("orders", 4)
            more = expect_success(api.post("/v0/backups", {"target": f"{target}/", "incremental": True}), 201)
            assert more["backup"]["parent"] == made["backup"]["id"]
            listed = expect_success(api.get("/v0/backups"))
            assert [row["id"] for row in listed["backups"]] == [made["backup"]["id"], more["backup"]["id"]]
            for other in (str(tmp_path), f"{target}x", f"{target}/../other", "s3://bucket/xy"):
                expect_error(api.post("/v0/backups", {"target": other}), 403, "forbidden", {"target": other})
            expect_error(api.post("/v0/backups", {"target": 3}), 400, "invalid_request", ANY)
        assert main(["backup", "create", str(server.data), str(target)]) == 2
        assert f"tidelog backup create {target} --server {url}\n" in capsys.readouterr().err, (
            "with the address of the server"
        )
        assert main(["backup", "create", str(target), "--server", url, "--incremental"]) == 0
        with RemoteDatabase(Client(url)) as remote:
            assert len(remote.backups()["backups"]) == 3
    backup.restore(str(target), str(tmp_path / "new"))
    assert backup.verify(str(target)).problems == []


def test_a_server_without_targets_makes_no_backup_and_keys_need_all_names(tmp_path: Path) -> None:
    keys = "root:admin,part:admin:orders,reader:read"
    with Server(tmp_path / "server", api_keys=keys).start() as server, server.client("root") as client:
        assert "TIDELOG_BACKUP_TARGETS" in expect_error(client.post("/v0/backups", {}), 403, "forbidden")["message"]
    with Server(tmp_path / "other", api_keys=keys, backup_targets=str(tmp_path / "b")).start() as server:
        for key in ("part", "reader"):
            with server.client(key) as client:
                expect_error(client.post("/v0/backups", {}), 403, "forbidden", ANY)
                expect_error(client.get("/v0/backups"), 403, "forbidden", ANY)
        assert not (tmp_path / "b").exists()
