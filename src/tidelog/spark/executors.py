"""Send readers, writers and functions to executors, and say there what is missing.

Spark pickles them by the names of their classes. An executor whose Python does not have this package, or has another
version of it, would fail with the traceback of a failed import. So they are pickled as bytes beside `load_on_executor`,
which Spark pickles by value: it runs without this package, and its error names the machine and the next step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pyspark import cloudpickle

from tidelog.version import __version__

T = TypeVar("T")
R = TypeVar("R")


def load_on_executor(content: bytes, version: str) -> Any:
    """Unpickle what `reduce_object` made. Pickled by value, so it uses nothing of this module."""
    import pickle
    import socket
    import sys

    def refused(why: str) -> ImportError:
        return ImportError(
            f"{sys.executable} on {socket.gethostname()}, which runs the Python workers of this executor, {why}; "
            f"nothing was written by this task. Install tidelog[spark]=={version} there, or name an interpreter that "
            "has it on every machine: set PYSPARK_PYTHON before the session is started, or --conf "
            "spark.pyspark.python=… of spark-submit"
        )

    try:
        from tidelog.version import __version__ as found
    except ImportError as error:
        raise refused(f"cannot import tidelog ({error})") from None
    if found != version:
        raise refused(f"has tidelog {found}, and the driver has {version}")
    try:
        kind, state = pickle.loads(content)
    except ImportError as error:
        raise refused(f"cannot import what a task needs ({error})") from None
    made = kind.__new__(kind)
    made.__dict__.update(state)
    return made


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]


def reduce_object(value: object, state: dict[str, Any]) -> tuple[Callable[..., Any], tuple[bytes, str]]:
    """Return what `__reduce__` of an object that is sent to executors returns."""
    content: bytes = cloudpickle.dumps((type(value), state))  # type: ignore[no-untyped-call]
    return load_on_executor, (content, __version__)


class ExecutorFunction(Generic[T, R]):
    """A function of one argument that is sent to executors."""

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function

    def __call__(self, value: T) -> R:
        return self._function(value)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes, str]]:
        return reduce_object(self, self.__dict__)
