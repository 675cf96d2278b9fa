"""A page in a browser follows a topic of a server with another origin: one line of JavaScript, a read token, CORS.

The page reports what it got by writing it to a topic, which needs a preflight. Skipped where there is no Chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

import pytest
from tests.contract_http.api import Api, expect_success
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEY: Final = "s3cret"
LIMIT_S: Final = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium, chromium-browser or google-chrome"),
]

PAGE: Final = """<!doctype html><script>
const events = new EventSource("%(url)s/v0/topics/orders/events?from_seq=0&token=%(token)s")
async function report(data) {
  const answer = await fetch("%(url)s/v0/topics/seen", {
    method: "POST", body: JSON.stringify({records: [{data}]}),
    headers: {"Content-Type": "application/json", "Authorization": "Bearer %(page_key)s"}})
  await answer.json()
}
for (const name of ["record", "tombstone", "caught-up"])
  events.addEventListener(name, event => report({name, data: JSON.parse(event.data)}))
events.onerror = () => report({name: "onerror", closed: events.readyState === EventSource.CLOSED})
</script>"""


class PageServer:
    """A site of another origin with one page."""

    def __init__(self) -> None:
        self.page = ""
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(site.page.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[PageServer]:
    made = PageServer()
    yield made
    made.close()


def seen(api: Api) -> list[Any]:
    answer = api.post("/v0/topics/seen/diff", {"limit": 1000})
    return [record["data"] for record in answer.json()["records"]] if answer.status == 200 else []


def seqs(reports: list[Any]) -> list[int]:
    return [record["$seq"] for each in reports if each["name"] == "record" for record in each["data"]["records"]]


def test_page_of_another_origin_follows_a_topic_and_resumes(tmp_path: Path, site: PageServer) -> None:
    assert CHROMIUM is not None
    settings = {"api_keys": f"{KEY},page:w:seen", "cors_origins": site.url, "token_secret": "x" * 32}
    server = Server(tmp_path / "server", **settings)
    with server.start(), server.client(KEY) as api:
        api.write("orders", 1, 2)
        url = f"http://{server.address.host}:{server.address.port}"
        token = expect_success(api.post("/v0/tokens", {"topics": ["orders"], "ttl_ms": 600_000}))["token"]
        site.page = PAGE % {"url": url, "token": token, "page_key": "page"}
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--remote-debugging-port=0", f"{site.url}/"]
        with (tmp_path / "chromium.txt").open("w") as log:
            browser = subprocess.Popen(command, stdout=log, stderr=log)
        try:

            def why() -> str:
                return f"{json.dumps(seen(api))[:2000]} {(tmp_path / 'chromium.txt').read_text()[-2000:]}"

            eventually(lambda: seqs(seen(api)) == [1, 2], LIMIT_S, process=browser, why=why)
            api.write("orders", 3)
            eventually(lambda: seqs(seen(api)) == [1, 2, 3], LIMIT_S, process=browser, why=why)
            address = server.address
            server.stop()
            server._args = ("--data", str(server.data), "--port-file", str(tmp_path / "server" / "port.txt"))
            server.start(host=f"{address.host}:{address.port}")  # where the browser looks for it again, by itself
            with server.client(KEY) as api:
                api.write("orders", 4)
                eventually(lambda: seqs(seen(api))[-1:] == [4], LIMIT_S, process=browser, why=why)
                assert seqs(seen(api)) == [1, 2, 3, 4], "each once"
        finally:
            browser.kill()
            browser.wait()
        assert token not in server.log
        assert KEY not in server.log
