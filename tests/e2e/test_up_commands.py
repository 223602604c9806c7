"""The commands against a cluster on this machine: what they print for machines and for people, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.testing.nats_server import NatsServer
from tests.e2e.embedded import Embedded, alive, call, run, wait_for

pytestmark = pytest.mark.timeout(120)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """One cluster for all tests of the module: each uses requests of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    with Embedded(folder, "--fake-nodes", "3", "--placers", "1", "--storage", "memory") as embedded:
        yield embedded


def example(name: str) -> list[str]:
    return ["place", "-f", str(EXAMPLES / f"{name}.yaml")]


def written(folder: Path, text: str) -> list[str]:
    (folder / "request.yaml").write_text(text)
    return ["place", "-f", str(folder / "request.yaml")]


def test_the_ready_file_names_the_server_and_every_process(shared: Embedded) -> None:
    assert {"nats_url", "services"} == set(shared.ready)
    services = {name: len(pids) for name, pids in shared.ready["services"].items()}
    assert {"nats-server": 1, "monitor": 4, "deadline-tracker": 1, "node-list": 1, "placer": 1} == services
    assert all(alive(pid) for pid in shared.all_pids())


def test_two_clusters_do_not_share_a_folder(shared: Embedded) -> None:
    done = call("up", "--state-dir", str(shared.state_dir), "--nodes", "0")
    assert (2, "another laxity up runs in") == (done.returncode, done.stderr.strip()[8:33])
    assert all(alive(pid) for pid in shared.all_pids())


def test_a_placement_says_where_and_why_and_a_release_waits_until_nothing_runs(shared: Embedded) -> None:
    reply = shared.laxity(*example("guarded"))
    assert ("placed", "guarded", "fake-1") == (reply["outcome"], reply["request_id"], reply["placements"][0]["node"])
    assert reply["score"]["total"] > 0
    assert "started" == wait_for(lambda: started(shared, "guarded"), "it starts")
    assert "released" == shared.laxity("release", "guarded")["outcome"]


def started(cluster: Embedded, request_id: str) -> str | None:
    done = call("-o", "json", "events", "--subject", f"rt.events.place.{request_id}", url=cluster.url)
    states = [json.loads(line)["body"]["state"] for line in done.stdout.splitlines()]
    return "started" if "started" in states else None


def test_a_refusal_has_its_reason_in_numbers_and_exit_code_1(shared: Embedded) -> None:
    done = run(*example("impossible"), url=shared.url)
    assert 1 == done.returncode
    assert "rejected impossible" in done.stdout
    assert "never.deadline: alone it needs 12 ms of 5 ms" in done.stdout
    assert "would fit if realtime.runtime_us is at most 5000" in done.stdout


def test_one_that_waits_has_exit_code_3_and_is_placed_when_it_can_be(shared: Embedded, tmp_path: Path) -> None:
    whole = "image: x\ncandidates: [fake-2]\ngpu: {models: [H200], count: 2}\nqueue: true\nrequest_id: "
    assert "placed" == shared.laxity(*written(tmp_path, f"{whole} first"))["outcome"]
    second = written(tmp_path, f"{whole} second")
    reply = shared.laxity(*second, "--wait", "0s", code=3)
    assert ("queued", 1) == (reply["outcome"], reply["position"])
    shared.laxity("release", "first")
    assert shared.laxity(*second)["outcome"] in {"placed", "started"}
    shared.laxity("release", "second")


def test_a_dry_run_counts_what_would_fit_and_changes_nothing(shared: Embedded, tmp_path: Path) -> None:
    asked = written(
        tmp_path,
        "request_id: dry\nimage: x\ngpu: {models: [H100], share: 0.5}\n"
        "realtime: {deadline: 50ms, runtime: 5ms, gate: true}",
    )
    reply = shared.laxity(*asked, "--dry-run")
    assert ("placed", True) == (reply["outcome"], reply["dry_run"])
    assert reply["fits_more"] > 0
    assert "unknown" == shared.laxity("release", "dry", code=1)["outcome"]


def test_another_strategy_than_that_of_the_file_is_asked_for_by_name(shared: Embedded, tmp_path: Path) -> None:
    asked = written(tmp_path, "request_id: other\nimage: x\ngpu: {share: 0.5}\nstrategy: binpack")
    assert "rejected" == shared.laxity(*asked, "--dry-run", "--strategy", "slot", code=1)["outcome"]
    wrong = shared.laxity(*asked, "--dry-run", "--strategy", "magic", code=2)
    assert ("strategy", "magic") == (wrong["error"]["field"], wrong["error"]["found"])


def test_a_wrong_file_is_explained_before_anything_is_sent(shared: Embedded, tmp_path: Path) -> None:
    done = call(*written(tmp_path, "image: x\ngpu: {share: 1.5}"), url=shared.url)
    assert 2 == done.returncode
    assert "request.yaml: gpu.share: found 1.5, allowed: above 0, at most 1" in done.stderr


def test_the_node_list_comes_in_order_and_by_pages(shared: Embedded) -> None:
    page = shared.laxity("nodes", "--limit", "4")
    rest = shared.laxity("nodes", "--after", page["after"])
    whole = shared.laxity("nodes")
    names = [device["uuid"] for device in (*page["devices"], *rest["devices"])]
    assert [device["uuid"] for device in whole["devices"]] == names
    assert "guaranteed" == whole["devices"][0]["standing"]
    assert "interactive" == whole["class"]
    assert "guaranteed" in call("nodes", url=shared.url).stdout


def test_status_shows_services_ledger_leader_and_streams(shared: Embedded) -> None:
    status = wait_for(lambda: _with_leader(shared), "somebody leads")
    names = sorted(service["name"] for service in status["services"])
    assert ["deadline-tracker", *["monitor"] * 4, "node-list", "placer"] == names
    assert {"ok"} == {service["health"] for service in status["services"]}
    assert status["ledger"]["id"]
    assert [] == status["missing"]
    assert all(stream["exists"] for stream in status["streams"])
    assert "leader" in call("status", url=shared.url).stdout


def _with_leader(cluster: Embedded) -> dict[str, object] | None:
    status = cluster.laxity("status")
    return status if status["ledger"]["leader"] else None


def test_explain_tells_the_story_of_a_request_a_node_and_a_device(shared: Embedded) -> None:
    shared.laxity(*example("too-big"), code=1)
    story = shared.laxity("explain", "too-big")["story"]
    assert story[0] == "too-big is rejected, which is final"
    assert any("needs 307200 MiB on one device" in line for line in story)
    assert shared.laxity("explain", "fake-1")["story"][0].startswith("fake-1 is ready")
    assert any("H100, gated" in line for line in shared.laxity("explain", "fake-1/0")["story"])
    assert 1 == call("explain", "nobody", url=shared.url).returncode


def test_a_ledger_is_accepted_as_it_is_and_only_what_it_does_not_know_is_forgotten(shared: Embedded) -> None:
    before = shared.laxity("status")["ledger"]
    accepted = shared.laxity("ledger", "accept", "former-id")
    assert (before["id"], ["former-id"]) == (accepted["ledger_id"], accepted["former"])
    assert "unknown" == shared.laxity("ledger", "forget", "never-asked")["outcome"]
    assert 2 == call("ledger", "forget", "never-asked", url=shared.url).returncode


def test_a_ledger_is_exported_and_played_again(shared: Embedded, tmp_path: Path) -> None:
    text = "request_id: played\nimage: x\ncandidates: [fake-3]\ngpu: {models: [H200]}\nqueue: true"
    assert "placed" == shared.laxity(*written(tmp_path, text))["outcome"]
    lines = shared.laxity("ledger", "export", str(tmp_path / "trace"))["lines"]
    assert lines["requests.jsonl"] >= 1
    assert 4 == lines["nodes.jsonl"]
    line = ["simulate", str(tmp_path / "trace"), "--strategy", "spread,binpack", "--placements"]
    found = shared.laxity(*line, "--departures")
    assert lines["nodes.jsonl"] == found["nodes"]
    (played,) = [each for each in found["placements"] if each["request"] == "played"]
    assert ["fake-3", "fake-3"] == [played[name].partition(":")[0] for name in ("spread", "binpack")]
    shared.laxity("release", "played")
    assert 2 == call("ledger", "export", str(tmp_path / "trace"), url=shared.url).returncode


def test_where_no_server_is_the_exit_code_is_4() -> None:
    done = call("status", url="nats://127.0.0.1:1")
    assert (4, "no NATS server answers at nats://127.0.0.1:1") == (done.returncode, done.stderr.strip()[8:])


def test_where_no_placer_runs_the_request_is_not_decided_and_nobody_is_asked_in_vain(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        done = call("-o", "json", *written(tmp_path, "request_id: early\nimage: x"), "--wait", "0s", url=server.url)
        assert (3, "undecided") == (done.returncode, json.loads(done.stdout)["outcome"])
        assert "no placer runs" in done.stderr
        assert 4 == call("release", "early", url=server.url).returncode
        assert 4 == call("nodes", url=server.url).returncode


def test_the_python_client_of_the_documents_runs_as_it_stands_there(shared: Embedded, tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "docs" / "clients.md").read_text(encoding="utf-8")
    program = text.split("```python\n")[1].split("```")[0]
    assert "nats://127.0.0.1:4222" in program
    assert "asyncio.sleep(10)" in program
    program = program.replace("nats://127.0.0.1:4222", shared.url).replace("asyncio.sleep(10)", "asyncio.sleep(1)")
    (tmp_path / "client.py").write_text(program)
    command = [sys.executable, str(tmp_path / "client.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("placed [{'replica': 0")
    assert ["accepted", "placed", "started"] == [line.split()[1] for line in lines if "/detector-1/" in line]
    assert lines[-1] in {"stopping", "released"}
