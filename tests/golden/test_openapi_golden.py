"""The OpenAPI document, frozen: a change of the contract is a change of this file, which a review sees.

`python -m tests.golden.test_openapi_golden` writes the file again.
"""

from __future__ import annotations

import json
from pathlib import Path

from tidelog.server import app

GOLDEN = Path(__file__).parent / "http" / "openapi.json"


def current_document() -> str:
    """The document as indented text, keys in the order in which they are sent. The version is not compared."""
    document = json.loads(app.document_bytes())
    document["info"]["version"] = "0.0.0"
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def test_document_is_as_frozen() -> None:
    assert current_document() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(current_document())
