"""Push: delivery of new records, jobs and channel messages to waiting clients.

    notifier        which topic's readers are notified next, and how often: `NotifyScheduler`, `Notifiers`
    scheduling      the policy: order of topics (`FairQueue`), load and reactions to it (`Governor`)
    page_cache      encoded pages of records, shared by all readers of the same position
    topic_stream    one client that follows topics: its loop, its slot among the streams, its watch session
    peers           how a page or an event is written to SSE and WebSocket, and the limits for slow clients
    claim_queue     waiting claimers of a queue, and the rounds that hand out jobs
    channel_stream  channels on the event loop: publish, delivery, one subscriber of one channel

Read `notifier` first, then `topic_stream`. A commit calls `NotifyScheduler.notify_now`; everything else runs in turns
of the loop.
"""
