"""The four codecs by name, and detection of the codec that wrote a directory.

A codec implements `commitlog.codec.Codec`: `tide` over the frames of `formats/`; `laminar`, `rustlog` and `narwhal`
over a layout that their module draws and encodes. `sparse_index` has the code that rustlog and narwhal share: reads
through a sparse index, over records that follow each other by their lengths. Read `codec.py` first, then one codec.
"""

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
    """Return the codec that wrote files of these names; None where none or two fit equally."""
    fits: dict[str, int] = {}
    for name, make in _CODECS.items():
        codec = make(LogConfig())
        # Temporaries count too: during a replacement the data file can be the only one with its final name.
        count = sum(1 for file in names if codec.parse_file_name(file) is not None or codec.is_temporary(file))
        if count:
            fits[name] = count
    best = max(fits.values(), default=0)
    candidates = [name for name, count in fits.items() if count == best]
    return candidates[0] if len(candidates) == 1 else None


def has_segment_files(names: Sequence[str]) -> bool:
    """Whether any of these names belongs to a segment of any codec."""
    codecs = [make(LogConfig()) for make in _CODECS.values()]
    return any(codec.parse_file_name(name) is not None for name in names for codec in codecs)
