"""Bugs planted on purpose: each breaks one promise of an erasure, and the test of that promise has to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.regressions import test_storage, test_stored_segments
from tests.unit.engine import test_erase, test_tiers

from tidelog.disk.segment_store import DirectoryStore
from tidelog.engine import blobs, erase
from tidelog.engine.erase import ErasureIncomplete, ErasureReceipt, _Erasure
from tidelog.engine.manifest import ManifestStore
from tidelog.engine.rewrite import Rewriter, RewriteResult
from tidelog.engine.tiers import Tiers
from tidelog.engine.topic_index import TopicIndex
from tidelog.wal import Shard

Patch = pytest.MonkeyPatch


def the_bytes_of_records_deleted_earlier_stay(patch: Patch) -> None:
    find = _Erasure._find_selected

    def find_live(self: _Erasure) -> Any:
        found = find(self)
        with self._topic.lock:
            return self._topic.index.live_seqs(found)

    patch.setattr(_Erasure, "_find_selected", find_live)


def the_newest_wal_file_stays(patch: Patch) -> None:
    patch.setattr(Shard, "start_new_file", lambda _: None)


def old_manifests_stay(patch: Patch) -> None:
    patch.setattr(ManifestStore, "request_base", lambda _: None)
    patch.setattr(_Erasure, "_manifest_files", lambda _: {})


def old_manifests_stay_and_a_check_finds_them(patch: Patch) -> None:
    patch.setattr(ManifestStore, "request_base", lambda _: None)


def segments_are_not_rewritten(patch: Patch) -> None:
    patch.setattr(_Erasure, "_segments_of", lambda *_: frozenset())


def the_active_segment_is_not_sealed(patch: Patch) -> None:
    patch.setattr(TopicIndex, "roll_segment", lambda _: None)


def the_quarantine_is_forgotten(patch: Patch) -> None:
    patch.setattr(erase, "QUARANTINE_DIR", "elsewhere")


def idempotency_keys_are_remembered(patch: Patch) -> None:
    patch.setattr(_Erasure, "_forget_keys", lambda *_: None)


def blobs_are_not_named(patch: Patch) -> None:
    patch.setattr(_Erasure, "_blob_files", lambda *_: {})


def blobs_stay(patch: Patch) -> None:
    patch.setattr(blobs.BlobTable, "take_removed", lambda *_: [])


def a_segment_that_does_not_verify_is_passed_over(patch: Patch) -> None:
    rewrite = Rewriter.rewrite

    def rewrite_silently(self: Rewriter, *args: Any, **options: Any) -> RewriteResult:
        return RewriteResult("t", rewrite(self, *args, **options).files)

    patch.setattr(Rewriter, "rewrite", rewrite_silently)


def the_receipt_comes_first(patch: Patch) -> None:
    """Before the files are gone: a crash in between leaves a receipt that is not true."""
    rewrite, store = _Erasure._rewrite, _Erasure._store

    def store_and_rewrite(self: _Erasure, bases: frozenset[int]) -> None:
        store(self, self._make_receipt("needle-*", 0, self._find_selected(), (), ()))
        rewrite(self, bases)

    patch.setattr(_Erasure, "_rewrite", store_and_rewrite)
    patch.setattr(_Erasure, "_store", lambda *_: None)


def receipts_are_no_chain(patch: Patch) -> None:
    make = _Erasure._make_receipt

    def make_alone(self: _Erasure, *args: Any) -> ErasureReceipt:
        receipt = make(self, *args)
        alone = ErasureReceipt(
            **{name: getattr(receipt, name) for name in receipt.__struct_fields__} | {"previous": ""}
        )
        return ErasureReceipt(
            **{name: getattr(alone, name) for name in alone.__struct_fields__} | {"hash": alone.computed_hash()}
        )

    patch.setattr(_Erasure, "_make_receipt", make_alone)


def a_changed_receipt_is_not_noticed(patch: Patch) -> None:
    patch.setattr(ErasureReceipt, "computed_hash", lambda self: self.hash or "0" * 64)


def objects_that_no_segment_names_stay(patch: Patch) -> None:
    patch.setattr(Tiers, "erase", lambda *_: ([], []))


def leftovers_of_copies_stay(patch: Patch) -> None:
    patch.setattr(DirectoryStore, "remove_leftovers", lambda *_: ())


def copies_elsewhere_are_not_listed(patch: Patch) -> None:
    patch.setattr(_Erasure, "_copies_elsewhere", lambda _: ())


def no_byte(place: str) -> Callable[[], None]:
    return lambda: test_erase.test_no_byte_of_an_erased_record_is_in_any_file(place, "fsync", 1)


def forgotten_key() -> None:
    test_erase.test_idempotency_key_of_an_erased_write_is_forgotten(1)


BUGS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (
        the_bytes_of_records_deleted_earlier_stay,
        test_erase.test_records_that_were_deleted_before_are_erased_as_well,
    ),
    (the_newest_wal_file_stays, no_byte("only in the WAL")),
    (old_manifests_stay, forgotten_key),
    (old_manifests_stay_and_a_check_finds_them, forgotten_key),
    (segments_are_not_rewritten, no_byte("in a sealed segment")),
    (the_active_segment_is_not_sealed, no_byte("in the active segment")),
    (the_quarantine_is_forgotten, test_erase.test_quarantine_is_removed_and_named),
    (idempotency_keys_are_remembered, forgotten_key),
    (blobs_are_not_named, test_erase.test_blob_of_an_erased_large_record_is_removed_and_named),
    (blobs_stay, test_erase.test_blob_of_an_erased_large_record_is_removed_and_named),
    (a_segment_that_does_not_verify_is_passed_over, test_erase.test_damaged_segment_makes_an_erasure_incomplete),
    (the_receipt_comes_first, lambda: test_erase.test_erasure_survives_a_power_cut_at_every_disk_call(1)),
    (receipts_are_no_chain, test_erase.test_chain_of_receipts_verifies),
    (a_changed_receipt_is_not_noticed, lambda: test_erase.test_changed_receipt_is_found("records", 1)),
    (
        objects_that_no_segment_names_stay,
        test_storage.test_erase_reaches_objects_and_keys_of_segments_that_were_dropped,
    ),
    (
        leftovers_of_copies_stay,
        lambda: test_stored_segments.test_erasure_removes_what_an_interrupted_copy_left_in_the_store(Patch()),
    ),
    (copies_elsewhere_are_not_listed, test_erase.test_queue_jobs_and_dead_letters_and_copies_of_routers),
]


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_the_bug_is_found(bug: Callable[[Patch], None], check: Callable[[], object], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, ErasureIncomplete, pytest.fail.Exception)):
        check()


def test_objects_of_rewritten_segments_that_stay_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tiers, "erase", lambda *_: ([], []))
    with pytest.raises(AssertionError):
        test_tiers.test_an_erasure_reaches_the_store(test_tiers.Machine(hot_retain_segments=0, cold_compression="none"))
