"""The command line itself: which server it asks, how it ends, and what people are shown."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from cli import client, events, place
from cli.explain import once_each
from cli.main import main, parser
from cli.output import Exit
from cli.programs import Cluster, programs
from shared.bus import StoredMsg
from shared.messages import FieldFault, PlaceEvent, Placement, PlaceReply, PlannedMove, Reason, Score


def printed(reply: PlaceReply) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    place.show(console, reply)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(
    "outcome, code",
    [
        ("placed", Exit.OK),
        ("started", Exit.OK),
        ("held", Exit.OK),
        ("exited", Exit.OK),
        ("rejected", Exit.REFUSED),
        ("failed", Exit.REFUSED),
        ("expired", Exit.REFUSED),
        ("error", Exit.USAGE),
        ("queued", Exit.UNDECIDED),
        ("undecided", Exit.UNDECIDED),
    ],
)
def test_each_outcome_has_its_exit_code(outcome: str, code: Exit) -> None:
    assert code == place.code_of(PlaceReply(outcome=outcome, request_id="r"))


def test_a_decision_is_shown_with_where_and_why() -> None:
    where = Placement(replica=0, node="node-3", devices=("GPU-5f1",), share=0.25, generation=1)
    score = Score(total=0.81, by={"slack": 0.6})
    reply = PlaceReply(outcome="placed", request_id="r", duplicate=True, placements=(where,), score=score)
    head, columns, row, why = printed(reply)
    assert "placed r (duplicate)" == head
    assert ["replica", "node", "devices", "share", "generation"] == columns.split()
    assert ["0", "node-3", "GPU-5f1", "0.25", "1"] == row.split()
    assert "  score 0.81 (slack 0.60)" == why


def test_a_refusal_is_shown_with_counts_and_what_would_help() -> None:
    reason = Reason(code="not_now.memory", count=5, message="needs 8192 MiB")
    reply = PlaceReply(outcome="rejected", request_id="r", reasons=(reason,), would_fit_if=("memory is less",))
    assert ["rejected r", "  5 x not_now.memory: needs 8192 MiB", "  would fit if memory is less"] == printed(reply)


def test_an_error_is_shown_with_its_field() -> None:
    fault = FieldFault(field="gpu.share", found="1.5", allowed="at most 1")
    reply = PlaceReply(outcome="error", request_id=None, error=fault)
    assert ["error", "  gpu.share: found 1.5, allowed: at most 1"] == printed(reply)


@pytest.mark.parametrize("argv", [[], ["nothing"], ["place"], ["place", "-f"], ["nodes", "--limit", "x"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(argv)
    assert Exit.USAGE == end.value.code
    assert "usage:" in capsys.readouterr().err


def test_a_wrong_file_ends_with_2_and_names_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Exit.USAGE == main(["place", "-f", str(tmp_path / "absent.yaml")])
    assert "absent.yaml: (file): found No such file or directory" in capsys.readouterr().err.replace("\n", "")


def test_a_wrong_wait_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert Exit.USAGE == main(["place", "-f", "x", "--wait", "soon"])
    assert "--wait: found soon" in capsys.readouterr().err


def test_the_server_is_the_one_given_then_the_environments_then_a_running_ones_then_the_usual(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("LAXITY_NATS_URL", raising=False)
    assert client.DEFAULT_URL == client.find_url(None)
    ready = {"nats_url": "nats://running", "services": {"nats-server": [os.getpid()]}}
    (tmp_path / "laxity").mkdir()
    (tmp_path / "laxity" / "ready.json").write_text(json.dumps(ready))
    assert "nats://running" == client.find_url(None)
    monkeypatch.setenv("LAXITY_NATS_URL", "nats://environment")
    assert "nats://environment" == client.find_url(None)
    assert "nats://given" == client.find_url("nats://given")


def test_a_ready_file_whose_server_is_gone_counts_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("LAXITY_NATS_URL", raising=False)
    (tmp_path / "laxity").mkdir()
    for text in ("", "[]", '{"nats_url": "nats://gone", "services": {"nats-server": [999999999]}}'):
        (tmp_path / "laxity" / "ready.json").write_text(text)
        assert client.DEFAULT_URL == client.find_url(None)


MISS = {"container": "c", "task": 4, "name": "infer", "tardiness_us": 7, "met": 3, "missed": 1, "guarantee": 0.9}
OVERRAN = {"cause": "overran", "container": "d", "amount_us": 12_300, "detail": "17.3 ms of 5 ms"}
ILL = {"cause": "throttled", "container": None, "amount_us": None, "detail": "hot"}


def test_every_kind_of_event_has_its_line() -> None:
    at = {"at_us": 0}
    bodies = {
        "rt.events.place.r": {"request_id": "r", "state": "exited", "generation": 2, "step": 4, "exit_code": 3},
        "rt.events.node.n": {"node": "n", "state": "device_lost", "reason": "fell off", "device": "GPU-1"},
        "rt.events.bus.placer": {"service": "placer", "instance": "p-1", "kind": "reconnected", "detail": "back"},
        "rt.events.task.n": {"node": "n", "counter": 7, "kind": [1, 2], "watermark_us": 9},
        "rt.events.deadline.n.c": MISS | {"kind": "missed", "because": [OVERRAN, ILL]},
        "rt.events.deadline.n.d": MISS | {"kind": "noisy", "because": [OVERRAN | {"cause": "noisy"}]},
        "rt.events.deadline.n.e": MISS | {"kind": "missed", "tardiness_us": None},
    }
    lines = [events.line(subject, {**at, **body}).plain.split(" ", 1)[1].strip() for subject, body in bodies.items()]
    assert [
        "place    r exited, generation 2, exit code 3",
        "node     n device_lost GPU-1: fell off",
        "bus      placer p-1 reconnected: back",
        "task     n batch 7: 2 records up to 9 us",
        "deadline c missed task 4 (infer), 7 us late; overran: d, 12.3 ms (17.3 ms of 5 ms); throttled (hot)"
        " (3 met, 1 missed, guarantee 0.9)",
        "deadline c noisy; noisy: d, 12.3 ms (17.3 ms of 5 ms)",
        "deadline c missed task 4 (infer), still running (3 met, 1 missed, guarantee 0.9)",
    ] == lines


def test_a_cluster_consists_of_what_was_asked_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=1, fake_nodes=2, placers=3)
    labels = [program.label for program in programs(cluster)]
    assert [
        *("monitor-node-1", "monitor-fake-1", "monitor-fake-2", "deadline-tracker-1", "node-list-1"),
        *("placer-1", "placer-2", "placer-3"),
    ] == labels
    assert len(labels) == len({program.env["LAXITY_INSTANCE"] for program in programs(cluster)})


def test_a_pull_has_its_line_and_of_one_pull_a_story_tells_how_far_it_came() -> None:
    texts = ("image a: unknown size, unknown layers", "image a: 9 of 9 MiB, 2 of 2 layers, pulled")
    bodies = [(1, "placed", None), *((0, "pulling", text) for text in texts), (2, "started", None)]
    told = []
    for number, (step, state, detail) in enumerate(bodies, 1):
        event = PlaceEvent(at_us=0, request_id="a", state=state, generation=1, step=step, detail=detail)
        told.append(StoredMsg("rt.events.place.a", event.to_json(), number, {"ce-id": f"{number}"}))
    shown = str(events.line("rt.events.place.a", json.loads(told[1].body)))
    assert shown.endswith(" place    a pulling, generation 1: image a: unknown size, unknown layers")
    assert ["placed", "pulling", "started"] == [event.state for event in once_each([*told, told[-1]])]
    assert texts[1] == list(once_each(told))[1].detail


def test_the_moves_after_which_a_request_would_fit_are_shown_in_their_order() -> None:
    made = [
        PlannedMove(request_id=name, replica=0, from_node="a", from_devices=("a.0",), node="b", devices=("b.0",))
        for name in ("x", "y")
    ]
    reply = PlaceReply(outcome="rejected", request_id="r", dry_run=True, moves=tuple(made))
    assert [
        "rejected r (dry run)",
        "  would fit after move 1: x/0 from a (a.0) to b (b.0)",
        "  would fit after move 2: y/0 from a (a.0) to b (b.0)",
    ] == printed(reply)


def test_strategies_are_compared_side_by_side() -> None:
    where = Placement(replica=0, node="node-3", devices=("GPU-1",))
    reason = Reason(code="not_now.share", count=1, message="needs more")
    replies = {
        "binpack": PlaceReply(
            outcome="placed", request_id="r", placements=(where,), score=Score(total=0.5), fits_more=2
        ),
        "slot": PlaceReply(outcome="rejected", request_id="r", reasons=(reason,), fits_more=0),
    }
    console = Console(file=io.StringIO(), width=160)
    console.print(place.compared(replies))
    assert isinstance(console.file, io.StringIO)
    _, binpack, slot = console.file.getvalue().splitlines()
    assert ["binpack", "placed", "node-3", "GPU-1", "0.50", "none", "2", "0"] == binpack.split()
    assert ["slot", "rejected", "none", "none", "none", "0", "0", "needs", "more"] == slot.split()


def test_only_dry_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("command: [sleep]\n")
    assert Exit.USAGE == main(["place", "-f", str(tmp_path / "r.yaml"), "--compare", "binpack,spread"])
    assert "only with --dry-run" in capsys.readouterr().err
