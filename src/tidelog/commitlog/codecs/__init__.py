"""The four codecs by name, and which of them a directory was written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidelog.commitlog.codec import Codec
from tidelog.commitlog.codecs.laminar import LaminarCodec
from tidelog.commitlog.codecs.narwhal import NarwhalCodec
from tidelog.commitlog.codecs.rustlog import RustlogCodec
from tidelog.commitlog.codecs.tide import TideCodec
from tidelog.config import LogConfig
from tidelog.errors import BadInput

_CODECS: dict[str, Callable[[LogConfig], Codec]] = {
    "tide": TideCodec,
    "rustlog": RustlogCodec,
    "laminar": LaminarCodec,
    "narwhal": NarwhalCodec,
}
CODEC_NAMES = tuple(_CODECS)


def make_codec(name: str, config: LogConfig) -> Codec:
    try:
        return _CODECS[name](config)
    except KeyError:
        raise BadInput(f"there is no codec {name!r}; choose one of {', '.join(CODEC_NAMES)}") from None


def guess_codec(names: Sequence[str]) -> str | None:
    """The codec that wrote these files, by their names; None where nothing is known or two fit equally."""
    fits: dict[str, int] = {}
    for name, make in _CODECS.items():
        codec = make(LogConfig())
        # Also what an interrupted swap left: in the middle of one the data file can be all that has its own name.
        count = sum(1 for file in names if codec.parse_file_name(file) is not None or codec.is_temporary(file))
        if count:
            fits[name] = count
    best = max(fits.values(), default=0)
    found = [name for name, count in fits.items() if count == best]
    return found[0] if len(found) == 1 else None


def has_segment_files(names: Sequence[str]) -> bool:
    """Whether any of these names belongs to a segment of any codec."""
    codecs = [make(LogConfig()) for make in _CODECS.values()]
    return any(codec.parse_file_name(name) is not None for name in names for codec in codecs)
