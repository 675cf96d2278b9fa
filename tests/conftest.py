"""What the whole suite shares: tests may tell a figure, and the closing lines show the sums."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import pytest


def pytest_configure() -> None:
    """Whoever is started in the background ignores ctrl-c, and so would every process that a test sends one to."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Report how much a test went through; crosses from worker processes to the summary."""

    def said(what: str, count: int) -> None:
        record_property(f"tell {what}", count)

    return said


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares a Spark session comes first. Workers that have nothing left take from the end of others, so all of it
    stays with the first one, and only that one starts Java."""
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, value in report.user_properties:
                    if name.startswith("tell "):
                        totals[name.removeprefix("tell ")] += value
    for what, total in sorted(totals.items()):
        terminalreporter.write_line(f"{what}: {total:,}")
