"""Byte layouts. Each module is the only one that knows its layout; none opens a file or reads a clock.

    frame            the frame of the WAL and of segments: header and checksum. Read this first.
    batch            AppendBatch: many records in one frame; `batch_writer` encodes it into memory that is used again
    control_frames   the bodies of all other frames
    scan             frames of a buffer -> `rows`: records as columns over that buffer
    segment_index    the index of a segment; `footer`, `deletion_vector` and `tag_index` are its other files
    file_header      the header of small files: `log_manifest`, `channel_meta`, metadata snapshots
    json_rows        rows -> JSON text; `arrow_ipc` checks Arrow streams of clients before they are decoded

What can be compiled is called through `tidelog.native`.
"""
