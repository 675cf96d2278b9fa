"""Routers: records of one topic are copied to another, and the copies are logged there as records.

    router         what a router is, which ones may be created, and hop counts. Read this first
    forward_plan   one pass over the source: which records become copies, lost ranges or nothing
    forwarder      all routers between one source and one dest: a cursor, and the commit of a pass
    manager        the routers of an engine: create, change, drop, and the thread that runs passes
    recovery       routers in the manifest and in replay

Why copies are logged: docs/decisions/0028.
"""
