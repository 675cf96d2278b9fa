"""Tidelog: a durable event log for Python and Spark.

The segmented log library is `tidelog.commitlog`; every error a caller can see is in `tidelog.errors`.
"""

from tidelog.errors import Error
from tidelog.types import Record

__version__ = "0.1.0"

__all__ = ["Error", "Record", "__version__"]
