"""Which version this is; the build reads it here."""

from typing import Final

__version__: Final = "0.1.0"
