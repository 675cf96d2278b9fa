"""The entry of Tidelog for Spark itself: `format("tidelog")` is found without `tidelog.spark.register`.

Spark imports the top-level packages of its driver's Python whose names begin with `pyspark_`, and registers the
`DefaultSource` of each under its name. `submit` is the script for spark-submit.

    DefaultSource     `tidelog.spark.source.TidelogSource`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]

if TYPE_CHECKING:
    from tidelog.spark.source import TidelogSource as DefaultSource
else:
    try:
        from tidelog.spark.source import TidelogSource as DefaultSource
    except ImportError as error:
        # An error here would end the search, and with it the data sources of all other packages.
        _reason = str(error)

        class DefaultSource(DataSource):
            """Raises the reason for which the source cannot be imported, when a query names it."""

            def __init__(self, options: dict[str, str]) -> None:  # noqa: ARG002
                import pyspark

                raise ImportError(
                    f"Tidelog cannot be used with PySpark {pyspark.__version__} here ({_reason}); nothing was read or "
                    "written. It needs PySpark 4.2 or newer: pip install 'tidelog[spark]' on every machine"
                )

            @classmethod
            def name(cls) -> str:
                return "tidelog"

            def schema(self) -> Any:
                """Never called: no object of this class can be made."""
