"""The simulator on traces so small that every figure can be worked out by hand."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from cli.output import Exit
from cli.simulate.play import Play, Played
from cli.simulate.recorded import arrivals_of_records
from cli.simulate.result import Result, result, where
from cli.simulate.schedule import Plan
from cli.simulate.trace import SECOND_US, Arrival, Trace, arrivals_of_csv, nodes_of_csv
from cli.simulate.world import World
from services.placer.core.demand import Demand
from services.placer.core.records import new_record, stepped
from shared.errors import FieldError
from shared.messages import Gpu, NodeFacts, PlaceRequest, ReplicaRecord, State
from tests.decide_world import node, request

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,32768,2,H100\nb,8000,32768,2,H100\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\n"


def come(name: str, count: int = 1, at_us: int | None = None, stay_us: int | None = None, **fields: Any) -> Arrival:
    asked = request(Gpu(count=count), **{"queue": True} | fields)
    return Arrival(name, asked, Demand.of(asked), at_us, stay_us)


def play(nodes: list[NodeFacts], arrivals: list[Arrival], strategy: str = "binpack", **plan: Any) -> Played:
    trace = Trace("by hand", tuple(arrivals))
    world = World(nodes, strategy, trace.workload, foresight=True)
    return Play(world, Plan(**plan).of(trace)).through()


def figures(nodes: list[NodeFacts], arrivals: list[Arrival], **plan: Any) -> Result:
    return result(play(nodes, arrivals, **plan), over_time=plan.get("departures", False))


def fates(played: Played) -> dict[str, str]:
    return {each.name: where(played, fate) for each, fate in zip(played.arrivals, played.fates, strict=True)}


def written(folder: Path, pods: str, nodes: str = NODES) -> list[str]:
    (folder / "pods.csv").write_text(pods)
    (folder / "nodes.csv").write_text(nodes)
    return ["simulate", str(folder / "pods.csv"), "--nodes", str(folder / "nodes.csv")]


def test_without_departures_nobody_leaves_and_who_does_not_fit_waits() -> None:
    played = play([node("a", 2)], [come("first"), come("second"), come("third")])
    assert {"first": "a:0", "second": "a:1", "third": "waiting"} == fates(played)
    found = result(played, over_time=False)
    assert (150, 100, 50) == (found.arrived, found.allocated, found.waiting_demand)
    assert (2, 0, 0, 1, 1) == (found.placed, found.refused, found.expired, found.waiting, found.had_to_wait)


def test_with_departures_figures_are_means_over_time() -> None:
    arrivals = [come("first", at_us=0, stay_us=10), come("second", at_us=2, stay_us=10), come("last", at_us=40)]
    found = figures([node("a", 1)], arrivals, departures=True)
    assert (50, 20) == (found.allocated, found.waiting_demand)  # used from 0 to 20, waited for from 2 to 10, of 40
    assert (3, 0, 1) == (found.placed, found.waiting, found.had_to_wait)


def test_who_leaves_makes_room_for_one_that_comes_at_the_same_time() -> None:
    arrivals = [come("first", at_us=0, stay_us=10), come("second", at_us=10)]
    assert 0 == figures([node("a", 1)], arrivals, departures=True).had_to_wait


def test_a_stretch_makes_all_stay_longer() -> None:
    arrivals = [come("first", at_us=0, stay_us=10), come("second", at_us=10)]
    assert 1 == figures([node("a", 1)], arrivals, departures=True, stretch=1.5).had_to_wait


def test_those_that_wait_are_tried_in_the_order_of_the_ledger() -> None:
    waits = [come("low", at_us=1), come("high", at_us=2, priority=1), come("soon", at_us=3, place_by_us=20)]
    arrivals = [come("first", at_us=0, stay_us=10), *waits, come("end", 2, at_us=15)]
    played = play([node("a", 1)], arrivals, departures=True)
    assert {"low": "waiting", "high": "a:0", "soon": "waiting"} == {
        name: fate for name, fate in fates(played).items() if name in {"low", "high", "soon"}
    }


def test_one_that_waits_longer_than_it_may_expires_and_leaves_no_demand_behind() -> None:
    waits = come("soon", at_us=5, place_by_us=9)
    arrivals = [come("first", at_us=0, stay_us=10), waits, come("last", at_us=20)]
    found = figures([node("a", 1)], arrivals, departures=True)
    assert (2, 1, 0) == (found.placed, found.expired, found.waiting)
    assert 25 == found.waiting_demand  # from 5 to 10, when it is past 9, of 20


def test_what_does_not_queue_or_never_fits_is_refused() -> None:
    arrivals = [come("first"), come("not now", queue=False), come("never", 2)]
    played = play([node("a", 1)], arrivals)
    assert {"first": "a:0", "not now": "refused", "never": "refused"} == fates(played)


def test_a_gang_is_placed_whole_or_waits_whole() -> None:
    played = play([node("a", 2), node("b", 2)], [come("gang", 2, replicas=2), come("other", replicas=2)])
    assert {"gang": "a:0-1 b:0-1", "other": "waiting"} == fates(played)
    assert 100 == result(played, over_time=False).allocated


def test_fragments_are_what_each_kind_could_not_use_as_often_as_it_comes() -> None:
    """Of two devices one is idle: half of the requests want one, and can use it; half want two, and cannot."""
    pair = come("pair", 2)
    found = figures([node("a", 2), node("b", 2)], [come("one"), pair])
    assert (75, 12.5) == (found.allocated, found.fragmented)


def test_a_shuffle_is_another_order_the_same_each_time() -> None:
    trace = Trace("by hand", tuple(come(str(number), at_us=number) for number in range(20)))
    orders = [[each.name for each in Plan(shuffle=seed).of(trace)] for seed in (None, 1, 1, 2)]
    assert orders[1] == orders[2]
    assert 3 == len({tuple(order) for order in orders})
    assert [sorted(orders[0])] * 3 == [sorted(order) for order in orders[1:]]
    timed = Plan(shuffle=1, departures=True).of(trace)
    assert (orders[1], list(range(20))) == ([each.name for each in timed], [each.at_us for each in timed])


def test_departures_need_times() -> None:
    with pytest.raises(FieldError, match="first: creation_time"):
        play([node("a", 1)], [come("first")], departures=True)


def test_random_goes_by_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = written(tmp_path, PODS + "".join(f"p{n},1,1,1,100,,\n" for n in range(30)))
    digests = []
    for seed in ("1", "1", "2"):
        assert Exit.OK == main([*line, "--strategy", "random", "--seed", seed, "-o", "json"])
        digests.append(json.loads(capsys.readouterr().out)["results"][0]["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_a_csv_trace_says_what_openb_says_and_a_little_more(tmp_path: Path) -> None:
    written(
        tmp_path,
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,replicas,priority,creation_time,deletion_time\n"
        "part,100,5,1,460,A10|T4,,,7,9\nnone,100,5,0,0,,2,-1,,\n",
        "sn,cpu_milli,memory_mib,gpu,model,labels\nn,1000,2000,2,A10,zone=1|laxity.dev/slot=2\n",
    )
    part, none = arrivals_of_csv(tmp_path / "pods.csv")
    assert (Gpu(count=1, share=0.46, models=("A10", "T4")), 100, 5) == (
        part.request.gpu,
        part.request.cpu_milli,
        part.request.memory_mib,
    )
    assert (7 * SECOND_US, 2 * SECOND_US, 460_000) == (part.at_us, part.stay_us, part.gpu_micro)
    assert (None, 2, -1, None, None) == (
        none.request.gpu,
        none.request.replicas,
        none.request.priority,
        none.at_us,
        none.stay_us,
    )
    (facts,) = nodes_of_csv(tmp_path / "nodes.csv")
    assert ("n", 1000, 2000, ["A10", "A10"]) == (
        facts.node,
        facts.cpu_milli,
        facts.memory_mib,
        [device.model for device in facts.devices],
    )
    assert {"zone": "1", "laxity.dev/slot": "2"} == facts.labels


@pytest.mark.parametrize(
    "pods, nodes, said",
    [
        (PODS + "p,1,1,1,100,,\np,x,1,1,100,,\n", NODES, "pods.csv: line 3: cpu_milli: found x"),
        (PODS + "p,1,1,1,1100,,\n", NODES, "pods.csv: line 2: gpu.share"),
        (PODS + ",1,1,1,100,,\n", NODES, "pods.csv: line 2: name"),
        (PODS, NODES + "c,1,1,1.5,H100\n", "nodes.csv: line 4: gpu: found 1.5"),
        (PODS, "sn,cpu_milli,memory_mib,gpu,model,labels\nn,1,1,1,H,x\n", "nodes.csv: line 2: labels: found x"),
    ],
)
def test_a_mistake_names_file_line_and_column(
    pods: str, nodes: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Exit.USAGE == main(written(tmp_path, pods, nodes))
    assert said in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    "options, said",
    [
        (("--strategy", "best"), "strategy: found best, allowed: one of"),
        (("--arrivals", "shuffle"), "--arrivals: found shuffle"),
        (("--stretch", "0"), "--stretch: found 0.0"),
        (("--plot", "x.pdf"), "--plot: found x.pdf"),
        (("--picture", "x.png"), "--picture: found x.png"),
    ],
)
def test_a_wrong_option_is_said_before_the_work(
    options: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Exit.USAGE == main([*written(tmp_path, PODS + "p,1,1,1,100,,\n"), *options])
    assert said in capsys.readouterr().err


def test_a_cluster_without_devices_has_no_percentages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = "sn,cpu_milli,memory_mib,gpu,model\na,8000,32768,0,\n"
    assert Exit.OK == main([*written(tmp_path, PODS + "p,1,1,0,0,,\n", nodes), "-o", "json"])
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert (1, None, None) == (found["placed"], found["allocated_percent"], found["fragmented_percent"])


def test_two_runs_say_the_same_but_for_how_fast_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pods = PODS + "".join(f"p{n},{n % 3},1,1,{100 * (n % 9 + 1)},{n},{n + 5}\n" for n in range(40))
    said = []
    for _ in range(2):
        line = [*written(tmp_path, pods), "--strategy", "laxity,deadline,fgd", "--departures", "-o", "json"]
        assert Exit.OK == main([*line, "--arrivals", "shuffle:3", "--seed", "5", "--placements"])
        found = json.loads(capsys.readouterr().out)
        assert all(each.pop("decisions_per_s") > 0 for each in found["results"])
        said.append(found)
    assert said[0] == said[1]
    assert ["laxity", "deadline", "fgd"] == [each["strategy"] for each in said[0]["results"]]


def test_a_plot_is_drawn_the_same_each_time(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        line = [*written(tmp_path, PODS + "p,1,1,1,900,,\nq,1,1,1,400,,\n"), "--strategy", "binpack,spread"]
        assert Exit.OK == main([*line, "--plot", str(tmp_path / "plot.svg")])
        drawn.append((tmp_path / "plot.svg").read_text())
    assert drawn[0] == drawn[1]
    assert all(word in drawn[0] for word in ("binpack", "spread", "arrived demand"))
    assert Exit.OK == main([*line, "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert Exit.USAGE == main([*written(tmp_path, PODS), "--plot", str(tmp_path / "plot.svg")])
    assert "pip install 'laxity[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "plot.svg").exists()


def recorded(name: str, arrived_us: int, *steps: tuple[State, int], final: bool = False) -> bytes:
    asked = PlaceRequest(request_id=name, command=("serve",), gpu=Gpu(count=1), queue=True)
    record = new_record(asked, "placer-1", arrived_us)
    for state, at_us in steps:
        record = stepped(record, state, at_us)
    replica = ReplicaRecord(replica=0, state=record.state)
    return record.model_copy(update={"replicas": (replica,)}).to_json()


def test_a_ledger_says_who_came_when_and_how_long_it_ran(tmp_path: Path) -> None:
    lines = [
        recorded("later", 50, (State.PLACED, 51), (State.STARTED, 60), (State.STOPPING, 65), (State.RELEASED, 70)),
        recorded("earlier", 10, (State.QUEUED, 10), (State.PLACED, 12), (State.STARTED, 20)),
        recorded("never ran", 30, (State.QUEUED, 30), (State.RELEASED, 45)),
    ]
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join(lines))
    found = arrivals_of_records(tmp_path / "requests.jsonl")
    assert [("earlier", 10, None), ("never ran", 30, 15), ("later", 50, 10)] == [
        (each.name, each.at_us, each.stay_us) for each in found
    ]


def test_a_line_that_is_no_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "requests.jsonl").write_bytes(recorded("a", 1, (State.PLACED, 2)) + b"\n{}\n")
    (tmp_path / "nodes.jsonl").write_bytes(node("a").to_json())
    assert Exit.USAGE == main(["simulate", str(tmp_path)])
    assert "requests.jsonl: line 2: request_id" in capsys.readouterr().err.replace("\n", "")
