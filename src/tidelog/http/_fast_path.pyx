# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Compiled half of the HTTP fast path: reads small requests from a connection and writes their responses.

`FastPathReader` recognises a request by the bytes of its head, `send_responses` writes a batch of responses,
`match_body` is the comparison that both paths share. `_fast_path.pyi` is the interface, `fast_path.py` the only
user. There is no Python version: without a compiler the HTTP parser serves every request.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

cdef enum:
    CHECK_ABOVE_BYTES = 4096  # a body of this size makes the batcher check its limits
    CHECK_EVERY_REQUESTS = 256  # and so does this number of requests
    LENGTH_DIGITS_MAX = 5
    NUMBER_DIGITS_MAX = 20

cdef const char* _DIGITS = "0123456789abcdef"


cdef bytes find_body(const char* data, Py_ssize_t size, bytes head_before_length, bytes head_after_length):
    """Return the body if `data` is one whole request with this head, else None."""
    cdef Py_ssize_t pos = PyBytes_GET_SIZE(head_before_length), rest = PyBytes_GET_SIZE(head_after_length)
    cdef Py_ssize_t length = 0, digits = 0
    if size < pos + 1 + rest or memcmp(data, PyBytes_AS_STRING(head_before_length), pos) != 0:
        return None
    while pos < size and digits <= LENGTH_DIGITS_MAX and c"0" <= data[pos] <= c"9":
        length = 10 * length + (data[pos] - c"0")
        pos, digits = pos + 1, digits + 1
    if not 0 < digits <= LENGTH_DIGITS_MAX or (data[pos - digits] == c"0" and digits > 1):
        return None
    if size != pos + rest + length or memcmp(data + pos, PyBytes_AS_STRING(head_after_length), rest) != 0:
        return None
    return PyBytes_FromStringAndSize(data + pos + rest, length)


def match_body(bytes data not None, bytes head_before_length not None, bytes head_after_length not None):
    """Return the body if `data` is one whole request with this head, else None."""
    return find_body(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), head_before_length, head_after_length)


cdef class FastPathReader:
    """Receives the bytes of one connection, adds requests with the known head to the batcher and passes all other
    input to `fallback`. `fast_path.py` has the states."""

    cdef object _buffer, _fallback, _batcher, _schedule_flush, _check_limits, _now_us
    cdef list _requests, _bodies, _received_us
    cdef const char* _data
    cdef Py_ssize_t _capacity
    cdef bytes _head_before_length, _head_after_length
    cdef public object owner, write, is_closing
    cdef public bint is_armed, is_undisturbed, disconnected, was_served

    def __init__(self, owner, buffer, fallback):
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        self._data, self._capacity = <const char*>view.buf, view.len
        PyBuffer_Release(&view)  # `buffer` keeps the memory alive and in place
        self.owner, self._buffer, self._fallback = owner, buffer, fallback

    def get_buffer(self, sizehint):
        return self._buffer

    def submit(self, bytes head_before_length not None, bytes head_after_length not None, batcher, transport, bytes body not None):
        """Add this body to the batch now, and from now on the bodies of requests with this head."""
        self._head_before_length, self._head_after_length, self._batcher = head_before_length, head_after_length, batcher
        self._schedule_flush, self._check_limits, self._now_us = batcher.schedule_flush, batcher.check_limits, batcher.now_us
        self._requests, self._bodies, self._received_us = batcher.requests, batcher.bodies, batcher.received_us
        self.write, self.is_closing = transport.write, transport.is_closing
        self._add_to_batch(body)

    cdef int _add_to_batch(self, bytes body) except -1:
        self.is_armed, self.is_undisturbed = False, True
        self.owner.current = self
        if not self._requests:
            self._schedule_flush()
        self._requests.append(self)
        self._bodies.append(body)
        self._received_us.append(self._now_us())
        if PyBytes_GET_SIZE(body) > CHECK_ABOVE_BYTES or len(self._bodies) >= CHECK_EVERY_REQUESTS:
            self._check_limits()
        return 0

    def buffer_updated(self, Py_ssize_t nbytes):
        cdef bytes body
        if self.is_armed and nbytes <= self._capacity:
            body = find_body(self._data, nbytes, self._head_before_length, self._head_after_length)
            if body is not None:
                self._add_to_batch(body)
                return
        if self._batcher is not None and self.owner.current is self:  # its request may still be in the batcher
            self._batcher.flush()
        self.is_armed = self.is_undisturbed = False
        self._fallback(nbytes)


cdef inline char* put(char* out, const char* text, Py_ssize_t size) noexcept nogil:
    memcpy(out, text, size)
    return out + size


cdef inline char* put_bytes(char* out, bytes text) noexcept:
    return put(out, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef inline int format_number(char* digits, uint64_t value, unsigned int base) noexcept nogil:
    """Write `value` to the end of `digits[NUMBER_DIGITS_MAX]` and return where it starts."""
    cdef int start = NUMBER_DIGITS_MAX
    while True:
        start -= 1
        digits[start] = _DIGITS[value % base]
        value //= base
        if not value:
            return start


def send_responses(
    list requests not None, list bodies not None, bytes before_length not None, bytes after_length not None,
    bytes before_body not None, bytes id_prefix not None, uint64_t id_number,
):
    """Write a response to each request: `before_length`, the length of its body, `after_length`, `id_prefix` and a
    number of its own in base 16, `before_body`, its body. A reader that received other input since then goes through
    its own `send`."""
    cdef FastPathReader request
    cdef bytes body, data
    cdef char[NUMBER_DIGITS_MAX] length_digits
    cdef char[NUMBER_DIGITS_MAX] id_digits
    cdef int length_start, id_start
    cdef char* out
    cdef Py_ssize_t fixed_bytes = (
        PyBytes_GET_SIZE(before_length) + PyBytes_GET_SIZE(after_length) + PyBytes_GET_SIZE(before_body)
        + PyBytes_GET_SIZE(id_prefix) + 2 * NUMBER_DIGITS_MAX
    )
    for request, body in zip(requests, bodies, strict=True):
        length_start = format_number(length_digits, PyBytes_GET_SIZE(body), 10)
        id_start = format_number(id_digits, id_number, 16)
        id_number += 1
        if request.disconnected:
            continue
        data = PyBytes_FromStringAndSize(NULL, fixed_bytes + PyBytes_GET_SIZE(body) - length_start - id_start)
        out = put_bytes(PyBytes_AS_STRING(data), before_length)
        out = put(out, length_digits + length_start, NUMBER_DIGITS_MAX - length_start)
        out = put_bytes(put_bytes(out, after_length), id_prefix)
        out = put(out, id_digits + id_start, NUMBER_DIGITS_MAX - id_start)
        put_bytes(put_bytes(out, before_body), body)
        if not request.is_undisturbed or request.is_closing():
            request.send(data)
            continue
        request.write(data)
        if request.is_undisturbed:
            request.owner.current = None
            request.is_armed = request.was_served = True
        else:
            request.owner.next_request(request)
