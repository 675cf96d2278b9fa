"""Bodies of `/v0` as the values that the embedded API takes and returns. No I/O."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from tidelog.engine import Appended, Counts, Gap, GapEntry, Page, Record, TopicConfig, TopicInfo
from tidelog.engine.batch_encoder import Batch, check_text, prepare_batch
from tidelog.engine.config import EngineConfig
from tidelog.engine.large_read import LargeData, RecordReader
from tidelog.errors import BadInput
from tidelog.formats.large_record import REFERENCE_KEY

_encode_value = msgspec.json.Encoder().encode
# The server has limits of its own and its errors are the engine's: here records are only checked to be encodable.
RECORD_LIMITS: Final = EngineConfig(batch_records_max=1 << 20, record_bytes_max=1 << 30)
OpenRecord = Callable[[int], RecordReader]


def encode_json(value: object) -> bytes:
    """Encode the body of a request. Raises BadInput for what is not JSON."""
    try:
        return _encode_value(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"an argument has a type that cannot be sent ({error}); nothing was done") from None


def quote_name(what: str, name: object) -> str:
    """Encode a name for the path of a request."""
    check_text(what, name)
    return quote(str(name), safe="")


def encode_records(
    records: object, *, tag: object = None, node: object = None, meta: object = None, extra: Mapping[str, object] = {}
) -> list[msgspec.Raw]:
    """Check and encode records as `Topic.append` does; return the objects of a write. `extra`: fields of each."""
    batch = prepare_batch(RECORD_LIMITS, records, tag, node, meta)
    more = b"".join(b",%b:%b" % (encode_json(name), encode_json(value)) for name, value in extra.items())
    return [msgspec.Raw(b'{"data":%b%b%b}' % (data, names, more)) for data, names in _encoded_columns(batch)]


def _encoded_columns(batch: Batch) -> Iterator[tuple[bytes, bytes]]:
    """Yield the data and the other fields of each record as JSON."""
    is_json = batch.json if isinstance(batch.json, list) else [batch.json] * len(batch)
    tags, nodes = (column if isinstance(column, list) else [column] * len(batch) for column in (batch.tag, batch.node))
    metas = batch.metas or [b""] * len(batch)
    for data, json, tag, node, meta in zip(batch.datas, is_json, tags, nodes, metas, strict=True):
        fields = b"" if json else b',"$encoding":"base64"'
        if tag:
            fields += b',"tag":' + encode_json(tag.decode())
        if node:
            fields += b',"node":' + encode_json(node.decode())
        if meta:
            fields += b',"meta":' + meta
        yield (data if json else b'"%b"' % b64encode(data)), fields


def parse_appended(body: Mapping[str, Any], *, is_own_key: bool = False) -> Appended:
    """`is_own_key`: the client made the key, so a repetition is a retry of this same write."""
    times = body.get("performance", {})
    write_us, sync_us, held_us = (
        int(times.get(name, 0) * 1000) for name in ("wal_append_ms", "fsync_ms", "throttle_wait_ms")
    )
    deduped = bool(body.get("deduped")) and not is_own_key
    return Appended(body["first_seq"], body["last_seq"], body["head_seq"], deduped, write_us, sync_us, held_us)


def parse_data(fields: Mapping[str, Any], open_record: OpenRecord | None) -> Any:
    data = fields["data"]
    if fields.get("$encoding") == "base64":
        return b64decode(data)
    if open_record is not None and isinstance(data, dict) and data.keys() == {REFERENCE_KEY}:
        reference, seq = data[REFERENCE_KEY], fields["$seq"]
        if isinstance(reference, dict) and reference.get("href") == f"records/{seq}/data":
            return LargeData(seq, reference["bytes"], reference["xxh3"], lambda: open_record(seq))
    return data


def parse_record(fields: Mapping[str, Any], open_record: OpenRecord | None) -> Record:
    data = parse_data(fields, open_record)
    return Record(fields["$seq"], fields["$ts"], data, fields.get("$tag"), fields.get("$node"), fields.get("meta"))


def parse_gap(fields: Mapping[str, Any] | None) -> Gap | None:
    return None if fields is None else Gap(**fields)


def parse_page(body: Mapping[str, Any], open_record: OpenRecord | None) -> Page:
    return Page(
        [parse_record(record, open_record) for record in body["records"]],
        parse_gap(body["tombstone"]),
        body["next_from_seq"],
        body["head_seq"],
        body["earliest_seq"],
        Counts(**body["counts"]),
    )


def parse_config(fields: Mapping[str, Any]) -> TopicConfig:
    return TopicConfig.from_json(encode_json(fields))


def parse_topic_info(row: Mapping[str, Any]) -> TopicInfo:
    return TopicInfo(
        topic=row["topic"],
        id=row["id"],
        epoch=row["epoch"],
        head_seq=row["head_seq"],
        earliest_seq=row["earliest_seq"],
        evict_floor=row["evict_floor"],
        count=row["count"],
        bytes=row["bytes"],
        last_write_ms=row["last_write_ts"],
        last_read_ms=row["last_read_ts"],
        effective_priority=row["effective_priority"],
        config=parse_config(row["config"]),
    )


def parse_gap_entry(row: Mapping[str, Any]) -> GapEntry:
    return GapEntry(*(row[name] for name in GapEntry._fields))


def node_list(node: str | Sequence[str] | None) -> str | list[str] | None:
    return node if node is None or isinstance(node, str) else list(node)
