"""[shell] Tasks on executors: one function, many small arguments, answers in order.

A task that fails for a reason that another try cannot mend (a full disk, a record that does not fit, damage) hands the
error back as its answer. Everything else is raised and tried again as Spark is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from pyspark.sql import SparkSession

from tidelog import errors
from tidelog.errors import Damaged, DiskFull, Error, Refused

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        """What the function says to each task, in their order. Raises the first error."""
        ...


class Failed(NamedTuple):
    """An error on its way to the driver: by name, because ours are made from more than a message."""

    name: str
    message: str

    def error(self) -> Error:
        kind = getattr(errors, self.name)
        made: Error = kind.__new__(kind)
        made.args = (self.message,)
        return made


def guarded(function: Callable[[T], R], task: T) -> R | Failed:
    try:
        return function(task)
    except (DiskFull, Refused, Damaged) as error:
        return Failed(type(error).__name__, str(error))


class SparkRunner:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        if not tasks:
            return []
        context = self._spark.sparkContext
        answers = context.parallelize(list(tasks), len(tasks)).map(partial(guarded, function)).collect()
        return unwrapped(answers)


def unwrapped(answers: Sequence[R | Failed]) -> list[R]:
    for answer in answers:
        if isinstance(answer, Failed):
            raise answer.error()
    return [answer for answer in answers if not isinstance(answer, Failed)]
