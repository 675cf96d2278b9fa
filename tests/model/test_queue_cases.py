"""What the long run of queues against dicts came upon, each by its shortest run. The dicts were wrong in all of these:
first what the engine is to do is said by hand, then the dicts must say the same."""

from __future__ import annotations

from typing import Final

import pytest
from tests.model.test_queues import LEASE_MS, QueueMachine

from tidelog.errors import DiskFull

RESTARTS: Final = ("reopen", "kill", "crash")
CAPACITY: Final = 300_000
restarts = pytest.mark.parametrize("how", RESTARTS)


def begun(capacity: int | None = None) -> QueueMachine:
    machine = QueueMachine()
    machine.begin(1, capacity)
    return machine


def checked(machine: QueueMachine) -> None:
    machine.is_what_the_dicts_say()


# No room for the next file of the WAL -----------------------------------------------------------------------


@restarts
def test_without_space_for_the_next_wal_file_puts_are_refused_until_there_is_some(how: str) -> None:
    """Decision 0021: nothing latches; claims, acks and a checkpoint go on in the reserve, puts resume by themselves."""
    machine = begun(CAPACITY)
    queue, acked = machine.queue("durable"), list[int]()
    with pytest.raises(DiskFull) as failed:
        acked.extend(queue.put("x" * 500).first_seq for _ in range(1_000))
    machine.is_refused(failed.value)
    assert machine.found_full() > 0, "no room for the next file"
    claimed = [job.seq for job in queue.claim("a", 1_000)]
    assert claimed == acked, "every job that was acknowledged, and no other"
    done, left = claimed[:-10], claimed[-10:]
    for seq in done:
        assert queue.ack("a", [seq]).count == 1
        with pytest.raises(DiskFull) as failed:
            queue.put("x" * 5_000)
        machine.is_refused(failed.value)
    machine.log.checkpoint()
    machine.log.checkpoint()
    left.append(queue.put("x").first_seq)
    assert left[-1] > claimed[-1], "what was acked came free: puts go on, on the same disk and without a restart"
    if how == "reopen":
        machine.log.close()
    else:
        machine.disk = machine.disk.reboot() if how == "kill" else machine.disk.crash_image("none")
    machine.open()
    queue = machine.queue("durable")
    assert [record.seq for record in queue.topic.read(0, 1_000).records] == left, "no acked job, no refused one"
    assert queue.counts() == (1, len(left) - 1, 0), "leases are durable"
    assert [job.seq for job in queue.claim("b", 1_000)] == left[-1:]
    machine.log.checkpoint()


@pytest.mark.parametrize("how", ["go on", *RESTARTS])
@pytest.mark.parametrize("verb", ["put", "claim", "ack", "nack", "extend"])
def test_the_dicts_go_on_after_such_a_failure(how: str, verb: str) -> None:
    machine = begun()
    found = 0
    for number in range(160):
        if found == 3:
            break
        machine.put("durable", 1 + number * number % 5 % 3, None, 0)  # so that any verb comes to need the next file
        before = machine.found_full()
        machine.fail("durable", "a", verb, [1, 2, 3, 4], 0, 0, "go on")
        checked(machine)
        if machine.found_full() > before:
            found += 1
            if how != "go on":
                machine.restart(how, 0, 1)
            machine.put("durable", 1, None, 0)
        checked(machine)
        if number % 3 == 0:
            machine.fail("durable", "a", verb, [1, 2, 3, 4], 1 + number % 2, 0, "go on")
            checked(machine)
    machine.checkpoint()
    checked(machine)
    assert found == 3, "a file of the WAL was full when the disk was"


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
