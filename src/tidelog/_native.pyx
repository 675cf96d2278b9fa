# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Compiled functions over bytes. Import them through `tidelog.native`.

    records as JSON text    encode_json_rows, encode_json_batch
    JSON text of clients    parse_plain_body, parse_plain_bodies, json_depth, remove_json_escapes
    values in JSON text     find_json_values
    values of a batch       all_bytes, value_lengths, split_by_size, copy_values_into
    frames of a WAL         find_frames, fsync_loop
    frames of any file      count_valid_checksums, remove_records, have_equal_values
    columns of records      fill_indexed_records, copy_values, borrow_buffer
    responses of writes     encode_write_responses

`_pure_python.py` has the reference implementation of each; where there is no compiler it is used instead.

Every position is checked: a value outside of its buffer raises ValueError, and no row is begun that may not fit. Text is
written into a buffer of the largest possible size, which is then shortened. Calls on less than LARGE bytes keep the
interpreter's lock: to take it again can last as long as another thread keeps it.
"""

from cpython.buffer cimport PyBUF_CONTIG, PyBUF_CONTIG_RO, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.errno cimport EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cdef extern from "Python.h":
    # Not as Cython wraps them: the new object changes its size before any other code sees it.
    PyObject* new_bytes "PyBytes_FromStringAndSize" (const char* text, Py_ssize_t size) except NULL
    int resize "_PyBytes_Resize" (PyObject** text, Py_ssize_t size) except -1
    char* inside "PyBytes_AS_STRING" (PyObject* text)
    # Borrowed values of a list or a tuple: no code runs that could change it during the call.
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
    ROW_BYTES_MAX = 128  # of a row without its values: all keys, two numbers, quotes and braces
    LARGE = 1 << 20  # bytes of text from which the lock is released: 0.2 ms, at 22 µs for 145 KB
    NUMBER_BYTES_MAX = 20  # digits and a sign

cdef const char* _HEX = "0123456789abcdef"
cdef const char* _BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
cdef uint8_t[256] _ESCAPES  # 0: copied; a letter: after a backslash; 1: by its number
cdef int _byte
for _byte in range(256):
    _ESCAPES[_byte] = 1 if _byte < 32 else 0
for _byte, _letter in ((8, b"b"), (9, b"t"), (10, b"n"), (12, b"f"), (13, b"r"), (34, b'"'), (92, b"\\")):
    _ESCAPES[_byte] = <uint8_t>(<bytes>_letter)[0]


cdef struct Column:
    const char* first
    Py_ssize_t step  # bytes from one value to the next


cdef struct Span:
    bint is_shown
    Column pos
    Column size


cdef struct OutputSpan:
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
    cdef int64_t number
    memcpy(&number, column.first + i * column.step, 8)
    return number


cdef inline int64_t pos_of(const Span* span, Py_ssize_t i) noexcept nogil:
    return value(&span.pos, i)


cdef inline int64_t size_of(const Span* span, Py_ssize_t i) noexcept nogil:
    return value(&span.size, i) if span.is_shown else 0


cdef inline bint is_json(const Page* page, Py_ssize_t i) noexcept nogil:
    return page.json.first[i * page.json.step] != 0


cdef inline bint is_inside(const Span* span, Py_ssize_t i, int64_t limit) noexcept nogil:
    cdef int64_t size = size_of(span, i)
    return not span.is_shown or (0 <= size <= limit and 0 <= pos_of(span, i) <= limit - size)


cdef inline int64_t row_bytes_max(const Page* page, Py_ssize_t i) noexcept nogil:
    """Return the most bytes that a row can have; -1 where a value is outside the buffer."""
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
        ROW_BYTES_MAX + page.between_bytes + data + size_of(&page.meta, i)
        + 6 * (size_of(&page.node, i) + size_of(&page.tag, i))
    )


cdef inline char* put(char* out, const char* text, Py_ssize_t size) noexcept nogil:
    memcpy(out, text, size)
    return out + size


cdef inline char* put_int(char* out, int64_t value) noexcept nogil:
    cdef char[NUMBER_BYTES_MAX] digits
    cdef int at = NUMBER_BYTES_MAX
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
            return put(out, digits + at, NUMBER_BYTES_MAX - at)


cdef inline char* put_name(char* out, const uint8_t* text, int64_t size, uint8_t* seen) noexcept nogil:
    """Write a name in quotes. The highest bit of `seen` is set when the name is not ASCII."""
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


cdef int64_t page_bytes_max(const Page* page) noexcept nogil:
    """Return the most bytes that all rows can have."""
    cdef int64_t total = 0, row
    cdef Py_ssize_t i
    for i in range(page.count):
        row = row_bytes_max(page, i)
        if row < 0:
            return -1
        total += row
    return total


cdef char* fill(const Page* page, char* out, const char* end, uint8_t* seen) noexcept nogil:
    """Write all rows; NULL where one might not fit because its sizes were changed meanwhile."""
    cdef Py_ssize_t i, stamp_bytes = 0
    cdef char[NUMBER_BYTES_MAX] stamp
    cdef int64_t ts_us, ts_ms, ts_before = 0, row, size
    for i in range(page.count):
        row = row_bytes_max(page, i)
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
        if page.data.is_shown:
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
    """Raise the error of `bytes.decode` where a name is not UTF-8."""
    cdef Py_ssize_t i
    cdef int64_t pos = -1, size = -1
    if span.is_shown:
        for i in range(page.count):
            if pos_of(span, i) != pos or size_of(span, i) != size:
                pos, size = pos_of(span, i), size_of(span, i)
                PyUnicode_DecodeUTF8(<const char*>page.buf + pos, size, NULL)
    return 0


cdef class Views:
    """The buffers of arrays, released with this object."""

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
            raise ValueError(f"a column does not have {count} values of {width} bytes")
        return Column(<const char*>view.buf, view.strides[0])

    cdef Span span(self, object given, Py_ssize_t count) except *:
        cdef Span made = Span(given is not None, Column(NULL, 0), Column(NULL, 0))
        if made.is_shown:
            pos, size = given
            made.pos, made.size = self.column(pos, 8, count), self.column(size, 8, count)
        return made

    cdef void* writable(self, object array, Py_ssize_t width, Py_ssize_t count) except NULL:
        cdef Py_buffer* view = self.take(array, PyBUF_CONTIG)
        if view.itemsize != width or view.len != width * count:
            raise ValueError(f"a column does not have {count} values of {width} bytes")
        return view.buf

    cdef const void* contiguous(self, object array, Py_ssize_t width, Py_ssize_t count) except NULL:
        cdef Py_buffer* view = self.take(array, PyBUF_CONTIG_RO)
        if view.itemsize != width or view.len != width * count:
            raise ValueError(f"a column does not have {count} values of {width} bytes")
        return view.buf

    cdef OutputSpan output_span(self, object given, Py_ssize_t count) except *:
        cdef OutputSpan made = OutputSpan(NULL, NULL)
        if given is not None:
            pos, size = given
            made.pos, made.size = <int64_t*>self.writable(pos, 8, count), <int64_t*>self.writable(size, 8, count)
        return made


def encode_json_rows(buf, seq, ts_us, json, data, node, tag, meta, bytes between not None, bytes last not None):
    """Encode rows as JSON objects, with `between` after each but the last and `last` after that.

    `json`: which of them hold JSON. A column is positions and sizes in `buf`, or None: left out. ValueError where
    a value is outside of `buf`, UnicodeDecodeError where a name is not UTF-8.
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

    cdef int64_t capacity = page_bytes_max(&page)
    cdef Py_ssize_t last_bytes = PyBytes_GET_SIZE(last) if page.count else 0
    if capacity < 0:
        raise ValueError("a value is outside of the buffer")
    cdef PyObject* made = new_bytes(NULL, capacity + last_bytes)
    cdef char* start = inside(made)
    cdef char* out
    cdef uint8_t seen = 0
    try:
        if capacity < LARGE:
            out = fill(&page, start, start + capacity, &seen)
        else:
            with nogil:
                out = fill(&page, start, start + capacity, &seen)
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
    DATA_ROW_BYTES_MAX = 72  # of a row without its data: two keys with their numbers, a third key, a brace and a comma


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


cdef char* fill_data_rows(
    const uint8_t* lengths, const uint8_t* at, int64_t left, Py_ssize_t lo, Py_ssize_t hi, int64_t seq, int64_t ts_ms,
    char* out
) noexcept nogil:
    """Write rows of `left` bytes of data in all; NULL where the lengths were changed meanwhile and are more."""
    cdef char[NUMBER_BYTES_MAX] stamp
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
    """Encode records [lo, hi) of a batch as JSON objects with commas between them; `seq` is that of the first. `count`
    lengths are at `lengths_at` of `buf`, and the values after them, up to `data_end`. None where the lengths do not add
    up; ValueError where the batch is outside of `buf`."""
    cdef Views views = Views()
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    if not (0 <= lengths_at <= data_end <= whole.len and 0 <= lo < hi <= count <= (data_end - lengths_at) // 4):
        raise ValueError("a batch is outside of the buffer")
    cdef Py_ssize_t start = lengths_at + 4 * count
    cdef const uint8_t* lengths = <const uint8_t*>whole.buf + lengths_at
    cdef int64_t before = total_of(lengths, 0, lo), size = total_of(lengths, lo, hi)
    if before + size + total_of(lengths, hi, count) != data_end - start:
        return None
    cdef PyObject* made = new_bytes(NULL, size + DATA_ROW_BYTES_MAX * (hi - lo))
    cdef char* first = inside(made)
    cdef const uint8_t* at = <const uint8_t*>whole.buf + start + before
    cdef char* out
    try:
        if size < LARGE:
            out = fill_data_rows(lengths, at, size, lo, hi, seq, ts_ms, first)
        else:
            with nogil:
                out = fill_data_rows(lengths, at, size, lo, hi, seq, ts_ms, first)
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

cdef enum:  # the layouts of `formats.frame`, `formats.batch` and `formats.segment_index`, which compares them at import
    HEADER_BYTES = 38
    OVERHEAD_BYTES = 46  # of a frame: its header and its checksum
    APPEND = 1
    APPEND_BATCH = 12
    NAME_FLAGS = 3  # of a frame and of an entry: it has a tag, a node
    KNOWN_FLAGS = 31  # of a frame
    FRAME_DURABLE = 4
    FRAME_JSON = 16
    BATCH_HEAD_BYTES = 8  # its count, and zeros where records have nothing but data
    ENTRY_BYTES = 20
    ENTRY_BATCH = 4
    ENTRY_JSON = 8
    MANY_ENTRIES = 1 << 16  # from which the lock is released: 0.2 ms

cdef uint64_t _SEQ_MAX = (<uint64_t>1 << 63) - 2
cdef uint64_t _TS_MS_MAX = ((<uint64_t>1 << 63) - 1) // 1000

LAYOUT = {
    "HEADER_BYTES": HEADER_BYTES,
    "OVERHEAD_BYTES": OVERHEAD_BYTES,
    "APPEND": APPEND,
    "APPEND_BATCH": APPEND_BATCH,
    "NAME_FLAGS": NAME_FLAGS,
    "KNOWN_FLAGS": KNOWN_FLAGS,
    "FRAME_DURABLE": FRAME_DURABLE,
    "FRAME_JSON": FRAME_JSON,
    "BATCH_HEAD_BYTES": BATCH_HEAD_BYTES,
    "ENTRY_BYTES": ENTRY_BYTES,
    "ENTRY_BATCH": ENTRY_BATCH,
    "ENTRY_JSON": ENTRY_JSON,
    "SEQ_MAX": _SEQ_MAX,
    "TS_MS_MAX": _TS_MS_MAX,
}


cdef struct IndexedRecords:
    const uint8_t* buf
    int64_t buf_bytes
    const uint8_t* entries
    Py_ssize_t count
    uint64_t seq  # of the first entry
    int64_t origin  # position of `buf` in the data that entries count from
    int64_t* ts_us
    int64_t* at
    uint8_t* flags
    OutputSpan data
    OutputSpan node  # NULL where there is no column for it
    OutputSpan tag


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


cdef Py_ssize_t fill_frame(const IndexedRecords* it, Py_ssize_t i, int64_t* least) noexcept nogil:
    """Fill in the records of the frame that entry `i` names, from that record on, and return how many; 0 where the frame
    is not an ordinary one, -1 where there is no column for its names. The frame begins at `least` or after it; `least`
    becomes its end."""
    cdef const uint8_t* entry = it.entries + i * ENTRY_BYTES
    cdef int64_t named_at = length_of(entry, 0), at = named_at - it.origin
    if at < least[0] or at > it.buf_bytes - OVERHEAD_BYTES:
        return 0
    cdef const uint8_t* frame = it.buf + at
    cdef int64_t frame_len = length_of(frame, 0), node_len = frame[30] | frame[31] << 8
    cdef int64_t tag_len = frame[32] | frame[33] << 8, data_len = length_of(frame + 34, 0)
    cdef int kind = frame[4], frame_flags = frame[5], flags
    cdef uint64_t seq = wide_of(frame + 14), ts_ms = wide_of(frame + 22), wanted = it.seq + i
    if OVERHEAD_BYTES + node_len + tag_len + data_len != frame_len + 4 or frame_len + 4 > it.buf_bytes - at:
        return 0
    if frame_flags > KNOWN_FLAGS or seq > _SEQ_MAX or ts_ms > _TS_MS_MAX or seq > wanted:
        return 0
    # Tag is bit 0, node bit 1: each flag is set exactly where there are bytes.
    if (frame_flags & NAME_FLAGS) != (tag_len > 0) + 2 * (node_len > 0):
        return 0
    if (tag_len and it.tag.pos is NULL) or (node_len and it.node.pos is NULL):
        return -1
    cdef int64_t node_at = at + HEADER_BYTES, tag_at = node_at + node_len, data_at = tag_at + tag_len
    if not is_ascii(it.buf + node_at, node_len + tag_len):
        return 0
    flags = (
        frame_flags & NAME_FLAGS
        | (ENTRY_JSON if frame_flags & FRAME_JSON else 0)
        | (ENTRY_BATCH if kind == APPEND_BATCH else 0)
    )
    cdef int64_t pos = data_at, size = data_len, left = 0, count = 1, lo, hi, j, k
    cdef const uint8_t* lengths = NULL
    if kind == APPEND_BATCH:
        count = length_of(it.buf + data_at, 0) if data_len >= BATCH_HEAD_BYTES else 0
        left = data_len - BATCH_HEAD_BYTES - 4 * count
        if not count or left < 0 or length_of(it.buf + data_at, 1) or <uint64_t>count - 1 > _SEQ_MAX - seq:
            return 0
        lengths = it.buf + data_at + BATCH_HEAD_BYTES
        pos = data_at + BATCH_HEAD_BYTES + 4 * count
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
    # Lengths are not negative, so a total that is right means that every value is inside the frame.
    least[0] = at + 4 + frame_len
    return 0 if left else hi - lo


cdef int fill_found(const IndexedRecords* it) noexcept nogil:
    cdef int64_t least = 0
    cdef Py_ssize_t i = 0, found
    while i < it.count:
        found = fill_frame(it, i, &least)
        if found <= 0:
            return <int>found
        i += found
    return 1


def fill_indexed_records(buf, entries, int64_t seq, int64_t origin, ts_us, at, flags, data, node, tag):
    """Fill these columns with the records of `entries`; `seq` is that of the first, and `origin` the position of `buf` in
    the data that entries count from. `data`, `node` and `tag` are positions and sizes. Returns 1; 0 where a frame is not
    an ordinary one; -1 where a record has a node or a tag and the column is None. The columns are undefined unless 1 is
    returned."""
    cdef Views views = Views()
    cdef IndexedRecords found
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    cdef Py_buffer* index = views.take(entries, PyBUF_SIMPLE)
    if index.len % ENTRY_BYTES or seq < 0:
        raise ValueError("an index is entries, and seqs are not negative")
    found.buf, found.buf_bytes = <const uint8_t*>whole.buf, whole.len
    found.entries, found.count = <const uint8_t*>index.buf, index.len // ENTRY_BYTES
    found.seq, found.origin = <uint64_t>seq, origin
    found.ts_us = <int64_t*>views.writable(ts_us, 8, found.count)
    found.at = <int64_t*>views.writable(at, 8, found.count)
    found.flags = <uint8_t*>views.writable(flags, 1, found.count)
    found.data, found.node = views.output_span(data, found.count), views.output_span(node, found.count)
    found.tag = views.output_span(tag, found.count)
    if found.count < MANY_ENTRIES:
        return fill_found(&found)
    cdef int done
    with nogil:
        done = fill_found(&found)
    return done


cdef bint fill_copied(const Page* page, char* out, int64_t capacity, char* edges) noexcept nogil:
    """Copy the values one after the other, adjacent ones together; False where they do not fit."""
    cdef int64_t first = 0, end = 0, pos, size, done = 0  # [first, end) is what is still to be copied
    cdef int32_t edge = 0
    cdef Py_ssize_t i
    for i in range(page.count):
        if not is_inside(&page.data, i, page.buf_bytes):
            return False
        pos, size = pos_of(&page.data, i), size_of(&page.data, i)
        if size > capacity - done - (end - first):
            return False
        if pos != end:
            memcpy(out + done, page.buf + first, end - first)
            done += end - first
            first = pos
        end = pos + size
        edge = <int32_t>(done + end - first)
        memcpy(edges + 4 * (i + 1), &edge, 4)
    memcpy(out + done, page.buf + first, end - first)
    return done + end - first == capacity


def copy_values(target, edges, buf, pos, size):
    """Copy the values at these positions one after the other into `target`, which they fill, and write where each begins
    and where the last one ends to `edges`, as i32 of this machine. ValueError where a value is outside of `buf`, and
    where they do not fill the target; its content is undefined then."""
    cdef Views views = Views()
    cdef Page page
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    cdef Py_buffer* memory = views.take(target, PyBUF_WRITABLE)
    cdef Py_buffer* offsets = views.take(edges, PyBUF_WRITABLE)
    cdef int32_t zero = 0
    page.buf, page.buf_bytes, page.count = <const uint8_t*>whole.buf, whole.len, len(pos)
    page.data = views.span((pos, size), page.count)
    if offsets.len != 4 * (page.count + 1) or memory.len >> 31:
        raise ValueError("there are as many edges as values, and one; and they count up to 2 GiB")
    memcpy(offsets.buf, &zero, 4)
    cdef bint done
    if memory.len < LARGE:
        done = fill_copied(&page, <char*>memory.buf, memory.len, <char*>offsets.buf)
    else:
        with nogil:
            done = fill_copied(&page, <char*>memory.buf, memory.len, <char*>offsets.buf)
    if not done:
        raise ValueError("a value is outside of the buffer, or they do not fill the memory")


# ── memory of columns ─────────────────────────────────────────────────────────────────────────────

cdef enum:
    BUFFER_STEP_BYTES = 1 << 12
    KEPT_BYTES_MAX = 64 << 20  # a table of 500 000 records of 100 bytes

cdef Py_ssize_t BUFFER_BYTES_MAX = <Py_ssize_t>1 << 46  # so that rounding up does not overflow

cdef list _kept = []  # memory that was given back, in that order
cdef Py_ssize_t _kept_bytes = 0


cdef class BorrowedBuffer:
    """Memory that is given back when the last view of it is gone: each view holds this object, which holds the memory."""

    cdef bytearray _memory
    cdef Py_ssize_t _size

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, PyByteArray_AS_STRING(self._memory), self._size, False, flags)

    def __dealloc__(self):
        global _kept_bytes
        cdef Py_ssize_t size
        if self._memory is not None:
            size = PyByteArray_GET_SIZE(self._memory)
            if _kept is not None and _kept_bytes + size <= KEPT_BYTES_MAX:
                _kept_bytes += size
                _kept.append(self._memory)


def borrow_buffer(Py_ssize_t size):
    """Return memory of this size with any content; memory that was given back, where some fits."""
    global _kept_bytes
    cdef Py_ssize_t i, found
    cdef BorrowedBuffer made = BorrowedBuffer()  # first: a collection during this may give memory back too
    if size < 0 or size > BUFFER_BYTES_MAX:
        raise ValueError("no buffer has that size")
    for i in range(len(_kept) - 1, -1, -1):
        found = PyByteArray_GET_SIZE(<bytearray>_kept[i])
        if size <= found <= size + (size >> 2) + BUFFER_STEP_BYTES:
            made._memory = <bytearray>_kept.pop(i)
            _kept_bytes -= found
            break
    else:
        made._memory = PyByteArray_FromStringAndSize(NULL, (size + BUFFER_STEP_BYTES - 1) // BUFFER_STEP_BYTES * BUFFER_STEP_BYTES)
    made._size = size
    return made


# ── the body of a write ───────────────────────────────────────────────────────────────────────────

cdef enum:
    DEPTH_MAX = 32  # deeper JSON is not handled here
    QUOTE = 34
    ESCAPE = 92
    BLANK = 32

cdef uint64_t _ONES = 0x0101010101010101
cdef uint64_t _HIGHS = 0x8080808080808080


cdef inline bint has_special(const uint8_t* at) noexcept nogil:
    """Return whether one of eight bytes may be a quote, a backslash or a control character; False is certain."""
    cdef uint64_t word, quote, escape
    memcpy(&word, at, 8)
    quote, escape = word ^ (_ONES * QUOTE), word ^ (_ONES * ESCAPE)
    return (((quote - _ONES) & ~quote) | ((escape - _ONES) & ~escape) | ((word - _ONES * BLANK) & ~word)) & _HIGHS != 0


cdef Py_ssize_t string_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Return the end of the string whose first byte after its quote is at `i`; -1: not a string, or not handled here."""
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
        if byte == ESCAPE:  # others are numeric or needless, and not handled here: they are stored shorter
            i += 1
            byte = text[i]
            if byte != QUOTE and byte != ESCAPE and byte not in (c"b", c"f", c"n", c"r", c"t"):
                return -1
        i += 1


cdef Py_ssize_t number_end(const uint8_t* text, Py_ssize_t i) noexcept nogil:
    """Return the end of a number without an exponent; the text ends with a zero byte, so nothing after it is read."""
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
    """Return the position after the colon of the key that starts at `i`."""
    if text[i] != QUOTE:
        return -1
    i = string_end(text, i + 1, end)
    return i + 1 if i >= 0 and text[i] == c":" else -1


cdef Py_ssize_t value_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Return the end of the JSON value that starts at `i` and has no blanks between its tokens; -1: not such a value."""
    cdef uint64_t objects = 0  # the open brackets, innermost first: 1 is an object, 0 a list
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
                if i < 0 or depth > DEPTH_MAX:
                    return -1
                continue
        elif byte == c"[":
            if text[i + 1] == c"]":
                i += 2
            else:
                objects, depth = objects << 1, depth + 1
                i += 1
                if depth > DEPTH_MAX:
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
    """Return whether the body is a write of up to `most` records and nothing else; records are appended in any case."""
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
    """Return the data of up to `records_max` records of a write body that has nothing else and no needless byte; None:
    not handled here. The body is UTF-8."""
    cdef list found = []
    return found if take_datas(body, records_max, found) else None


def parse_plain_bodies(list bodies not None, Py_ssize_t records_max, Py_ssize_t size_max):
    """`parse_plain_body` of every body: all records in one list, and their number in each body. None where one body is
    not handled, is not ASCII or is longer than `size_max`."""
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
    """Return how deep JSON is nested. The text is valid JSON."""
    cdef const uint8_t* octets = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text), most
    if size < LARGE:
        return depth_of(octets, size)
    with nogil:
        most = depth_of(octets, size)
    return most


cdef int32_t hex_of(const uint8_t* text) noexcept nogil:
    """Return the number of four hexadecimal digits; -1 where they are not digits."""
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
    """Write the text without needless escapes, which is never longer. Returns its size; -1 where an escape is not
    valid."""
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
    """Return JSON without the escapes that UTF-8 does not need; None where an escape is not valid."""
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


# ── values in JSON text ───────────────────────────────────────────────────────────────────────────

cdef enum:
    NAMES_MAX = 32
    NESTING_MAX = 64  # the open brackets are bits of a word
    NUMBER_TEXT_MAX = 100  # longer numbers, and those with an exponent of three digits, may be out of range
    EXACT_DIGITS_MAX = 18


cdef struct Pointer:
    Py_ssize_t count
    const uint8_t* names[NAMES_MAX]
    Py_ssize_t sizes[NAMES_MAX]


cdef struct QuotedText:
    Py_ssize_t end  # the position after its closing quote; -1: not a text
    bint is_escaped


cdef inline Py_ssize_t after_blanks(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    while i < end and (text[i] == BLANK or text[i] == c"\n" or text[i] == c"\r" or text[i] == c"\t"):
        i += 1
    return i


cdef inline uint8_t byte_at(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Return a byte of the text; after its end 0, which is no part of JSON."""
    return text[i] if i < end else 0


cdef Py_ssize_t escape_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Return the end of the escape whose backslash is at `i`; -1: it is not valid."""
    cdef int32_t code
    cdef uint8_t byte = byte_at(text, i + 1, end)
    if byte in (c"b", c"f", c"n", c"r", c"t", c"/", QUOTE, ESCAPE):
        return i + 2
    if byte != c"u" or end - i < 6:
        return -1
    code = hex_of(text + i + 2)
    if code < 0 or 0xDC00 <= code <= 0xDFFF:
        return -1
    if not 0xD800 <= code <= 0xDBFF:
        return i + 6
    if end - i < 12 or text[i + 6] != ESCAPE or text[i + 7] != c"u" or not 0xDC00 <= hex_of(text + i + 8) <= 0xDFFF:
        return -1
    return i + 12


cdef QuotedText quoted_text(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Find the end of the text whose first byte after its quote is at `i`."""
    cdef QuotedText found = QuotedText(-1, False)
    cdef uint8_t byte
    while True:
        while i + 8 <= end and not has_special(text + i):
            i += 8
        byte = byte_at(text, i, end)
        if byte == QUOTE:
            found.end = i + 1
            return found
        if byte < BLANK:
            return found
        if byte == ESCAPE:
            found.is_escaped = True
            i = escape_end(text, i, end)
            if i < 0:
                return found
            continue
        i += 1


cdef Py_ssize_t any_number_end(const uint8_t* text, Py_ssize_t i, Py_ssize_t end) noexcept nogil:
    """Return the end of a number; -1: not a number, or one that may be out of range."""
    cdef Py_ssize_t start = i, first
    if byte_at(text, i, end) == c"-":
        i += 1
    first = i
    while c"0" <= byte_at(text, i, end) <= c"9":
        i += 1
    if i == first or (text[first] == c"0" and i > first + 1):
        return -1
    if byte_at(text, i, end) == c".":
        first = i = i + 1
        while c"0" <= byte_at(text, i, end) <= c"9":
            i += 1
        if i == first:
            return -1
    if byte_at(text, i, end) | 32 == c"e":
        i += 1
        if byte_at(text, i, end) == c"-" or byte_at(text, i, end) == c"+":
            i += 1
        first = i
        while c"0" <= byte_at(text, i, end) <= c"9":
            i += 1
        if i == first or i > first + 2:
            return -1
    return i if i - start <= NUMBER_TEXT_MAX else -1


cdef bint is_plain_integer(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    """Return whether a number is written as Python writes it: digits, after a minus where it is not 0."""
    cdef Py_ssize_t i, first = 1 if text[0] == c"-" else 0
    if size - first > EXACT_DIGITS_MAX or (first and text[1] == c"0"):
        return False
    for i in range(first, size):
        if not c"0" <= text[i] <= c"9":
            return False
    return True


cdef bint is_utf_8(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i = 0, k, more
    cdef uint32_t code, least
    while i < size:
        if text[i] < 0x80:
            i += 1
            continue
        if text[i] >> 5 == 6:
            more, code, least = 1, text[i] & 0x1F, 0x80
        elif text[i] >> 4 == 14:
            more, code, least = 2, text[i] & 0x0F, 0x800
        elif text[i] >> 3 == 30:
            more, code, least = 3, text[i] & 0x07, 0x10000
        else:
            return False
        if size - i <= more:
            return False
        for k in range(1, more + 1):
            if text[i + k] >> 6 != 2:
                return False
            code = code << 6 | (text[i + k] & 0x3F)
        if code < least or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            return False
        i += more + 1
    return True


cdef int64_t find_value(const uint8_t* text, Py_ssize_t end, const Pointer* pointer, int64_t* at) noexcept nogil:
    """Find the value at the pointer in one JSON text. Returns the size of its text, without quotes, and sets where it is;
    0: there is none, or it is null, empty, an object or an array; -1: not valid, or not handled here."""
    cdef uint64_t objects = 0  # the open brackets, innermost first: 1 is an object, 0 an array
    cdef Py_ssize_t depth = 0, on_path = 0, start, i = after_blanks(text, 0, end)  # `on_path`: as deep the pointer leads
    cdef bint is_wanted = False, is_open  # whether the pointer leads into the value at `i`
    cdef int64_t size = 0
    cdef QuotedText quoted
    cdef uint8_t byte
    while True:
        byte, start, is_open = byte_at(text, i, end), i, False
        if byte == QUOTE:
            quoted = quoted_text(text, i + 1, end)
            i = quoted.end
            if i >= 0 and is_wanted and on_path == pointer.count:
                if quoted.is_escaped or not is_utf_8(text + start + 1, i - start - 2):
                    return -1
                at[0], size = start + 1, i - start - 2
        elif byte == c"{" or byte == c"[":
            objects, depth, is_open = objects << 1 | (byte == c"{"), depth + 1, True
            if depth > NESTING_MAX:
                return -1
            if byte == c"{" and (depth == 1 or (is_wanted and on_path < pointer.count)):
                on_path = depth
            i = after_blanks(text, i + 1, end)
        elif byte == c"t" and end - i >= 4 and memcmp(text + i, b"true", 4) == 0:
            i += 4
        elif byte == c"f" and end - i >= 5 and memcmp(text + i, b"false", 5) == 0:
            i += 5
        elif byte == c"n" and end - i >= 4 and memcmp(text + i, b"null", 4) == 0:
            i += 4
        else:
            i = any_number_end(text, i, end)
            if i >= 0 and is_wanted and on_path == pointer.count and not is_plain_integer(text + start, i - start):
                return -1
        if i < 0:
            return -1
        if not is_open and byte != QUOTE and byte != c"n" and is_wanted and on_path == pointer.count:
            at[0], size = start, i - start
        while depth:
            if not is_open:
                i = after_blanks(text, i, end)
            byte = byte_at(text, i, end)
            if byte == (c"}" if objects & 1 else c"]"):
                if on_path == depth:
                    on_path -= 1
                i, objects, depth, is_open = i + 1, objects >> 1, depth - 1, False
                continue
            if not is_open:
                if byte != c",":
                    return -1
                i = after_blanks(text, i + 1, end)
            is_wanted = False
            if objects & 1:
                if byte_at(text, i, end) != QUOTE:
                    return -1
                start = i + 1
                quoted = quoted_text(text, start, end)
                if quoted.end < 0:
                    return -1
                i = after_blanks(text, quoted.end, end)
                if byte_at(text, i, end) != c":":
                    return -1
                i = after_blanks(text, i + 1, end)
                if on_path == depth:
                    if quoted.is_escaped:
                        return -1
                    if quoted.end - 1 - start == pointer.sizes[depth - 1] and memcmp(
                        text + start, pointer.names[depth - 1], pointer.sizes[depth - 1]
                    ) == 0:
                        is_wanted, size = True, 0  # the last one of equal names counts
            break
        else:
            i = after_blanks(text, i, end)
            return size if i == end else -1


cdef Py_ssize_t find_values(const Page* page, const Pointer* pointer, int64_t* starts, int64_t* sizes) noexcept nogil:
    """Returns how many rows are not handled; -1 where one is outside of the buffer."""
    cdef Py_ssize_t i, left = 0
    for i in range(page.count):
        if not is_inside(&page.data, i, page.buf_bytes):
            return -1
        starts[i] = 0
        sizes[i] = find_value(page.buf + pos_of(&page.data, i), size_of(&page.data, i), pointer, starts + i)
        starts[i] += pos_of(&page.data, i)
        left += sizes[i] < 0
    return left


def find_json_values(starts, sizes, buf, pos, size, tuple names not None):
    """Find the value at a JSON pointer, whose names are UTF-8, in each JSON text: where its text is, without quotes, in
    `starts`, and its size in `sizes`. 0: none, null, empty, an object or an array; -1: not handled here. Returns how
    many are not handled. ValueError where a text is outside of `buf`."""
    cdef Views views = Views()
    cdef Page page
    cdef Pointer pointer
    cdef Py_ssize_t left
    cdef bytes name
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    page.buf, page.buf_bytes, page.count = <const uint8_t*>whole.buf, whole.len, len(pos)
    page.data = views.span((pos, size), page.count)
    cdef int64_t* found_starts = <int64_t*>views.writable(starts, 8, page.count)
    cdef int64_t* found_sizes = <int64_t*>views.writable(sizes, 8, page.count)
    if not 0 < len(names) <= NAMES_MAX:
        raise ValueError(f"a pointer has up to {NAMES_MAX} names, and one at least")
    pointer.count = 0
    for name in names:
        if name is None:
            raise TypeError("a name is bytes")
        pointer.names[pointer.count], pointer.sizes[pointer.count] = <const uint8_t*>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)
        pointer.count += 1
    if page.count < 64:
        left = find_values(&page, &pointer, found_starts, found_sizes)
    else:
        with nogil:
            left = find_values(&page, &pointer, found_starts, found_sizes)
    if left < 0:
        raise ValueError("a text is outside of the buffer")
    return left


# ── from frame to frame ───────────────────────────────────────────────────────────────────────────


def find_frames(buf, int64_t pos, int64_t end, Py_ssize_t frames_max):
    """Return where up to `frames_max` frames begin, as i64 of this machine, and where the last one ends. The first is at
    `pos`, each other where the length of the one before it says. A frame that ends fewer than four bytes before `end` is
    not reported."""
    cdef const uint8_t[::1] octets = memoryview(buf).cast("B") if len(buf) else b""
    if not 0 <= pos <= end <= octets.shape[0] or frames_max < 0:
        raise ValueError("no such range of bytes")
    frames_max = min(frames_max, (end - pos) // OVERHEAD_BYTES)  # no more than fit
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


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────

# XXH3-64 with seed 0 and its default secret, for machines that store the lowest byte first. The package xxhash computes
# the same at the same speed, and costs 0.5 µs a call: as much as 5 KB.

cdef enum:
    STRIPE_BYTES = 64
    SECRET_BYTES = 192

cdef uint64_t _P32_1 = 0x9E3779B1, _P32_2 = 0x85EBCA77, _P32_3 = 0xC2B2AE3D
cdef uint64_t _P64_1 = <uint64_t>0x9E3779B185EBCA87, _P64_2 = <uint64_t>0xC2B2AE3D27D4EB4F
cdef uint64_t _P64_3 = <uint64_t>0x165667B19E3779F9, _P64_4 = <uint64_t>0x85EBCA77C2B2AE63
cdef uint64_t _P64_5 = <uint64_t>0x27D4EB2F165667C5
cdef uint64_t _MIX_SHORT = <uint64_t>0x9FB21C651E98DF25, _MIX = <uint64_t>0x165667919E3779F9
cdef uint8_t[SECRET_BYTES] _SECRET
for _byte, _digit in enumerate(bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)):
    _SECRET[_byte] = _digit


cdef extern from *:
    """
    /* Add stripes of 64 bytes to the eight sums. Each uses 64 of the secret's bytes, 8 after those of the one before it. */
    static void add_stripes_plain(uint64_t* sums, const uint8_t* at, Py_ssize_t stripes, const uint8_t* secret) {
        uint64_t word[8], key[8];
        for (Py_ssize_t stripe = 0; stripe < stripes; stripe++, at += 64) {
            memcpy(word, at, 64);
            memcpy(key, secret + 8 * (stripe % 16), 64);
            for (int i = 0; i < 8; i++) key[i] ^= word[i];
            for (int i = 0; i < 8; i++) sums[i] += word[i ^ 1] + (key[i] & 0xFFFFFFFF) * (key[i] >> 32);
            if (stripe % 16 < 15) continue;
            memcpy(key, secret + 128, 64);
            for (int i = 0; i < 8; i++) sums[i] = (sums[i] ^ sums[i] >> 47 ^ key[i]) * 0x9E3779B1u;
        }
    }

    #if defined(__x86_64__) && defined(__GNUC__)
    #include <immintrin.h>
    /* The same, four sums at a time: 40 GB/s and not 10. */
    __attribute__((target("avx2")))
    static void add_stripes_wide(uint64_t* sums, const uint8_t* at, Py_ssize_t stripes, const uint8_t* secret) {
        const __m256i prime = _mm256_set1_epi64x(0x9E3779B1u);
        __m256i sum[2], word, key, low, high;
        memcpy(sum, sums, 64);
        for (Py_ssize_t stripe = 0; stripe < stripes; stripe++, at += 64) {
            const uint8_t* key_at = secret + 8 * (stripe % 16);
            for (int i = 0; i < 2; i++) {
                word = _mm256_loadu_si256((const __m256i*)(at + 32 * i));
                key = _mm256_xor_si256(word, _mm256_loadu_si256((const __m256i*)(key_at + 32 * i)));
                low = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                sum[i] = _mm256_add_epi64(sum[i], _mm256_add_epi64(low, _mm256_shuffle_epi32(word, 0x4E)));
            }
            if (stripe % 16 < 15) continue;
            for (int i = 0; i < 2; i++) {
                key = _mm256_loadu_si256((const __m256i*)(secret + 128 + 32 * i));
                key = _mm256_xor_si256(key, _mm256_xor_si256(sum[i], _mm256_srli_epi64(sum[i], 47)));
                low = _mm256_mul_epu32(key, prime);
                high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
                sum[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
            }
        }
        memcpy(sums, sum, 64);
    }
    #define add_stripes(...) (__builtin_cpu_supports("avx2") ? add_stripes_wide : add_stripes_plain)(__VA_ARGS__)
    #else
    #define add_stripes add_stripes_plain
    #endif
    """
    void add_stripes(uint64_t* sums, const uint8_t* at, Py_ssize_t stripes, const uint8_t* secret) noexcept nogil


cdef inline uint64_t u64_at(const uint8_t* at) noexcept nogil:
    cdef uint64_t number
    memcpy(&number, at, 8)
    return number


cdef inline uint64_t u32_at(const uint8_t* at) noexcept nogil:
    cdef uint32_t number
    memcpy(&number, at, 4)
    return number


cdef inline uint64_t fold(uint64_t one, uint64_t other) noexcept nogil:
    """Multiply two numbers and combine the halves of the product of 128 bits."""
    cdef uint64_t one_low = <uint32_t>one, one_high = one >> 32, other_low = <uint32_t>other, other_high = other >> 32
    cdef uint64_t low = one_low * other_low, middle = one_high * other_low
    cdef uint64_t upper = (low >> 32) + <uint64_t><uint32_t>middle + one_low * other_high
    return one_high * other_high + (middle >> 32) + (upper >> 32) ^ (upper << 32 | <uint64_t><uint32_t>low)


cdef inline uint64_t mix(const uint8_t* at, const uint8_t* secret) noexcept nogil:
    return fold(u64_at(at) ^ u64_at(secret), u64_at(at + 8) ^ u64_at(secret + 8))


cdef inline uint64_t finish(uint64_t digest) noexcept nogil:
    digest = (digest ^ digest >> 37) * _MIX
    return digest ^ digest >> 32


cdef inline uint64_t finish_tiny(uint64_t digest) noexcept nogil:
    digest = (digest ^ digest >> 33) * _P64_2
    digest = (digest ^ digest >> 29) * _P64_3
    return digest ^ digest >> 32


cdef uint64_t xxh3_short(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """The digest of at most 240 bytes."""
    cdef const uint8_t* secret = _SECRET
    cdef uint64_t low, high, digest
    cdef Py_ssize_t i
    if size == 0:
        return finish_tiny(u64_at(secret + 56) ^ u64_at(secret + 64))
    if size <= 3:
        low = <uint64_t>at[0] << 16 | <uint64_t>at[size >> 1] << 24 | at[size - 1] | <uint64_t>size << 8
        return finish_tiny(low ^ u32_at(secret) ^ u32_at(secret + 4))
    if size <= 8:
        digest = (u32_at(at + size - 4) + (u32_at(at) << 32)) ^ u64_at(secret + 8) ^ u64_at(secret + 16)
        digest ^= (digest << 49 | digest >> 15) ^ (digest << 24 | digest >> 40)
        digest *= _MIX_SHORT
        digest = (digest ^ ((digest >> 35) + <uint64_t>size)) * _MIX_SHORT
        return digest ^ digest >> 28
    if size <= 16:
        low = u64_at(at) ^ u64_at(secret + 24) ^ u64_at(secret + 32)
        high = u64_at(at + size - 8) ^ u64_at(secret + 40) ^ u64_at(secret + 48)
        digest = 0
        for i in range(8):
            digest |= (low >> 8 * i & 0xFF) << 56 - 8 * i
        return finish(<uint64_t>size + digest + high + fold(low, high))
    digest = <uint64_t>size * _P64_1
    if size <= 128:
        for i in range((size - 1) // 32, -1, -1):
            digest += mix(at + 16 * i, secret + 32 * i) + mix(at + size - 16 * (i + 1), secret + 32 * i + 16)
        return finish(digest)
    for i in range(8):
        digest += mix(at + 16 * i, secret + 16 * i)
    digest = finish(digest)
    for i in range(8, size // 16):
        digest += mix(at + 16 * i, secret + 16 * (i - 8) + 3)
    return finish(digest + mix(at + size - 16, secret + 136 - 17))


cdef uint64_t xxh3(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """XXH3-64 of these bytes."""
    if size <= 240:
        return xxh3_short(at, size)
    cdef const uint8_t* secret = _SECRET
    cdef uint64_t[8] sums
    cdef uint64_t digest = <uint64_t>size * _P64_1
    cdef Py_ssize_t stripes = (size - 1) // STRIPE_BYTES, i
    sums[0], sums[1], sums[2], sums[3] = _P32_3, _P64_1, _P64_2, _P64_3
    sums[4], sums[5], sums[6], sums[7] = _P64_4, _P32_2, _P64_5, _P32_1
    add_stripes(sums, at, stripes, secret)
    add_stripes(sums, at + size - STRIPE_BYTES, 1, secret + SECRET_BYTES - 64 - 7)
    for i in range(4):
        digest += fold(sums[2 * i] ^ u64_at(secret + 11 + 16 * i), sums[2 * i + 1] ^ u64_at(secret + 19 + 16 * i))
    return finish(digest)


cdef Py_ssize_t count_valid(
    const uint8_t* buf, const int64_t* starts, const int64_t* ends, Py_ssize_t count
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        if xxh3(buf + starts[i] + 4, ends[i] - starts[i] - 4) != u64_at(buf + ends[i]):
            return i
    return count


def count_valid_checksums(buf, starts, ends):
    """Count the frames before the first whose checksum does not hold: `starts` and `ends` are where each begins and where
    its checksum begins."""
    cdef Views views = Views()
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    cdef Py_ssize_t count = len(starts), i, found
    if count == 0:
        return 0
    cdef const int64_t* lows = <const int64_t*>views.contiguous(starts, 8, count)
    cdef const int64_t* highs = <const int64_t*>views.contiguous(ends, 8, count)
    cdef int64_t covered = 0
    for i in range(count):
        if not 0 <= lows[i] <= whole.len - 12 or not lows[i] + 4 <= highs[i] <= whole.len - 8:
            raise ValueError("a frame is outside of the buffer")
        covered += highs[i] - lows[i]
    if covered < LARGE:
        return count_valid(<const uint8_t*>whole.buf, lows, highs, count)
    with nogil:
        found = count_valid(<const uint8_t*>whole.buf, lows, highs, count)
    return found


# ── frames without the bytes of removed records ───────────────────────────────────────────────────

cdef enum:
    HAS_TAGS = 1  # of the head of a batch
    HAS_NODES = 2
    HAS_METAS = 4
    HAS_KINDS = 8


cdef struct Removal:
    const uint8_t* buf
    const int64_t* frame_pos  # of each record
    const uint8_t* removed
    Py_ssize_t count
    int64_t end  # of the last frame
    uint8_t* out
    int64_t capacity
    int64_t written
    uint64_t seq  # of the first of the empty records that are not written yet
    uint64_t ts_ms
    int64_t empty
    uint64_t time_step_ms
    int64_t empty_max


cdef inline void put_u32(uint8_t* out, uint64_t number) noexcept nogil:
    cdef uint32_t least = <uint32_t>number
    memcpy(out, &least, 4)


cdef inline void put_u64(uint8_t* out, uint64_t number) noexcept nogil:
    memcpy(out, &number, 8)


cdef inline void end_frame(Removal* it, int64_t size) noexcept nogil:
    """Write the length and the checksum of a frame of `size` bytes at the end of the output."""
    cdef uint8_t* out = it.out + it.written
    put_u32(out, size - 4)
    put_u64(out + size - 8, xxh3(out + 4, size - 12))
    it.written += size


cdef bint write_empty(Removal* it) noexcept nogil:
    """Write the pending empty records as one frame; False where it does not fit."""
    cdef bint is_batch = it.empty > 1
    cdef int64_t body = BATCH_HEAD_BYTES + 4 * it.empty if is_batch else 0
    if not it.empty:
        return True
    if OVERHEAD_BYTES + body > it.capacity - it.written:
        return False
    cdef uint8_t* out = it.out + it.written
    memset(out, 0, HEADER_BYTES + body)
    out[4] = APPEND_BATCH if is_batch else APPEND
    memcpy(out + 6, it.buf + it.frame_pos[0] + 6, 8)  # the topic
    put_u64(out + 14, it.seq)
    put_u64(out + 22, it.ts_ms)
    put_u32(out + 34, body)
    if is_batch:
        put_u32(out + HEADER_BYTES, it.empty)
    end_frame(it, OVERHEAD_BYTES + body)
    it.empty = 0
    return True


cdef bint add_empty(Removal* it, uint64_t seq, uint64_t ts_ms, int64_t count) noexcept nogil:
    """Add a frame whose records are all removed to the pending empty records."""
    cdef int64_t taken
    while count:
        if it.empty and (it.empty == it.empty_max or ts_ms - it.ts_ms >= it.time_step_ms):
            if not write_empty(it):
                return False
        if not it.empty:
            it.seq, it.ts_ms = seq, ts_ms
        taken = min(count, it.empty_max - it.empty)
        it.empty += taken
        seq += taken
        count -= taken
    return True


cdef inline int64_t length_in(const uint8_t* lengths, Py_ssize_t i, int width) noexcept nogil:
    return length_of(lengths, i) if width == 4 else <int64_t>lengths[2 * i] | <int64_t>lengths[2 * i + 1] << 8


cdef bint write_without(Removal* it, int64_t at, int64_t size, Py_ssize_t lo, Py_ssize_t count) noexcept nogil:
    """Write the batch at `at` without the values of removed records; `lo` is its first one. False where it is no batch of
    this many records, or cannot be written like this."""
    cdef const uint8_t* frame = it.buf + at
    cdef int64_t names = (frame[30] | frame[31] << 8) + (frame[32] | frame[33] << 8), body = length_of(frame + 34, 0)
    cdef const uint8_t* head = frame + HEADER_BYTES + names
    if size > it.capacity - it.written or OVERHEAD_BYTES + names + body != size or body < BATCH_HEAD_BYTES:
        return False
    cdef int flags = head[4], column, width, frame_flags = frame[5]
    if frame[4] != APPEND_BATCH or length_of(head, 0) != count or flags > 15 or (flags & HAS_KINDS and frame_flags & FRAME_JSON):
        return False
    cdef int64_t left = body - BATCH_HEAD_BYTES, length, first, taken
    cdef int[4] widths
    widths[0], widths[1], widths[2] = 4, 2 if flags & HAS_TAGS else 0, 2 if flags & HAS_NODES else 0
    widths[3] = 4 if flags & HAS_METAS else 0
    left -= (4 + widths[1] + widths[2] + widths[3] + (flags >> 3)) * count
    if left < 0:
        return False
    cdef uint8_t* out = it.out + it.written
    cdef uint8_t* made = out + HEADER_BYTES + names
    cdef const uint8_t* lengths = head + BATCH_HEAD_BYTES
    cdef uint8_t* kept = made + BATCH_HEAD_BYTES
    cdef int64_t[4] columns  # where the lengths of each are, from `head`
    cdef Py_ssize_t i, j
    memcpy(out, frame, lengths - frame)
    for column in range(4):
        columns[column], width = lengths - head, widths[column]
        for i in range(count):
            for j in range(width):
                kept[width * i + j] = 0 if it.removed[lo + i] else lengths[width * i + j]
        lengths += width * count
        kept += width * count
    if flags & HAS_KINDS:
        for i in range(count):
            kept[i] = 0 if it.removed[lo + i] else lengths[i]
        lengths += count
        kept += count
    for j in range(1, 5):
        column = j & 3  # data comes last
        width = widths[column]
        if width == 0:
            continue
        first = taken = 0  # [first, taken) of the values are to be copied
        for i in range(count):
            length = length_in(head + columns[column], i, width)
            if length > left:
                return False
            left -= length
            if it.removed[lo + i]:
                memcpy(kept, lengths + first, taken - first)
                kept += taken - first
                first = taken + length
            taken += length
        memcpy(kept, lengths + first, taken - first)
        kept += taken - first
        lengths += taken
    if left:
        return False
    out[5] = frame_flags & (FRAME_JSON | FRAME_DURABLE | NAME_FLAGS)  # no part of a chain
    put_u32(out + 34, kept - made)
    end_frame(it, kept + 8 - out)
    return True


cdef bint remove_all(Removal* it) noexcept nogil:
    cdef Py_ssize_t lo = 0, hi, gone
    cdef int64_t at, size, copied = -1  # where the frames begin that are copied as they are
    cdef const uint8_t* frame
    while lo < it.count:
        at, gone, hi = it.frame_pos[lo], 0, lo
        while hi < it.count and it.frame_pos[hi] == at:
            gone += it.removed[hi] != 0
            hi += 1
        size = (it.frame_pos[hi] if hi < it.count else it.end) - at
        frame = it.buf + at
        if gone and copied >= 0:
            if at - copied > it.capacity - it.written:
                return False
            memcpy(it.out + it.written, it.buf + copied, at - copied)
            it.written += at - copied
            copied = -1
        if gone < hi - lo and not write_empty(it):
            return False
        if gone == 0:
            copied = at if copied < 0 else copied
        elif gone == hi - lo:
            if not add_empty(it, u64_at(frame + 14), u64_at(frame + 22), gone):
                return False
        elif not write_without(it, at, size, lo, hi - lo):
            return False
        lo = hi
    if copied >= 0:
        if it.end - copied > it.capacity - it.written:
            return False
        memcpy(it.out + it.written, it.buf + copied, it.end - copied)
        it.written += it.end - copied
    return write_empty(it)


def remove_records(target, buf, frame_pos, removed, int64_t end, int64_t time_step_ms, int64_t empty_max):
    """Write the frames of these records to `target` without the values of the removed ones, and return how many bytes they
    take; -1 where one of the frames needs the general implementation. `frame_pos` is where the frame of each record
    begins, and `end` where the last one ends. Frames were verified. At most `empty_max` removed records in a row, of less than
    `time_step_ms`, become one batch of empty records."""
    cdef Views views = Views()
    cdef Removal it
    cdef Py_buffer* whole = views.take(buf, PyBUF_SIMPLE)
    cdef Py_buffer* into = views.take(target, PyBUF_WRITABLE)
    cdef Py_ssize_t i
    it.buf, it.out, it.capacity = <const uint8_t*>whole.buf, <uint8_t*>into.buf, into.len
    it.count, it.end, it.written, it.empty, it.seq, it.ts_ms = len(frame_pos), end, 0, 0, 0, 0
    if it.count == 0:
        return 0
    it.frame_pos = <const int64_t*>views.contiguous(frame_pos, 8, it.count)
    it.removed = <const uint8_t*>views.contiguous(removed, 1, it.count)
    if end > whole.len or time_step_ms < 1 or empty_max < 1 or empty_max >= 1 << 28:
        raise ValueError("a frame is outside of the buffer, or there is no such limit")
    it.time_step_ms, it.empty_max = time_step_ms, empty_max
    cdef int64_t before = 0
    for i in range(it.count):
        if it.frame_pos[i] < before or (i and 0 < it.frame_pos[i] - before < OVERHEAD_BYTES):
            raise ValueError("frames are in order, and none is shorter than a header and a checksum")
        before = it.frame_pos[i]
    if end < before or end - before < OVERHEAD_BYTES:
        raise ValueError("a frame is outside of the buffer")
    cdef bint done
    with nogil:
        done = remove_all(&it)
    return it.written if done else -1


cdef bint are_equal(
    const uint8_t* one, const uint8_t* other, const int64_t* pos, const int64_t* other_pos, const int64_t* size, Py_ssize_t count
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        if memcmp(one + pos[i], other + other_pos[i], size[i]):
            return False
    return True


def have_equal_values(buf, pos, size, other, other_pos):
    """Return whether the values at these positions of two buffers, which have these sizes, are the same."""
    cdef Views views = Views()
    cdef Py_buffer* one = views.take(buf, PyBUF_SIMPLE)
    cdef Py_buffer* two = views.take(other, PyBUF_SIMPLE)
    cdef Py_ssize_t count = len(size), i
    if count == 0:
        return True
    cdef const int64_t* sizes = <const int64_t*>views.contiguous(size, 8, count)
    cdef const int64_t* at = <const int64_t*>views.contiguous(pos, 8, count)
    cdef const int64_t* other_at = <const int64_t*>views.contiguous(other_pos, 8, count)
    cdef bint found
    for i in range(count):
        if not (0 <= sizes[i] <= min(one.len, two.len) and 0 <= at[i] <= one.len - sizes[i] and 0 <= other_at[i] <= two.len - sizes[i]):
            raise ValueError("a value is outside of its buffer")
    with nogil:
        found = are_equal(<const uint8_t*>one.buf, <const uint8_t*>two.buf, at, other_at, sizes, count)
    return found


# ── syncs ─────────────────────────────────────────────────────────────────────────────────────────


def fsync_loop(int request_fd, int result_fd):
    """Sync each descriptor that is read from `request_fd`, and write its errno or 0 to `result_fd`, without the
    interpreter's lock. Returns at a descriptor below 0 and at the end of the pipe."""
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
    """Return whether every value is bytes, and of no class derived from it."""
    cdef object sequence = fast(values, "a batch is a list or a tuple")
    cdef PyObject** items = fast_items(sequence)
    cdef Py_ssize_t i
    for i in range(fast_size(sequence)):
        if not is_bytes(items[i]):
            return False
    return True


def value_lengths(datas):
    """Return the length of each value, as u32 of this machine, and their sum; None where one is not plain bytes or too
    long."""
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
    """Split values into groups [lo, hi) and return each with its bytes: as many values as make `size_max` bytes, at most
    `count_max`, and at least one."""
    count_max = max(count_max, 1)
    if not len(lengths):
        return []  # an empty array has no view
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
    """Copy values [lo, hi) to `pos` and after it; return where the last one ends."""
    cdef object values = fast(datas, "a batch is a list or a tuple")
    cdef PyObject** items = fast_items(values)
    cdef Py_ssize_t i, size, limit = PyByteArray_GET_SIZE(target)
    cdef char* out = PyByteArray_AS_STRING(target)
    if not 0 <= pos <= limit or not 0 <= lo <= hi <= fast_size(values):
        raise ValueError("no such values, or no such position")
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
    """Encode the responses to writes that share one batch, whose seqs begin at `first`. The four texts are the same for
    all of them."""
    cdef list responses = []
    cdef int64_t last, count, us
    cdef Py_ssize_t size = (
        PyBytes_GET_SIZE(start) + PyBytes_GET_SIZE(head) + PyBytes_GET_SIZE(middle) + PyBytes_GET_SIZE(took)
    )
    cdef bytearray buffer = bytearray(size + FIXED_ANSWER + SEQ)
    cdef char* out
    for count, us in zip(counts, took_us, strict=True):
        if not 1 <= count <= COUNT_MAX or us < 0 or first < 0 or first > SEQ_END - count:
            raise ValueError("a write has records and took some time")
        if PyByteArray_GET_SIZE(buffer) < size + FIXED_ANSWER + SEQ * count:
            buffer = bytearray(size + FIXED_ANSWER + SEQ * count)
        last = first + count - 1
        out = put(PyByteArray_AS_STRING(buffer), PyBytes_AS_STRING(start), PyBytes_GET_SIZE(start))
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
        responses.append(PyBytes_FromStringAndSize(PyByteArray_AS_STRING(buffer), out - PyByteArray_AS_STRING(buffer)))
    return responses


cdef inline char* put_ms(char* out, int64_t us) noexcept nogil:
    """Write microseconds as milliseconds, as Python writes the float."""
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
