"""The process that gets killed: appends for ever, and says what was acked, one line each, after it was."""

from __future__ import annotations

import sys

from tidelog.commitlog import SegmentedLog


def expected_data(seq: int) -> bytes:
    """The record that belongs at a seq: the judge computes the same."""
    return b"%d:" % seq + bytes((seq * 31 + i) % 256 for i in range(seq * 37 % 3000))


def main(path: str, codec: str, sync: str) -> None:
    with SegmentedLog.open(path, codec, sync=sync, segment_bytes_max=60_000) as log:
        while True:
            if log.highest % 5 == 0:
                seqs = log.append_many([expected_data(log.highest + i) for i in range(7)])
            elif log.highest % 11 == 0:
                whole = expected_data(log.highest)
                seq = log.append_stream([whole[:10], whole[10:]])
                seqs = range(seq, seq + 1)
            else:
                seq = log.append(expected_data(log.highest))
                seqs = range(seq, seq + 1)
            sys.stdout.write(f"{seqs.stop - 1}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
