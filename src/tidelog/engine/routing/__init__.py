"""Routers: records of one topic are copied to another, and the copies are logged there as records.

    router         what a router is, which ones may be created, and hop counts. Read this first
    forwarder      all routers between one source and one dest: a cursor, the plan and the commit of a pass
    manager        the routers of an engine: create, change, drop, the thread that runs passes, manifest and replay

Why copies are logged: docs/decisions/0028.
"""
