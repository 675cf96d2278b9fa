"""The shared test kit: harnesses that tests of several folders use.

    waiting        poll for a condition; run calls at the same time. The only module in which a test may sleep to wait
    threads        run calls beside the body of a test
    processes      start Python programs by a fork of a process that has imported the package
    sampling       which part of a sweep `make test` takes
    commands       run `tidelog` commands in this process or as processes; free ports
    small_disk     a real file system of 16 MiB, and a program that fills it
    s3             a real S3-compatible server
    awaited_log    `AsyncSegmentedLog` with the methods of `SegmentedLog`

`tidelog.testing` has the simulated disk and the manual clock. A server process is `tests.contract_http.server`.
Harnesses of one folder stay in that folder.
"""
