"""`tidelog worker module:name`: which workers a name means, and what is said of a wrong one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog.cli.worker import _import_workers
from tidelog.errors import BadInput

MODULE = """
import tidelog
log = tidelog.open({path!r})
mail = log.queue("mail")

@mail.worker(concurrency=2)
def send(job): ...

@mail.worker()
def clean(job): ...

def helper(): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "shop_workers.py").write_text(MODULE.format(path=str(tmp_path / "data")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    yield "shop_workers"
    sys.modules.pop("shop_workers").log.close()


def test_a_name_means_one_worker_and_a_star_all_of_a_module(module: str) -> None:
    assert [worker.__name__ for worker in _import_workers(f"{module}:send")] == ["send"]
    assert [worker.__name__ for worker in _import_workers(f"{module}:*")] == ["send", "clean"]


@pytest.mark.parametrize(("name", "said"), [("helper", "no worker"), ("missing", "is not there")])
def test_a_wrong_name_is_refused_with_the_names_that_exist(module: str, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=rf"{said}; nothing was started, the workers of shop_workers are: send, clean"):
        _import_workers(f"{module}:{name}")


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be imported"):
        _import_workers("no_such_module_here:send")
