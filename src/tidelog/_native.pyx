# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""[hot] JSON text in and out, compiled: `encode_json_rows` makes it of rows, `encode_json_batch` of a batch as it lies there, `parse_plain_body` takes
the records out of the body of a write, `remove_json_escapes` and `json_depth` look at text that came. The values of a batch on their way into frames: `all_bytes`, `value_lengths`,
`split_by_size`, `copy_values_into`. Frames of a WAL: `find_frames` from one to the next, `fsync_loop` for them in a thread. Records on their way into columns: `fill_indexed_records` finds them,
`copy_values` lays their values into memory that `borrow_buffer` has used before. And the bodies of small writes and
their responses: `parse_plain_bodies`, `encode_write_responses`.

Each has a twin in Python that says what is right and is the oracle of its tests: `formats.json_rows.plain`,
`formats.json_batch.plain`, `server.api.plain`, `formats.json_text`, those of `formats.values`, `formats.survey` and `scan.walk_indexed`
without it, `disk.beside.synced`, `formats.rows.plain` and `server.api.write`. Where there was no
compiler there is no such module, and the twins serve.

    made     ┌──────────────────────────────────┬┄┄┄┄┄┄┄┐      as much as the rows can need at most, by their sizes
    row i    {"$seq":…,"$ts":…,…,"data":…}…     ┊       ┊      escaped and copied in one pass
                                                ^ cut here     what is behind it was never touched

Nothing is believed: a value that lies outside the buffer is refused, and no row is begun that may not fit. What is
small keeps the interpreter's lock: whoever lets go of it waits for it as long as another thread likes.
"""

from cpython.buffer cimport PyBUF_CONTIG, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.errno cimport EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from "Python.h":
    # As they are, not as Cython wraps them: the object that is made changes its size before anybody sees it.
    PyObject* new_bytes "PyBytes_FromStringAndSize" (const char* text, Py_ssize_t size) except NULL
    int resize "_PyBytes_Resize" (PyObject** made, Py_ssize_t size) except -1
    char* inside "PyBytes_AS_STRING" (PyObject* made)
    # The values of a list or a tuple, borrowed: nothing runs that could change it before we are done.
    object fast "PySequence_Fast" (object many, const char* complaint)
    Py_ssize_t fast_size "PySequence_Fast_GET_SIZE" (object many)
    PyObject** fast_items "PySequence_Fast_ITEMS" (object many)
    bint is_bytes "PyBytes_CheckExact" (PyObject* value)
    bint is_derived_bytes "PyBytes_Check" (PyObject* value)
    Py_ssize_t bytes_size "PyBytes_GET_SIZE" (PyObject* value)

cdef extern from "unistd.h" nogil:
    ssize_t read(int descriptor, void* into, size_t size)
    ssize_t write(int descriptor, const void* data, size_t size)
    int fdatasync(int descriptor)

cdef enum:
    FIXED = 128  # of a row, at most, without its values: all keys, two numbers, quotes and braces
    LARGE = 1 << 20  # bytes of text from which the lock is let go: 0.2 ms, at 22 µs for 145 KB
    NUMBER = 20  # digits and a sign

cdef const char* _HEX = "0123456789abcdef"
cdef const char* _BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
cdef uint8_t[256] _ESCAPES  # 0: goes out as it is; a letter: behind a backslash; 1: by its number
cdef int _byte
for _byte in range(256):
    _ESCAPES[_byte] = 1 if _byte < 32 else 0
for _byte, _letter in ((8, b"b"), (9, b"t"), (10, b"n"), (12, b"f"), (13, b"r"), (34, b'"'), (92, b"\\")):
    _ESCAPES[_byte] = <uint8_t>(<bytes>_letter)[0]


cdef struct Column:
    const char* at
    Py_ssize_t step  # bytes from one value to the next


cdef struct Span:
    bint shown
    Column pos
    Column size


cdef struct Place:
    int64_t* pos
    int64_t* size


cdef struct Page:
    const uint8_t* buf
    int64_t buf_bytes
    Py_ssize_t count
    const char* between
    Py_ssize_t between_bytes
    Column seq
    Column ts_us
    Column json
    Span data
    Span node
    Span tag
    Span meta


cdef inline int64_t value(const Column* column, Py_ssize_t i) noexcept nogil:
    cdef int64_t found
    memcpy(&found, column.at + i * column.step, 8)
    return found


cdef inline int64_t pos_of(const Span* span, Py_ssize_t i) noexcept nogil:
    return value(&span.pos, i)


cdef inline int64_t size_of(const Span* span, Py_ssize_t i) noexcept nogil:
    return value(&span.size, i) if span.shown else 0


cdef inline bint is_json(const Page* page, Py_ssize_t i) noexcept nogil:
    return page.json.at[i * page.json.step] != 0


cdef inline bint is_inside(const Span* span, Py_ssize_t i, int64_t limit) noexcept nogil:
    cdef int64_t size = size_of(span, i)
    return not span.shown or (0 <= size <= limit and 0 <= pos_of(span, i) <= limit - size)


cdef inline int64_t most(const Page* page, Py_ssize_t i) noexcept nogil:
    """Bytes that a row may need; -1 where one of its values lies outside the buffer."""
    cdef int64_t limit = page.buf_bytes, data
    if not (
        is_inside(&page.data, i, limit)
        and is_inside(&page.node, i, limit)
        and is_inside(&page.tag, i, limit)
        and is_inside(&page.meta, i, limit)
    ):
        return -1
    data = size_of(&page.data, i)
    if not is_json(page, i):
        data = (data + 2) // 3 * 4
    return (
        FIXED + page.between_bytes + data + size_of(&page.meta, i)
        + 6 * (size_of(&page.node, i) + size_of(&page.tag, i))
    )


cdef inline char* put(char* out, const char* text, Py_ssize_t size) noexcept nogil:
    memcpy(out, text, size)
    return out + size


cdef inline char* put_int(char* out, int64_t value) noexcept nogil:
    cdef char[NUMBER] digits
    cdef int at = NUMBER
    cdef uint64_t left = <uint64_t>value
    if value < 0:
        out[0] = c"-"
        out += 1
        left = 0 - left
    while True:
        at -= 1
        digits[at] = <char>(c"0" + left % 10)
        left //= 10
        if not left:
            return put(out, digits + at, NUMBER - at)


cdef inline char* put_name(char* out, const uint8_t* text, int64_t size, uint8_t* seen) noexcept nogil:
    """A name in quotes. `seen` has its highest bit set when the name is not ASCII."""
    cdef int64_t i
    cdef uint8_t byte, escape
    out[0] = c'"'
    out += 1
    for i in range(size):
        byte = text[i]
        seen[0] |= byte
        escape = _ESCAPES[byte]
        if not escape:
            out[0] = <char>byte
            out += 1
        elif escape == 1:
            out = put(out, "\\u00", 4)
            out[0], out[1] = _HEX[byte >> 4], _HEX[byte & 15]
            out += 2
        else:
            out[0], out[1] = c"\\", <char>escape
            out += 2
    out[0] = c'"'
    return out + 1


cdef inline char* put_base64(char* out, const uint8_t* data, int64_t size) noexcept nogil:
    cdef int64_t i = 0
    cdef unsigned int three
    while i + 2 < size:
        three = data[i] << 16 | data[i + 1] << 8 | data[i + 2]
        out[0], out[1] = _BASE64[three >> 18], _BASE64[three >> 12 & 63]
        out[2], out[3] = _BASE64[three >> 6 & 63], _BASE64[three & 63]
        out += 4
        i += 3
    if i < size:
        three = data[i] << 16 | (data[i + 1] << 8 if i + 1 < size else 0)
        out[0], out[1] = _BASE64[three >> 18], _BASE64[three >> 12 & 63]
        out[2], out[3] = _BASE64[three >> 6 & 63] if i + 1 < size else c"=", c"="
        out += 4
    return out


cdef int64_t bound(const Page* page) noexcept nogil:
    """`most` of all rows together."""
    cdef int64_t total = 0, row
    cdef Py_ssize_t i
    for i in range(page.count):
        row = most(page, i)
        if row < 0:
            return -1
        total += row
    return total


cdef char* fill(const Page* page, char* out, const char* end, uint8_t* seen) noexcept nogil:
    """Write all rows; NULL where one might not fit: its sizes have changed meanwhile."""
    cdef Py_ssize_t i, stamp_bytes = 0
    cdef char[NUMBER] stamp
    cdef int64_t ts_us, ts_ms, ts_before = 0, row, size
    for i in range(page.count):
        row = most(page, i)
        if row < 0 or end - out < row:
            return NULL
        if i:
            out = put(out, page.between, page.between_bytes)
        out = put_int(put(out, '{"$seq":', 8), value(&page.seq, i))
        ts_us = value(&page.ts_us, i)
        ts_ms = ts_us // 1000
        if ts_us < 0 and ts_us % 1000:
            ts_ms -= 1  # down, as Python divides
        if not stamp_bytes or ts_ms != ts_before:  # records of one write share it
            stamp_bytes, ts_before = put_int(stamp, ts_ms) - stamp, ts_ms
        out = put(put(out, ',"$ts":', 7), stamp, stamp_bytes)
        size = size_of(&page.node, i)
        if size:
            out = put_name(put(out, ',"$node":', 9), page.buf + pos_of(&page.node, i), size, seen)
        size = size_of(&page.tag, i)
        if size:
            out = put_name(put(out, ',"$tag":', 8), page.buf + pos_of(&page.tag, i), size, seen)
        if page.data.shown:
            size = size_of(&page.data, i)
            if is_json(page, i):
                out = put(put(out, ',"data":', 8), <const char*>page.buf + pos_of(&page.data, i), size)
            else:
                out = put_base64(put(out, ',"data":"', 9), page.buf + pos_of(&page.data, i), size)
                out = put(out, '","$encoding":"base64"', 22)
        size = size_of(&page.meta, i)
        if size:
            out = put(put(out, ',"meta":', 8), <const char*>page.buf + pos_of(&page.meta, i), size)
        out[0] = c"}"
        out += 1
    return out


cdef int check_text(const Page* page, const Span* span) except -1:
    """Raise what `bytes.decode` raises where a name is not UTF-8."""
    cdef Py_ssize_t i
    cdef int64_t pos = -1, size = -1
    if span.shown:
        for i in range(page.count):
            if pos_of(span, i) != pos or size_of(span, i) != size:
                pos, size = pos_of(span, i), size_of(span, i)
                PyUnicode_DecodeUTF8(<const char*>page.buf + pos, size, NULL)
    return 0


cdef class Views:
    """The memory of arrays, held until this is let go."""

    cdef Py_buffer[12] _held
    cdef int _count

    def __dealloc__(self):
        while self._count:
            self._count -= 1
            PyBuffer_Release(&self._held[self._count])

    cdef Py_buffer* take(self, object array, int flags) except NULL:
        cdef Py_buffer* view = &self._held[self._count]
        PyObject_GetBuffer(array, view, flags)
        self._count += 1
        return view

    cdef Column column(self, object array, Py_ssize_t width, Py_ssize_t count) except *:
        cdef Py_buffer* view = self.take(array, PyBUF_STRIDES)
        if view.ndim != 1 or view.itemsize != width or view.shape[0] < count:
            raise ValueError(f"a column is not one of {count} values of {width} bytes")
        return Column(<const char*>view.buf, view.strides[0])

    cdef Span span(self, object given, Py_ssize_t count) except *:
        cdef Span made = Span(given is not None, Column(NULL, 0), Column(NULL, 0))
        if made.shown:
            pos, size = given
            made.pos, made.size = self.column(pos, 8, count), self.column(size, 8, count)
        return made

    cdef void* room(self, object array, Py_ssize_t width, Py_ssize_t count) except NULL:
        cdef Py_buffer* view = self.take(array, PyBUF_CONTIG)
        if view.itemsize != width or view.len != width * count:
            raise ValueError(f"a column is not room for {count} values of {width} bytes")
        return view.buf

    cdef Place place(self, object given, Py_ssize_t count) except *:
        cdef Place made = Place(NULL, NULL)
        if given is not None:
            pos, size = given
            made.pos, made.size = <int64_t*>self.room(pos, 8, count), <int64_t*>self.room(size, 8, count)
        return made


def encode_json_rows(buf, seq, ts_us, json, data, node, tag, meta, bytes between not None, bytes last not None):
    """The rows as JSON objects, `between` two of them and `last` behind the last one.

    `json` tells which of them hold JSON. A column is positions and sizes in `buf`, or None: left out. ValueError where
    a value lies outside of `buf`, UnicodeDecodeError where a name is not UTF-8.
    """
    cdef Views views = Views()
    cdef Page page
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    page.buf, page.buf_bytes = <const uint8_t*>whole.buf, whole.len
    page.count = len(seq)
    page.between, page.between_bytes = PyBytes_AS_STRING(between), PyBytes_GET_SIZE(between)
    page.seq, page.ts_us = views.column(seq, 8, page.count), views.column(ts_us, 8, page.count)
    page.json = views.column(json, 1, page.count)
    page.data, page.node = views.span(data, page.count), views.span(node, page.count)
    page.tag, page.meta = views.span(tag, page.count), views.span(meta, page.count)

    cdef int64_t room = bound(&page)
    cdef Py_ssize_t last_bytes = PyBytes_GET_SIZE(last) if page.count else 0
    if room < 0:
        raise ValueError("a value lies outside of the buffer")
    cdef PyObject* made = new_bytes(NULL, room + last_bytes)
    cdef char* start = inside(made)
    cdef char* out
    cdef uint8_t seen = 0
    try:
        if room < LARGE:
            out = fill(&page, start, start + room, &seen)
        else:
            with nogil:
                out = fill(&page, start, start + room, &seen)
        if out is NULL:
            raise ValueError("the rows were changed while they were read")
        if seen & 128:
            check_text(&page, &page.node)
            check_text(&page, &page.tag)
        out = put(out, PyBytes_AS_STRING(last), last_bytes)
    except BaseException:
        Py_DECREF(<object>made)
        raise
    resize(&made, out - start)
    text = <object>made  # a second reference
    Py_DECREF(text)
    return text


# ── the records of a batch ────────────────────────────────────────────────────────────────────────

cdef enum:
    BARE = 72  # of a row, at most, without its data: two keys with their numbers, a third key, a brace and a comma


cdef inline int64_t length_of(const uint8_t* lengths, Py_ssize_t i) noexcept nogil:
    return <int64_t>lengths[4 * i] | <int64_t>lengths[4 * i + 1] << 8 | <int64_t>lengths[4 * i + 2] << 16 | (
        <int64_t>lengths[4 * i + 3] << 24
    )


cdef int64_t total_of(const uint8_t* lengths, Py_ssize_t lo, Py_ssize_t hi) noexcept nogil:
    cdef int64_t total = 0
    cdef Py_ssize_t i
    for i in range(lo, hi):
        total += length_of(lengths, i)
    return total


cdef char* fill_bare(
    const uint8_t* lengths, const uint8_t* at, int64_t left, Py_ssize_t lo, Py_ssize_t hi, int64_t seq, int64_t ts_ms,
    char* out
) noexcept nogil:
    """Write rows of `left` bytes of data in all; NULL where the lengths say more: they have changed meanwhile."""
    cdef char[NUMBER] stamp
    cdef Py_ssize_t i, stamp_bytes = put_int(stamp, ts_ms) - stamp
    cdef int64_t size
    for i in range(lo, hi):
        size = length_of(lengths, i)
        if size > left:
            return NULL
        if i > lo:
            out[0] = c","
            out += 1
        out = put_int(put(out, '{"$seq":', 8), seq + i - lo)
        out = put(put(out, ',"$ts":', 7), stamp, stamp_bytes)
        out = put(put(out, ',"data":', 8), <const char*>at, size)
        out[0] = c"}"
        out += 1
        at += size
        left -= size
    return out


def encode_json_batch(
    buf, Py_ssize_t lengths_at, Py_ssize_t count, Py_ssize_t data_end, Py_ssize_t lo, Py_ssize_t hi, int64_t seq,
    int64_t ts_ms
):
    """Records [lo, hi) of a batch as JSON objects with commas between them, the first of which is of `seq`. `count`
    lengths lie at `lengths_at` of `buf`, and the values behind them, up to `data_end`. None where that does not add
    up; ValueError where it lies outside of `buf`."""
    cdef Views views = Views()
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    if not (0 <= lengths_at <= data_end <= whole.len and 0 <= lo < hi <= count <= (data_end - lengths_at) // 4):
        raise ValueError("a batch lies outside of the buffer")
    cdef Py_ssize_t start = lengths_at + 4 * count
    cdef const uint8_t* lengths = <const uint8_t*>whole.buf + lengths_at
    cdef int64_t before = total_of(lengths, 0, lo), size = total_of(lengths, lo, hi)
    if before + size + total_of(lengths, hi, count) != data_end - start:
        return None
    cdef PyObject* made = new_bytes(NULL, size + BARE * (hi - lo))
    cdef char* first = inside(made)
    cdef const uint8_t* at = <const uint8_t*>whole.buf + start + before
    cdef char* out
    try:
        if size < LARGE:
            out = fill_bare(lengths, at, size, lo, hi, seq, ts_ms, first)
        else:
            with nogil:
                out = fill_bare(lengths, at, size, lo, hi, seq, ts_ms, first)
        if out is NULL:
            raise ValueError("the batch was changed while it was read")
    except BaseException:
        Py_DECREF(<object>made)
        raise
    resize(&made, out - first)
    text = <object>made  # a second reference
    Py_DECREF(text)
    return text


# ── records that an index names, and columns of values ────────────────────────────────────────────

cdef enum:  # as `formats.frame`, `formats.batch` and `formats.idx` draw them
    HEADER_BYTES = 38
    OVERHEAD_BYTES = 46  # of a frame: its header and its checksum
    APPEND = 1
    APPEND_BATCH = 12
    NAMED = 3  # a frame has a tag, a node; the same in an entry
    KNOWN = 31  # flags of a frame
    ALL_JSON = 16  # one of them
    HEAD_BYTES = 8  # of a batch: its count, and zeros where records have nothing but data
    ENTRY_BYTES = 20
    IN_BATCH = 4  # flags of an entry
    IS_JSON = 8
    MANY = 1 << 16  # entries from which the lock is let go: 0.2 ms

cdef uint64_t _SEQ_MAX = (<uint64_t>1 << 63) - 2
cdef uint64_t _TS_MS_MAX = ((<uint64_t>1 << 63) - 1) // 1000


cdef struct Found:
    const uint8_t* buf
    int64_t buf_bytes
    const uint8_t* entries
    Py_ssize_t count
    uint64_t seq  # of the first entry
    int64_t origin  # where `buf` begins in what entries tell of
    int64_t* ts_us
    int64_t* at
    uint8_t* flags
    Place data
    Place node  # NULL where there is no column for it
    Place tag


cdef inline uint64_t wide_of(const uint8_t* at) noexcept nogil:
    return <uint64_t>length_of(at, 0) | <uint64_t>length_of(at, 1) << 32


cdef inline bint is_ascii(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    cdef uint8_t seen = 0
    cdef Py_ssize_t i
    for i in range(size):
        seen |= text[i]
    return seen < 128


cdef inline bint is_entry(const uint8_t* entry, int64_t at, int64_t size, uint64_t ts_ms, int flags) noexcept nogil:
    return (
        length_of(entry, 0) == at and length_of(entry, 1) == size and wide_of(entry + 8) == ts_ms and entry[16] == flags
    )


cdef Py_ssize_t fill_frame(const Found* it, Py_ssize_t i, int64_t* least) noexcept nogil:
    """The records of the frame that entry `i` names, from that one on: how many; 0 where anything is out of the
    ordinary, -1 where there is no column for its names. The frame begins at `least` or behind it, and the next one
    where that is left."""
    cdef const uint8_t* entry = it.entries + i * ENTRY_BYTES
    cdef int64_t named_at = length_of(entry, 0), at = named_at - it.origin
    if at < least[0] or at > it.buf_bytes - OVERHEAD_BYTES:
        return 0
    cdef const uint8_t* frame = it.buf + at
    cdef int64_t frame_len = length_of(frame, 0), node_len = frame[30] | frame[31] << 8
    cdef int64_t tag_len = frame[32] | frame[33] << 8, data_len = length_of(frame + 34, 0)
    cdef int kind = frame[4], said = frame[5], flags
    cdef uint64_t seq = wide_of(frame + 14), ts_ms = wide_of(frame + 22), wanted = it.seq + i
    if OVERHEAD_BYTES + node_len + tag_len + data_len != frame_len + 4 or frame_len + 4 > it.buf_bytes - at:
        return 0
    if said > KNOWN or seq > _SEQ_MAX or ts_ms > _TS_MS_MAX or seq > wanted:
        return 0
    # Tag is bit 0, node bit 1: each is there exactly where it has bytes.
    if (said & NAMED) != (tag_len > 0) + 2 * (node_len > 0):
        return 0
    if (tag_len and it.tag.pos is NULL) or (node_len and it.node.pos is NULL):
        return -1
    cdef int64_t node_at = at + HEADER_BYTES, tag_at = node_at + node_len, data_at = tag_at + tag_len
    if not is_ascii(it.buf + node_at, node_len + tag_len):
        return 0
    flags = said & NAMED | (IS_JSON if said & ALL_JSON else 0) | (IN_BATCH if kind == APPEND_BATCH else 0)
    cdef int64_t pos = data_at, size = data_len, left = 0, count = 1, lo, hi, j, k
    cdef const uint8_t* lengths = NULL
    if kind == APPEND_BATCH:
        count = length_of(it.buf + data_at, 0) if data_len >= HEAD_BYTES else 0
        left = data_len - HEAD_BYTES - 4 * count
        if not count or left < 0 or length_of(it.buf + data_at, 1) or <uint64_t>count - 1 > _SEQ_MAX - seq:
            return 0
        lengths = it.buf + data_at + HEAD_BYTES
        pos = data_at + HEAD_BYTES + 4 * count
    elif kind != APPEND:
        return 0
    if wanted - seq >= <uint64_t>count:
        return 0
    lo = wanted - seq
    hi = min(count, lo + it.count - i)
    if lengths is not NULL:
        size = total_of(lengths, 0, lo)
        pos += size
        left -= size + total_of(lengths, hi, count)
    for j in range(lo, hi):
        if lengths is not NULL:
            size = length_of(lengths, j)
            left -= size
        k = i + j - lo
        if not is_entry(it.entries + k * ENTRY_BYTES, named_at, size, ts_ms, flags):
            return 0
        it.ts_us[k], it.at[k], it.flags[k] = <int64_t>ts_ms * 1000, at, <uint8_t>flags
        it.data.pos[k], it.data.size[k] = pos, size
        if it.node.pos is not NULL:
            it.node.pos[k], it.node.size[k] = node_at, node_len
        if it.tag.pos is not NULL:
            it.tag.pos[k], it.tag.size[k] = tag_at, tag_len
        pos += size
    # Lengths are not negative, so a total that is right means that every value lies in the frame.
    least[0] = at + 4 + frame_len
    return 0 if left else hi - lo


cdef int fill_found(const Found* it) noexcept nogil:
    cdef int64_t least = 0
    cdef Py_ssize_t i = 0, found
    while i < it.count:
        found = fill_frame(it, i, &least)
        if found <= 0:
            return <int>found
        i += found
    return 1


def fill_indexed_records(buf, entries, int64_t seq, int64_t origin, ts_us, at, flags, data, node, tag):
    """Fill these columns with the records of `entries`, the first of which is of `seq` and says where in `buf`, which
    begins at `origin`, its frame lies. `data`, `node` and `tag` are positions and sizes. 1; 0 where anything is out of
    the ordinary, and -1 where a record has a node or a tag and the column is None: what is in the columns then is of no
    use."""
    cdef Views views = Views()
    cdef Found found
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    cdef Py_buffer* index = views.take(entries, PyBUF_SIMPLE)
    if index.len % ENTRY_BYTES or seq < 0:
        raise ValueError("an index is entries, and seqs are not negative")
    found.buf, found.buf_bytes = <const uint8_t*>whole.buf, whole.len
    found.entries, found.count = <const uint8_t*>index.buf, index.len // ENTRY_BYTES
    found.seq, found.origin = <uint64_t>seq, origin
    found.ts_us = <int64_t*>views.room(ts_us, 8, found.count)
    found.at = <int64_t*>views.room(at, 8, found.count)
    found.flags = <uint8_t*>views.room(flags, 1, found.count)
    found.data, found.node = views.place(data, found.count), views.place(node, found.count)
    found.tag = views.place(tag, found.count)
    if found.count < MANY:
        return fill_found(&found)
    cdef int done
    with nogil:
        done = fill_found(&found)
    return done


cdef bint fill_copied(const Page* page, char* out, int64_t room, char* edges) noexcept nogil:
    """Copy the values one behind the other, those that lie so already at once; False where they do not fit."""
    cdef int64_t first = 0, end = 0, pos, size, done = 0  # [first, end) is what is still to be copied
    cdef int32_t edge = 0
    cdef Py_ssize_t i
    for i in range(page.count):
        if not is_inside(&page.data, i, page.buf_bytes):
            return False
        pos, size = pos_of(&page.data, i), size_of(&page.data, i)
        if size > room - done - (end - first):
            return False
        if pos != end:
            memcpy(out + done, page.buf + first, end - first)
            done += end - first
            first = pos
        end = pos + size
        edge = <int32_t>(done + end - first)
        memcpy(edges + 4 * (i + 1), &edge, 4)
    memcpy(out + done, page.buf + first, end - first)
    return done + end - first == room


def copy_values(target, edges, buf, pos, size):
    """Copy the values at these positions target `target`, which they fill, one behind the other, and put where each begins
    and where the last one ends target `edges`, i32 of this machine. ValueError where a value lies outside of `buf`, and
    where they do not fill it; what lies there then is of no use."""
    cdef Views views = Views()
    cdef Page page
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    cdef Py_buffer* room = views.take(target, PyBUF_WRITABLE)
    cdef Py_buffer* offsets = views.take(edges, PyBUF_WRITABLE)
    cdef int32_t zero = 0
    page.buf, page.buf_bytes, page.count = <const uint8_t*>whole.buf, whole.len, len(pos)
    page.data = views.span((pos, size), page.count)
    if offsets.len != 4 * (page.count + 1) or room.len >> 31:
        raise ValueError("there are as many edges as values, and one; and they count up to 2 GiB")
    memcpy(offsets.buf, &zero, 4)
    cdef bint done
    if room.len < LARGE:
        done = fill_copied(&page, <char*>room.buf, room.len, <char*>offsets.buf)
    else:
        with nogil:
            done = fill_copied(&page, <char*>room.buf, room.len, <char*>offsets.buf)
    if not done:
        raise ValueError("a value lies outside of the buffer, or they do not fill the memory")


# ── memory of columns ─────────────────────────────────────────────────────────────────────────────

cdef enum:
    LENT_STEP = 1 << 12
    KEPT_MOST = 64 << 20  # a table of 500 000 records of 100 bytes

cdef Py_ssize_t LENT_MOST = <Py_ssize_t>1 << 46  # so that rounding up stays within a number

cdef list _kept = []  # what came back, in the order in which it did
cdef Py_ssize_t _kept_bytes = 0


cdef class Lent:
    """Memory that comes back when nobody looks at it any more, through whatever views of it there are: each of them
    holds this, and this holds the memory."""

    cdef bytearray _memory
    cdef Py_ssize_t _size

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, PyByteArray_AS_STRING(self._memory), self._size, False, flags)

    def __dealloc__(self):
        global _kept_bytes
        cdef Py_ssize_t size
        if self._memory is not None:
            size = PyByteArray_GET_SIZE(self._memory)
            if _kept is not None and _kept_bytes + size <= KEPT_MOST:
                _kept_bytes += size
                _kept.append(self._memory)


def borrow_buffer(Py_ssize_t size):
    """Memory of this size with anything in it, of something that is gone where there is such."""
    global _kept_bytes
    cdef Py_ssize_t i, found
    cdef Lent made = Lent()  # first: whatever is collected on the way may come back as well
    if size < 0 or size > LENT_MOST:
        raise ValueError("no memory is that small, or that large")
    for i in range(len(_kept) - 1, -1, -1):
        found = PyByteArray_GET_SIZE(<bytearray>_kept[i])
        if size <= found <= size + (size >> 2) + LENT_STEP:
            made._memory = <bytearray>_kept.pop(i)
            _kept_bytes -= found
            break
    else:
        made._memory = PyByteArray_FromStringAndSize(NULL, (size + LENT_STEP - 1) // LENT_STEP * LENT_STEP)
    made._size = size
    return made


# ── the body of a write ───────────────────────────────────────────────────────────────────────────

cdef enum:
    DEPTH = 32  # of what is nested; deeper is the twin's
    QUOTE = 34
    ESCAPE = 92
    BLANK = 32

cdef uint64_t _ONES = 0x0101010101010101
cdef uint64_t _HIGHS = 0x8080808080808080


cdef inline bint has_special(const uint8_t* at) noexcept nogil:
    """Whether one of eight bytes may be a quote, a backslash or a control character; sure where it says no."""
    cdef uint64_t word, quote, escape
    memcpy(&word, at, 8)
    quote, escape = word ^ (_ONES * QUOTE), word ^ (_ONES * ESCAPE)
    return (((quote - _ONES) & ~quote) | ((escape - _ONES) & ~escape) | ((word - _ONES * BLANK) & ~word)) & _HIGHS != 0


cdef Py_ssize_t string_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Behind the string whose first byte behind its quote is at `i`; -1: there is none, or one for the twin."""
    cdef uint8_t byte
    while True:
        while i + 8 <= end and not has_special(text + i):
            i += 8
        if i >= end:
            return -1
        byte = text[i]
        if byte == QUOTE:
            return i + 1
        if byte < BLANK:
            return -1
        if byte == ESCAPE:  # by its number, or needless: the twin writes it shorter
            i += 1
            byte = text[i]
            if byte != QUOTE and byte != ESCAPE and byte not in (c"b", c"f", c"n", c"r", c"t"):
                return -1
        i += 1


cdef Py_ssize_t number_end(const uint8_t* text, Py_ssize_t i) noexcept nogil:
    """Behind a number without an exponent; the text ends with a zero byte, so nothing is read behind it."""
    cdef Py_ssize_t first
    if text[i] == c"-":
        i += 1
    first = i
    while c"0" <= text[i] <= c"9":
        i += 1
    if i == first or (text[first] == c"0" and i > first + 1):
        return -1
    if text[i] == c".":
        i += 1
        first = i
        while c"0" <= text[i] <= c"9":
            i += 1
        if i == first:
            return -1
    return i


cdef Py_ssize_t key_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Behind the colon of the key that starts at `i`."""
    if text[i] != QUOTE:
        return -1
    i = string_end(text, i + 1, end)
    return i + 1 if i >= 0 and text[i] == c":" else -1


cdef Py_ssize_t value_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Behind the JSON value that starts at `i`, which has no blanks between its words; -1: there is none such."""
    cdef uint64_t objects = 0  # of what we are in, innermost first: 1 is an object, 0 a list
    cdef int depth = 0
    cdef uint8_t byte
    while True:
        byte = text[i]
        if byte == QUOTE:
            i = string_end(text, i + 1, end)
        elif byte == c"{":
            if text[i + 1] == c"}":
                i += 2
            else:
                objects, depth = objects << 1 | 1, depth + 1
                i = key_end(text, i + 1, end)
                if i < 0 or depth > DEPTH:
                    return -1
                continue
        elif byte == c"[":
            if text[i + 1] == c"]":
                i += 2
            else:
                objects, depth = objects << 1, depth + 1
                i += 1
                if depth > DEPTH:
                    return -1
                continue
        elif byte == c"t" and end - i >= 4 and memcmp(text + i, b"true", 4) == 0:
            i += 4
        elif byte == c"f" and end - i >= 5 and memcmp(text + i, b"false", 5) == 0:
            i += 5
        elif byte == c"n" and end - i >= 4 and memcmp(text + i, b"null", 4) == 0:
            i += 4
        else:
            i = number_end(text, i)
        if i < 0:
            return -1
        while depth:
            byte = text[i]
            if byte == c",":
                i = key_end(text, i + 1, end) if objects & 1 else i + 1
                break
            if byte != (c"}" if objects & 1 else c"]"):
                return -1
            i, objects, depth = i + 1, objects >> 1, depth - 1
        else:
            return i
        if i < 0:
            return -1


cdef bint take_datas(bytes body, Py_ssize_t most, list found) except -1:
    """Whether the body is a write of up to `most` records and nothing else; what was found is added in any case."""
    cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(body)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(body), i = 12, start, count
    if end < 12 or memcmp(text, b'{"records":[', 12) != 0:
        return False
    for count in range(most):
        if end - i < 8 or memcmp(text + i, b'{"data":', 8) != 0:
            return False
        start = i + 8
        i = value_end(text, start, end)
        if i < 0 or text[i] != c"}":
            return False
        found.append(PyBytes_FromStringAndSize(<const char*>text + start, i - start))
        i += 2
        if text[i - 1] == c"]":
            return end == i + 1 and text[i] == c"}"
        if text[i - 1] != c",":
            return False
    return False


def parse_plain_body(bytes body not None, Py_ssize_t records_max):
    """The data of up to `records_max` records of the body of a write that is nothing but that, written without a needless
    byte; None: it is for the twin. That the body is UTF-8 the caller knows."""
    cdef list found = []
    return found if take_datas(body, records_max, found) else None


def parse_plain_bodies(list bodies not None, Py_ssize_t records_max, Py_ssize_t size_max):
    """`parse_plain_body` of every body, all in one list, and how many are each one's; None: one of them is for the twin, is not
    ASCII or is longer than `size_max`."""
    cdef list found = [], counts = []
    cdef Py_ssize_t before = 0
    cdef bytes body
    for body in bodies:
        if body is None or PyBytes_GET_SIZE(body) > size_max:
            return None
        if not is_ascii(<const uint8_t*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body)):
            return None
        if not take_datas(body, records_max, found):
            return None
        counts.append(len(found) - before)
        before = len(found)
    return found, counts


cdef Py_ssize_t depth_of(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i = 0, now = 0, most = 0
    cdef bint is_quoted = False
    cdef uint8_t c
    while i < size:
        c = text[i]
        if is_quoted:
            if c == c"\\":
                i += 1
            elif c == c'"':
                is_quoted = False
        elif c == c'"':
            is_quoted = True
        elif c == c"[" or c == c"{":
            now += 1
            if now > most:
                most = now
        elif c == c"]" or c == c"}":
            now -= 1
        i += 1
    return most


def json_depth(bytes text not None):
    """How deep JSON is nested. The text is JSON, as the caller knows."""
    cdef const uint8_t* octets = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text), most
    if size < LARGE:
        return depth_of(octets, size)
    with nogil:
        most = depth_of(octets, size)
    return most


cdef int32_t hex_of(const uint8_t* text) noexcept nogil:
    """The number that four hexadecimal digits are; -1 where they are none."""
    cdef int32_t value = 0
    cdef Py_ssize_t i
    cdef uint8_t c
    for i in range(4):
        c = text[i]
        if c"0" <= c <= c"9":
            c -= c"0"
        elif c"a" <= (c | 32) <= c"f":
            c = (c | 32) - c"a" + 10
        else:
            return -1
        value = value * 16 + c
    return value


cdef Py_ssize_t unescape(const uint8_t* text, Py_ssize_t size, uint8_t* out) noexcept nogil:
    """Write the text without needless escapes; it is never longer than before. Returns its size, -1 where an escape is
    none."""
    cdef Py_ssize_t i = 0, end = 0
    cdef int32_t code, low
    cdef uint8_t how
    while i < size:
        if text[i] != c"\\":
            out[end] = text[i]
            i, end = i + 1, end + 1
            continue
        if size - i < 2:
            return -1
        if text[i + 1] == c"/":
            out[end] = c"/"
            i, end = i + 2, end + 1
            continue
        if text[i + 1] != c"u":
            out[end], out[end + 1] = text[i], text[i + 1]
            i, end = i + 2, end + 2
            continue
        if size - i < 6:
            return -1
        code = hex_of(text + i + 2)
        i += 6
        if code < 0 or 0xDC00 <= code <= 0xDFFF:
            return -1
        if 0xD800 <= code <= 0xDBFF:
            if size - i < 6 or text[i] != c"\\" or text[i + 1] != c"u":
                return -1
            low = hex_of(text + i + 2)
            if not 0xDC00 <= low <= 0xDFFF:
                return -1
            i += 6
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            out[end] = <uint8_t>(0xF0 | (code >> 18))
            out[end + 1] = <uint8_t>(0x80 | ((code >> 12) & 0x3F))
            out[end + 2] = <uint8_t>(0x80 | ((code >> 6) & 0x3F))
            out[end + 3] = <uint8_t>(0x80 | (code & 0x3F))
            end += 4
        elif code >= 0x800:
            out[end] = <uint8_t>(0xE0 | (code >> 12))
            out[end + 1] = <uint8_t>(0x80 | ((code >> 6) & 0x3F))
            out[end + 2] = <uint8_t>(0x80 | (code & 0x3F))
            end += 3
        elif code >= 0x80:
            out[end] = <uint8_t>(0xC0 | (code >> 6))
            out[end + 1] = <uint8_t>(0x80 | (code & 0x3F))
            end += 2
        else:
            how = _ESCAPES[code]
            if how == 0:
                out[end] = <uint8_t>code
                end += 1
            elif how == 1:
                memcpy(out + end, b"\\u00", 4)
                out[end + 4], out[end + 5] = _HEX[code >> 4], _HEX[code & 15]
                end += 6
            else:
                out[end], out[end + 1] = c"\\", how
                end += 2
    return end


def remove_json_escapes(bytes text not None):
    """JSON without escapes that UTF-8 does not need; None: it is for the twin, which says what is wrong with it."""
    cdef const uint8_t* octets = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text), end
    cdef bytes made = PyBytes_FromStringAndSize(NULL, size)
    cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(made)
    if size < LARGE:
        end = unescape(octets, size, out)
    else:
        with nogil:
            end = unescape(octets, size, out)
    return None if end < 0 else made[:end]


# ── from frame to frame ───────────────────────────────────────────────────────────────────────────


def find_frames(buf, int64_t pos, int64_t end, Py_ssize_t frames_max):
    """Where up to `frames_max` frames begin, as i64 of this machine, the first at `pos`, each where the one before it says
    that it ends; and where the last one ends. None begins so near `end` that the next length would lie behind it."""
    cdef const uint8_t[::1] octets = memoryview(buf).cast("B") if len(buf) else b""
    if not 0 <= pos <= end <= octets.shape[0] or frames_max < 0:
        raise ValueError("no such stretch")
    frames_max = min(frames_max, (end - pos) // OVERHEAD_BYTES)  # no more than there is room for
    cdef bytes made = PyBytes_FromStringAndSize(NULL, 8 * frames_max)
    cdef char* out = PyBytes_AS_STRING(made)
    cdef uint32_t length = 0
    cdef Py_ssize_t count = 0
    while count < frames_max and end - pos >= OVERHEAD_BYTES:
        memcpy(&length, &octets[pos], 4)
        if length < OVERHEAD_BYTES - 4 or length > end - pos - 8:
            break
        memcpy(out + 8 * count, &pos, 8)
        count += 1
        pos += 4 + <int64_t>length
    return made[: 8 * count], pos


# ── syncs ─────────────────────────────────────────────────────────────────────────────────────────


def fsync_loop(int request_fd, int result_fd):
    """Sync each descriptor that can be read from `request_fd` and write what came of it, an errno or 0, to `result_fd`; until
    one is below 0, or there are none any more. Never with the interpreter's lock."""
    cdef int descriptor = 0
    cdef int code = 0
    cdef ssize_t size = 0
    with nogil:
        while True:
            size = read(request_fd, &descriptor, sizeof(int))
            if size < 0 and errno == EINTR:
                continue
            if size != sizeof(int) or descriptor < 0:
                break
            code = 0
            while fdatasync(descriptor) != 0:
                code = errno
                if code != EINTR:
                    break
                code = 0
            while write(result_fd, &code, sizeof(int)) < 0 and errno == EINTR:
                pass


# ── the values of a batch ─────────────────────────────────────────────────────────────────────────


def all_bytes(values):
    """Whether each of them is bytes, and of no class derived from it."""
    cdef object sequence = fast(values, "a batch is a list or a tuple")
    cdef PyObject** items = fast_items(sequence)
    cdef Py_ssize_t i
    for i in range(fast_size(sequence)):
        if not is_bytes(items[i]):
            return False
    return True


def value_lengths(datas):
    """How long each is, as u32 of this machine, and all together; None: one is no bytes or too long, ask the twin."""
    cdef object values = fast(datas, "a batch is a list or a tuple")
    cdef PyObject** items = fast_items(values)
    cdef Py_ssize_t i, size, count = fast_size(values)
    cdef uint64_t total = 0
    cdef uint32_t length
    cdef bytes made = PyBytes_FromStringAndSize(NULL, 4 * count)
    cdef char* out = PyBytes_AS_STRING(made)
    for i in range(count):
        if not is_bytes(items[i]):
            return None
        size = bytes_size(items[i])
        if size >> 32:  # a number that long would be compared as an object
            return None
        length = <uint32_t>size
        memcpy(out + 4 * i, &length, 4)
        total += length
    return made, total


def split_by_size(lengths, uint64_t size_max, Py_ssize_t count_max):
    """Values [lo, hi) that go together and their size: as many as make `size_max` bytes, at most `count_max`, and one in
    any case."""
    count_max = max(count_max, 1)
    if not len(lengths):
        return []  # of nothing there is no view
    cdef const uint8_t[::1] octets = memoryview(lengths).cast("B")
    cdef Py_ssize_t lo, hi = 0, count = octets.shape[0] // 4
    cdef uint64_t size
    cdef uint32_t length = 0
    cdef list found = []
    while hi < count:
        lo, size = hi, 0
        while hi < count and hi - lo < count_max:
            memcpy(&length, &octets[4 * hi], 4)
            if hi > lo and size + length > size_max:
                break
            size += length
            hi += 1
        found.append((lo, hi, size))
    return found


def copy_values_into(bytearray target not None, Py_ssize_t pos, datas, Py_ssize_t lo, Py_ssize_t hi):
    """Copy values [lo, hi) to `pos` and behind it; return where the last one ends."""
    cdef object values = fast(datas, "a batch is a list or a tuple")
    cdef PyObject** items = fast_items(values)
    cdef Py_ssize_t i, size, limit = PyByteArray_GET_SIZE(target)
    cdef char* out = PyByteArray_AS_STRING(target)
    if not 0 <= pos <= limit or not 0 <= lo <= hi <= fast_size(values):
        raise ValueError("no such values, or no such place")
    for i in range(lo, hi):
        if not is_derived_bytes(items[i]):
            raise ValueError("a value is not bytes")
        size = bytes_size(items[i])
        if pos > limit - size:
            raise ValueError("the values do not fit the memory")
        memcpy(out + pos, inside(items[i]), size)
        pos += size
    return pos


# ── responses to small writes ─────────────────────────────────────────────────────────────────────

cdef enum:
    SEQ = 21  # digits of a seq and its comma
    COUNT_MAX = 1 << 30  # records of one write: no more than a batch can have
    FIXED_ANSWER = 160  # numbers of an answer, and what is around them


cdef int64_t SEQ_END = (<uint64_t>1 << 63) - 1


def encode_write_responses(
    int64_t first, counts, took_us, bytes start not None, bytes head not None, bytes middle not None, bytes took not None
):
    """The answer to each of the writes that became one batch: what `server.api.write` says."""
    cdef list made = []
    cdef int64_t last, count, us, part
    cdef Py_ssize_t size = (
        PyBytes_GET_SIZE(start) + PyBytes_GET_SIZE(head) + PyBytes_GET_SIZE(middle) + PyBytes_GET_SIZE(took)
    )
    cdef bytearray room = bytearray(size + FIXED_ANSWER + SEQ)
    cdef char* out
    for count, us in zip(counts, took_us, strict=True):
        if not 1 <= count <= COUNT_MAX or us < 0 or first < 0 or first > SEQ_END - count:
            raise ValueError("a write has records and took some time")
        if PyByteArray_GET_SIZE(room) < size + FIXED_ANSWER + SEQ * count:
            room = bytearray(size + FIXED_ANSWER + SEQ * count)
        last = first + count - 1
        out = put(PyByteArray_AS_STRING(room), PyBytes_AS_STRING(start), PyBytes_GET_SIZE(start))
        out = put_int(out, first)
        out = put(out, b',"last_seq":', 12)
        out = put_int(out, last)
        out = put(out, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head))
        out = put_int(out, count)
        out = put(out, PyBytes_AS_STRING(middle), PyBytes_GET_SIZE(middle))
        out = put_ms(out, us)
        out = put(out, PyBytes_AS_STRING(took), PyBytes_GET_SIZE(took))
        out = put(out, b',"seqs":[', 9)
        while True:
            out = put_int(out, first)
            first += 1
            if first > last:
                break
            out = put(out, b",", 1)
        out = put(out, b"]}", 2)
        made.append(PyBytes_FromStringAndSize(PyByteArray_AS_STRING(room), out - PyByteArray_AS_STRING(room)))
    return made


cdef inline char* put_ms(char* out, int64_t us) noexcept nogil:
    """Microseconds as milliseconds, as Python writes the float."""
    cdef int rest = us % 1000
    out = put_int(out, us // 1000)
    out[0], out[1] = c".", <char>(c"0" + rest // 100)
    out += 2
    if rest % 100:
        out[0] = <char>(c"0" + rest // 10 % 10)
        out += 1
        if rest % 10:
            out[0] = <char>(c"0" + rest % 10)
            out += 1
    return out
