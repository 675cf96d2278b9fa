"""What the long run of queues against dicts came upon, each by its shortest run. The dicts were wrong in all of these:
first what the engine is to do is said by hand, then the dicts must say the same."""

from __future__ import annotations

from typing import Final

import pytest
from tests.model.test_queues import LEASE_MS, QueueMachine

from tidelog.errors import Latched

RESTARTS: Final = ("reopen", "kill", "crash")
FULL: Final = 28
restarts = pytest.mark.parametrize("how", RESTARTS)


def begun() -> QueueMachine:
    machine = QueueMachine()
    machine.begin(1)
    return machine


def checked(machine: QueueMachine) -> None:
    machine.is_what_the_dicts_say()


# No room for the next file of the WAL -----------------------------------------------------------------------


@restarts
def test_without_room_for_the_next_file_of_the_wal_nothing_is_written_until_a_restart(how: str) -> None:
    """Storage behaviour, section 4: such a rotation latches, and a checkpoint is refused as any write is."""
    machine = begun()
    machine.disk.fail("write", path="wal/CURRENT", error=FULL)
    queue, told = machine.queue("durable"), list[int]()
    with pytest.raises(Latched):
        told.extend(queue.put("x").first_seq for _ in range(1_000))
    machine.disk.heal()
    for refused in (machine.log.checkpoint, lambda: queue.put("x"), lambda: queue.claim("a")):
        with pytest.raises(Latched):
            refused()
    if how == "reopen":
        machine.log.close()
    else:
        machine.disk = machine.disk.reboot() if how == "kill" else machine.disk.crash_image("none")
    machine.open()
    queue = machine.queue("durable")
    assert [job.seq for job in queue.claim("a", 1_000)] == told, "every job that was told of, and no other"
    machine.log.checkpoint()


@restarts
@pytest.mark.parametrize("verb", ["put", "claim", "ack", "nack", "extend"])
def test_the_dicts_go_on_behind_such_a_failure(how: str, verb: str) -> None:
    machine = begun()
    latched = 0
    for _ in range(80):
        machine.put("durable", 1, None, 0)
        log = machine.log
        machine.fail("durable", "a", verb, [1, 2, 3, 4], 1, 0, how)
        latched += machine.log is not log
        checked(machine)
    machine.checkpoint()
    assert latched, "a file of the WAL was full when the disk was"


# What time has ended, and a clock that goes back ------------------------------------------------------------


@restarts
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_what_time_has_ended_is_as_it_was_or_over_when_the_clock_went_back(
    how: str, written: bool, delay: bool
) -> None:
    """A manifest that was written meanwhile knows that it is over; the WAL alone does not."""
    machine = begun()
    machine.put("durable", 1, None, 0)
    machine.claim("durable", [("a", 1, False)])
    if delay:
        machine.nack("durable", "a", [1], 400, False)
    machine.wait(LEASE_MS + 1)
    checked(machine)
    assert machine.queue("durable").counts() == (1, 0, 0)
    machine.jump(-LEASE_MS)
    if written:
        machine.checkpoint()
    machine.restart(how, 0, 1)
    over = written or how == "reopen"
    assert machine.queue("durable").counts() == ((1, 0, 0) if over else (0, int(not delay), 0))
    checked(machine)
    machine.wait(LEASE_MS + 1)
    machine.claim("durable", [("b", 1, False)])
    assert machine.models["durable"].jobs[1].count == 2, "handed out once more, and never twice at a time"
    checked(machine)


@restarts
@pytest.mark.parametrize("written", [False, True])
def test_who_was_given_the_job_since_keeps_it_when_the_clock_went_back(how: str, written: bool) -> None:
    """G94: nobody comes to hold it beside them."""
    machine = begun()
    machine.put("durable", 1, None, 0)
    machine.claim("durable", [("a", 1, False)])
    machine.wait(LEASE_MS + 1)
    machine.claim("durable", [("b", 1, False)])
    machine.jump(-LEASE_MS)
    if written:
        machine.checkpoint()
    machine.restart(how, 0, 1)
    queue = machine.queue("durable")
    assert queue.counts() == (0, 1, 0)
    assert queue.ack("a", [1]).skipped == [1]
    assert queue.ack("b", [1]).count == 1


# Dead letters -----------------------------------------------------------------------------------------------


def test_dead_letters_of_one_claim_are_in_the_order_of_their_seqs_whatever_their_priority() -> None:
    machine = begun()
    machine.put("plain", 1, None, 0)
    machine.put("plain", 1, None, 5)
    machine.wear_out("plain", 2)
    letters = machine.log.topic("dead-plain").read(0, 10).records
    assert [(letter.meta or {})["$dead_letter_src_seq"] for letter in letters] == ["1", "2"]
    checked(machine)
