"""Errors of the API: one envelope, and the status of each code. `api_types.ERROR_FIELDS` has the details.

{"error":{"code":"topic_not_found","message":"…","detail":{"topic":"jobs"}}}
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidelog import errors
from tidelog.api_types import ERROR_FIELDS, ERROR_HEADER
from tidelog.errors import Error
from tidelog.http.interface import Headers, Response

_encode = msgspec.json.Encoder().encode
RETRY_AFTER_HEADERS: Final = ((b"retry-after", b"1"),)

STATUS_BY_CODE: Final = {
    "invalid_request": 400,
    "batch_too_large": 400,
    "record_too_large": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_a_member": 403,
    "topic_not_found": 404,
    "router_not_found": 404,
    "group_not_found": 404,
    "record_not_found": 404,
    "channel_not_found": 404,
    "backup_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "request_timeout": 408,
    "router_cycle": 409,
    "topic_exists_incompatible": 409,
    "topic_not_empty": 409,
    "not_a_queue": 409,
    "cursor_conflict": 409,
    "user_in_channel": 409,
    "channel_full": 409,
    "wrong_type": 409,
    "persistence_not_enabled": 409,
    "queue_empty": 409,
    "cursor_recovery_required": 409,
    "batch_conflict": 409,
    "backup_incomplete": 409,
    "wrong_store": 409,
    "payload_too_large": 413,
    "uri_too_long": 414,
    "unsupported_media_type": 415,
    "range_not_satisfiable": 416,
    "topic_full": 422,
    "queue_full": 422,
    "rejected": 422,
    "upgrade_required": 426,
    "throttled": 429,
    "headers_too_large": 431,
    "internal": 500,
    "channel_offline": 500,
    "not_implemented": 501,
    "not_ready": 503,
    "shutting_down": 503,
    "hook_failed": 503,
    "store_unavailable": 503,
    "disk_full": 507,
}
_CODE_BY_STATUS: Final = {status: code for code, status in reversed(STATUS_BY_CODE.items())}

# For errors whose own code is none of the wire. The first match counts; any other error is internal.
_CODE_BY_ERROR: Final[tuple[tuple[type[Error], str], ...]] = (
    (errors.TooLarge, "record_too_large"),
    (errors.AlreadyExists, "topic_exists_incompatible"),
    (errors.Closed, "shutting_down"),
    (errors.Forked, "internal"),
    (errors.ReadOnly, "internal"),
    (errors.NewerFormat, "internal"),
    (errors.Refused, "invalid_request"),
    (errors.Busy, "throttled"),
    (errors.StoreUnavailable, "store_unavailable"),
)


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        code: str,
        message: str,
        detail: dict[str, Any] | None = None,
        *,
        status: int | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.detail, self.headers = code, message, detail, headers
        self.status = STATUS_BY_CODE[code] if status is None else status

    def response(self) -> Response:
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.detail is not None:
            body["detail"] = self.detail
        headers = (*RETRY_AFTER_HEADERS, *self.headers) if self.status in (429, 503, 507) else self.headers
        return Response(self.status, _encode({"error": body}), headers=headers)


def api_error_from(error: Error) -> ApiError:
    """The response for an error of the engine: what happened, whether it was written, what to do."""
    code = error.code
    if code not in STATUS_BY_CODE:
        code = next((code for kind, code in _CODE_BY_ERROR if isinstance(error, kind)), "internal")
    # A client gets the class back, except of errors that are about this process and not about the request.
    names_class = error.code != code and not isinstance(error, errors.Closed | errors.Forked)
    headers = ((ERROR_HEADER.encode(), error.code.encode()),) if names_class else ()
    return ApiError(code, str(error) or type(error).__name__, _error_detail(error), headers=headers)


def api_error_for_status(status: int, message: str) -> ApiError:
    """The error for a request that the HTTP layer refuses."""
    return ApiError(_CODE_BY_STATUS.get(status, "invalid_request"), message, status=status)


def _error_detail(error: Error) -> dict[str, Any] | None:
    fields = next((fields for kind, fields in ERROR_FIELDS.items() if isinstance(error, kind)), None)
    if fields is not None:
        return {name: getattr(error, name) for name in fields}
    match error:
        case errors.RouterCycle():
            return {"cycle": error.cycle}
        case errors.TopicExists():
            return error.detail if "router" in error.detail else {"topic": error.topic, **error.detail}
        case errors.Throttled():
            return {"limit": error.limit, "max": error.max}
        case errors.Damaged() | errors.InDoubt() | errors.DiskFull() | errors.WriteFailed():
            # The contract has one code for all of these; the client needs to know whether to repeat the write.
            return {"reason": error.code, "written": error.written}
        case _:
            return None
