"""Byte layouts. Each module is the only one that knows its layout; none opens a file or reads a clock.

    frame            the frame of the WAL and of segments: header and checksum. Read this first.
    batch            AppendBatch: many records in one frame
    control_frames   the bodies of all other frames
    scan             frames of a buffer -> `rows`: records as columns over that buffer
    segment_index    the index of a segment; `sealed_segment` and `tag_index` are its other files
    cold_object      the data of a segment in the cold tier, compressed by blocks
    small_files      files with a header: metadata snapshots, the manifest of a log, metadata and cursor of a channel
    narwhal_channel  the metadata of a narwhal channel, and the record of its import
    backup_manifest  the small files of a backup target
    json_rows        rows -> JSON text; `arrow_ipc` checks Arrow streams of clients before they are decoded

What can be compiled is called through `tidelog.native`.
"""
