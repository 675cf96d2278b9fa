"""Bugs planted on purpose: each breaks one rule of channels, and the runs against the model must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from tests.crash.channels.arrangements import run_case, sample_cases
from tests.crash.channels.random_runs import run_random

from tidelog.channels import rules, store
from tidelog.channels.channel_state import FifoQueue
from tidelog.channels.manager import MembershipIndex
from tidelog.channels.rules import LeaveResult
from tidelog.channels.store import DELETED_MARKER_FILE, METADATA_FILE, ChannelStore, MessageLog
from tidelog.disk import durability
from tidelog.disk.durability import remove_if_exists
from tidelog.disk.interface import Disk, join
from tidelog.formats.small_files import ChannelMeta, encode_cursor
from tidelog.types import Buffer

Patch = pytest.MonkeyPatch
SEEDS = 1_000


def nothing(*_: Any, **__: Any) -> None:
    return None


def metadata_renamed_before_its_bytes_are_synced(patch: Patch) -> None:
    def write_temporary(disk: Disk, temporary: str, data: Buffer) -> None:
        remove_if_exists(disk, temporary)
        file = disk.open(temporary, "create")
        file.write(0, data)
        file.close()

    patch.setattr(durability, "write_temporary", write_temporary)


def rename_without_a_directory_sync(patch: Patch) -> None:
    patch.setattr(durability, "sync_directory", nothing)


def metadata_written_in_place(patch: Patch) -> None:
    def replace(disk: Disk, path: str, data: Buffer) -> None:
        file = disk.open(path, "write" if disk.stat(path) else "create")
        file.truncate(0)
        file.write(0, data)
        file.sync()
        file.close()

    patch.setattr(store, "replace_file", replace)


def joins_that_are_not_saved(patch: Patch) -> None:
    save = ChannelStore.save

    def forgetful(self: ChannelStore, meta: ChannelMeta, before: ChannelMeta | None, **more: Any) -> str:
        grown = before is not None and len(meta.members) > len(before.members)
        return "" if grown else save(self, meta, before, **more)

    patch.setattr(ChannelStore, "save", forgetful)


def lists_that_are_not_saved(patch: Patch) -> None:
    save = ChannelStore.save

    def forgetful(self: ChannelStore, meta: ChannelMeta, before: ChannelMeta | None, **more: Any) -> str:
        return "" if before is not None and meta.acl != before.acl else save(self, meta, before, **more)

    patch.setattr(ChannelStore, "save", forgetful)


def acks_before_the_sync(patch: Patch) -> None:
    patch.setattr(MessageLog, "sync", nothing)


def a_delete_without_its_marker(patch: Patch) -> None:
    def delete(self: ChannelStore, name: str, _meta: ChannelMeta | None) -> None:
        if self.disk.stat(self.directory(name)) is not None:
            self._try_erase(self.directory(name))

    patch.setattr(ChannelStore, "delete", delete)


def a_marker_that_the_restart_ignores(patch: Patch) -> None:
    def is_live(self: ChannelStore, directory: str) -> bool:
        return self.disk.stat(join(directory, METADATA_FILE)) is not None

    patch.setattr(ChannelStore, "_is_live_directory", is_live)


def the_marker_removed_first(patch: Patch) -> None:
    erase = ChannelStore._erase

    def hasty(self: ChannelStore, directory: str) -> bool:
        remove_if_exists(self.disk, join(directory, DELETED_MARKER_FILE))
        self.disk.sync_dir(directory)
        return erase(self, directory)

    patch.setattr(ChannelStore, "_erase", hasty)


def numbering_that_begins_again_with_a_log(patch: Patch) -> None:
    init = MessageLog.__init__

    def afresh(self: MessageLog, *args: Any, **more: Any) -> None:
        init(self, *args, **{**more, "first_seq": 1})

    patch.setattr(MessageLog, "__init__", afresh)


def the_last_member_promoted(patch: Patch) -> None:
    left = rules.remove_member

    def turned(meta: ChannelMeta, user: str) -> LeaveResult:
        done = left(meta, user)
        if done.meta is None or done.promoted is None:
            return done
        heir = done.meta.members[-1]
        return LeaveResult(msgspec.structs.replace(done.meta, owner=heir), heir)

    patch.setattr(rules, "remove_member", turned)


def a_cursor_that_is_not_durable(patch: Patch) -> None:
    def move(self: FifoQueue, next_seq: int) -> None:
        if self._disk.stat(self._path) is None:
            durability.replace_file(self._disk, self._path, encode_cursor(next_seq))
        self._state.fifo_cursor = next_seq

    patch.setattr(FifoQueue, "_save_cursor", move)


def a_cursor_past_what_is_durable(patch: Patch) -> None:
    patch.setattr(MessageLog, "is_synced", property(lambda _: True))


def retention_that_drops_too_much(patch: Patch) -> None:
    def keep(self: MessageLog, messages: int) -> None:
        self.keep_from_seq(self.last_seq, messages)

    patch.setattr(MessageLog, "keep_newest", keep)


def retention_counted_from_what_a_crash_may_take(patch: Patch) -> None:
    def keep(self: MessageLog, messages: int) -> None:
        self.keep_from_seq(self.last_seq + 1 - messages, messages)

    patch.setattr(MessageLog, "keep_newest", keep)


def holes_that_are_counted(patch: Patch) -> None:
    patch.setattr(MessageLog, "count_from", lambda self, seq: self.last_seq + 1 - seq)


def restored_members_held_to_the_limit(patch: Patch) -> None:
    def strict(self: MembershipIndex, users: Iterable[str], channel: str) -> None:
        for user in users:
            self.reserve(user, channel, 1)

    patch.setattr(MembershipIndex, "restore", strict)


def domains_that_win_over_users(patch: Patch) -> None:
    def allows(listed: tuple[str, ...], user: str) -> bool:
        return not listed or user in listed or user.split("@")[1] in listed

    patch.setattr(rules, "is_allowed", allows)


def members_that_are_not_sorted(patch: Patch) -> None:
    joined = rules.add_member

    def shuffled(meta: ChannelMeta, user: str) -> ChannelMeta:
        done = joined(meta, user)
        return msgspec.structs.replace(done, members=tuple(reversed(done.members)))

    patch.setattr(rules, "add_member", shuffled)


BUGS: list[Callable[[Patch], None]] = [
    metadata_renamed_before_its_bytes_are_synced,
    rename_without_a_directory_sync,
    metadata_written_in_place,
    joins_that_are_not_saved,
    lists_that_are_not_saved,
    acks_before_the_sync,
    a_delete_without_its_marker,
    a_marker_that_the_restart_ignores,
    the_marker_removed_first,
    numbering_that_begins_again_with_a_log,
    the_last_member_promoted,
    a_cursor_that_is_not_durable,
    a_cursor_past_what_is_durable,
    retention_that_drops_too_much,
    retention_counted_from_what_a_crash_may_take,
    holes_that_are_counted,
    restored_members_held_to_the_limit,
    domains_that_win_over_users,
    members_that_are_not_sorted,
]


@pytest.mark.sweep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert any(run_random(seed)[1] is not None for seed in range(SEEDS)), f"{SEEDS} runs did not find it"


ARRANGED: list[Callable[[Patch], None]] = [
    rename_without_a_directory_sync,
    joins_that_are_not_saved,
    lists_that_are_not_saved,
    acks_before_the_sync,
    a_delete_without_its_marker,
    the_marker_removed_first,
    numbering_that_begins_again_with_a_log,
    a_cursor_that_is_not_durable,
    a_cursor_past_what_is_durable,
]


@pytest.mark.sweep
@pytest.mark.parametrize("bug", ARRANGED, ids=lambda bug: bug.__name__)
def test_the_arrangements_find(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for seed in range(4):
        for case in sample_cases(seed):
            try:
                run_case(case, seed)
            except AssertionError:
                return
    pytest.fail(f"{bug.__name__} was not found")
