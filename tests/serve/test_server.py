"""The server: who may ask, what a click does, and what it survives."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import apportion as ap
from apportion import zoo
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.plan.plan_file import plan_to_json, read_plan
from apportion.serve.server import MOST_PLAN, MOST_REQUEST, TOKEN, PageServer
from apportion.split.strategy import verify_strategy


class Client:
    """Asks the server as the page does."""

    def __init__(self, server: PageServer) -> None:
        self.server, self.host = server, f"127.0.0.1:{server.server_port}"

    def raw(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        wire = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=120)
        wire.putrequest(method, path, skip_host="Host" in headers)
        for key, value in headers.items():
            wire.putheader(key, value)
        if body is not None and "Content-Length" not in headers:
            wire.putheader("Content-Length", str(len(body)))
        wire.endheaders(body)
        answer = wire.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        wire.close()
        return found

    def ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        status, _, text = self.raw("GET" if data is None else "POST", path, body,
                                   {TOKEN: self.server.token})  # fmt: skip
        answer = json.loads(text)
        return answer if status == 200 else {"status": status, **answer}


@pytest.fixture(scope="module")
def plan() -> Plan:
    it = zoo.load("gpt2:tiny", meta=True)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch)
    return make_plan(program, ap.cluster("4xh100"), "data")


@pytest.fixture
def client() -> Iterator[Client]:
    server = PageServer(0)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield Client(server)
    finally:
        server.shutdown()
        server.server_close()
        assert not server.bench.folder.exists()


def test_only_its_own_page_on_this_machine_is_answered(client: Client) -> None:
    token, host = client.server.token, client.host
    assert client.server.server_address[0] == "127.0.0.1"
    status = lambda path, **headers: client.raw("GET", path, None, headers)[0]  # noqa: E731
    assert status("/") == 200
    assert status("/api/state") == 403
    assert status("/api/state", **{TOKEN: "x" * 32}) == 403
    assert status("/api/state", **{TOKEN: token}) == 200
    assert status("/api/state", **{TOKEN: token, "Host": "evil.example"}) == 403
    assert status("/", Host=f"evil.example:{client.server.server_port}") == 403
    assert status("/api/state", **{TOKEN: token, "Origin": "http://evil.example"}) == 403
    assert status("/api/state", **{TOKEN: token, "Origin": "null"}) == 403
    assert status("/api/state", **{TOKEN: token, "Origin": f"http://{host}"}) == 200
    page = client.raw("GET", "/", None, {})
    assert token not in page[2].decode()
    assert "default-src 'none'" in page[1]["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in page[1]


def test_wrong_requests_get_one_sentence(client: Client) -> None:
    for path, data in [
        ("/api/searches", {"model": "evil.py:f", "cluster": "8xh100"}),
        ("/api/searches", [1]),
        ("/api/plans/77/try", {"op": 0, "change": 0, "version": 0}),
        ("/api/plans/x/try", {}),
        ("/api/nothing", {}),
        ("/api/searches/5/stop", {}),
    ]:
        answer = client.ask(path, data)
        assert answer["status"] == 400 and "\n" not in answer["error"], (path, answer)
    for path in ("/../server.py", "/templates/serve.js", "/report/x", "/api/plans/../ops"):
        status, _, text = client.raw("GET", path, None, {TOKEN: client.server.token})
        assert status in (400, 404) and json.loads(text)["error"]
    how = {TOKEN: client.server.token}
    for length in ("-1", "1e9", "", str(MOST_PLAN + 1)):
        status, _, text = client.raw("POST", "/api/plans", b"", how | {"Content-Length": length})
        assert status == 400 and json.loads(text)["error"]
    large = how | {"Content-Length": str(MOST_REQUEST + 1)}
    assert client.raw("POST", "/api/searches", b"", large)[0] == 400
    assert client.raw("POST", "/api/plans", b"{}", how)[0] == 400
    assert client.ask("/api/state") == {"plans": [], "searches": []}


@pytest.mark.slow
def test_random_clicks_leave_a_legal_plan(client: Client, plan: Plan) -> None:
    bench, rng = client.server.bench, random.Random(5)
    number = client.server.bench.upload("p", json.dumps(plan_to_json(plan)).encode())
    count = len(plan.space.graph.ops)
    kept = pinned = 0
    while kept + pinned < 20:
        version = client.ask("/api/state")["plans"][0]["version"]
        op = rng.randrange(count)
        listed = client.ask(f"/api/plans/{number}/changes/{op}")["changes"]
        if rng.random() < 0.2 or not listed:
            what = {"ops": [op], "pin": rng.random() < 0.7, "version": version}
            assert "error" not in client.ask(f"/api/plans/{number}/pin", what)
            pinned += 1
            continue
        what = {"op": op, "change": rng.randrange(len(listed)), "version": version}
        tried = client.ask(f"/api/plans/{number}/try", what)
        done = client.ask(f"/api/plans/{number}/keep", what | {"pin": rng.random() < 0.2})
        assert done["effect"] == tried["effect"]
        kept += 1
    _, _, text = client.raw("GET", f"/api/plans/{number}/plan", None, {TOKEN: client.server.token})
    found = read_plan(text)
    verify_strategy(found.space, found.strategy, 4)
    assert found.strategy == bench.plans[number].editor.strategy
    assert found.simulate().predicted == found.predicted
    assert found.method == "edited" and found.model == plan.model


def test_a_change_is_that_of_the_version_that_was_shown(client: Client, plan: Plan) -> None:
    number = client.server.bench.open("p", plan)
    what = {"op": 5, "change": 0, "version": 0}
    client.ask(f"/api/plans/{number}/changes/5")
    assert client.ask(f"/api/plans/{number}/keep", what)["version"] == 1
    answer = client.ask(f"/api/plans/{number}/keep", what)
    assert answer["status"] == 400 and "another tab" in answer["error"]


def test_what_is_pinned_is_not_changed(client: Client, plan: Plan) -> None:
    number = client.server.bench.open("p", plan)
    editor = client.server.bench.plans[number].editor
    op = next(k for k, it in enumerate(editor.space.graph.ops) if it.kind == "aten.addmm.default")
    client.ask(f"/api/plans/{number}/pin", {"ops": [op], "version": 0})
    assert client.ask(f"/api/plans/{number}/changes/{op}")["changes"] == []
    group = editor.around.group(op)
    for other in group[1:]:
        for change in editor.changes(other):
            assert op not in change.choices


def wait(client: Client, status: str, seconds: float = 240.0) -> Any:
    ends = time.monotonic() + seconds
    while (found := client.ask("/api/state")["searches"][-1])["status"] != status:
        assert found["status"] == "running" and time.monotonic() < ends, found
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_searches_run_die_and_are_stopped_beside_the_server(client: Client) -> None:
    asked = {"model": "mlp:tiny", "cluster": "2xh100", "method": "data", "budget": 1}
    client.ask("/api/searches", asked | {"method": "flexflow", "budget": 600})
    pid = client.ask("/api/state")["searches"][-1]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert "signal 9" in wait(client, "failed")["error"]
    stopped = client.ask("/api/searches", asked | {"budget": 600})["id"]
    assert client.ask(f"/api/searches/{stopped}/stop", {}) == {}
    wait(client, "stopped")
    client.ask("/api/searches", asked | {"model": "mlp:depth=x"})
    assert wait(client, "failed")["error"]
    client.ask("/api/searches", asked)
    wait(client, "finished")
    (found,) = client.ask("/api/state")["plans"]
    assert found["method"] == "data" and found["step_seconds"] > 0
    number = found["id"]
    op = 1
    client.ask(f"/api/plans/{number}/pin", {"ops": [op], "version": 0})
    before = client.server.bench.plans[number].editor.choice(op)
    client.ask(f"/api/plans/{number}/search", {"version": 1, "budget": 1})
    wait(client, "finished")
    again = client.ask("/api/state")["plans"][-1]
    assert again["step_seconds"] <= found["step_seconds"]
    plan = client.server.bench.plans[again["id"]].plan
    assert plan.strategy.choices[op] == before
