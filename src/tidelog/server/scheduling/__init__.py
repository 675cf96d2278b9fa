"""Scheduling policy of the server: pure logic without a loop or a clock of its own.

    fair_queue  which topic's readers are notified next: priority bands, ageing, a bound on the wait
    governor    how loaded the server is, and its reactions: coalesce, delay commits, defer, reject

`push.notifier.NotifyScheduler` drives both. Read `governor` first: its docstring has the ladder of reactions.
"""
