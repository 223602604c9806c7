"""The rings of a kubelet's pods: found by the volumes that policies give to pods, whatever the pods do with them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import laxity
from laxity.ring import Ring
from services.monitor.gate.boxes import Boxes
from services.monitor.links import POD_RING, is_box
from services.monitor.pod_folders import LABELS, LOOK_US, PodFolders
from services.monitor.rings import RingDirectory
from shared.messages import ContainerLabels, Kind, Pod, Realtime
from tests.manifests import named
from tests.monitor_folders import labels_of

UID = "0a1b2c3d-1111-4222-8333-444455556666"
OTHER = "ffffffff-1111-4222-8333-444455556666"
GATED = Realtime(deadline_us=50_000, period_us=40_000, runtime_us=12_000, kind=Kind.HARD, gate=True)


@dataclass
class Kubelet:
    """The folders that a kubelet makes of a pod."""

    pods: Path

    def ring(self, uid: str = UID) -> Path:
        return self.pods / uid / POD_RING

    def volumes(self, uid: str = UID) -> Path:
        self.ring(uid).mkdir(parents=True)
        return self.ring(uid)

    def label(self, text: bytes, uid: str = UID, **names: str) -> None:
        """As it writes a downward-API volume: a folder by time, a link to it, and a link for each file."""
        volume = (self.pods / uid / LABELS).parent
        written = volume / "..2026_11_30_08_00_00.1"
        written.mkdir(parents=True)
        (volume / "..data").symlink_to(written.name)
        for name, content in {"container.json": text, **{name: said.encode() for name, said in names.items()}}.items():
            (written / name).write_bytes(content)
            (volume / name).symlink_to(f"..data/{name}")

    def ended(self, uid: str = UID) -> None:
        shutil.rmtree((self.pods / uid / LABELS).parent)


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    (tmp_path / "pods").mkdir()
    return Kubelet(tmp_path / "pods")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "rings"


@pytest.fixture
def folders(kubelet: Kubelet, root: Path) -> PodFolders:
    return PodFolders(kubelet.pods, root)


@pytest.fixture
def text(tmp_path: Path) -> bytes:
    """The labels of a container called ``detector`` that uses the gate."""
    return (labels_of(tmp_path / "made", "detector", realtime=GATED, device="GPU-1") / "container.json").read_bytes()


def wrote(folder: Path, tasks: int) -> Ring:
    made = Ring(str(folder), 16)
    for _ in range(tasks):
        task = laxity.task("infer", deadline_us=1_000)
        task.ring = made
        task.__enter__().end()
    return made


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"namespace": "vision", "name": "detector-0"}, Pod(namespace="vision", name="detector-0", uid=UID)),
        ({"name": "detector-0"}, None),
        ({"namespace": "", "name": "detector-0"}, None),
        ({}, None),
    ],
)
def test_the_labels_tell_how_kubernetes_calls_the_pod(
    folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes, names: dict[str, str], expected: Pod | None
) -> None:
    kubelet.volumes()
    kubelet.label(text, **names)
    folders.look(0)
    told = ContainerLabels.from_json((root / "detector" / "container.json").read_bytes())
    assert (expected, {}) == (told.pod, folders.counts)
    assert ContainerLabels.from_json(text) == told.model_copy(update={"pod": None})


def test_a_pod_is_a_container_once_it_is_bound(folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes) -> None:
    ring_folder = kubelet.volumes()
    folders.look(0)
    assert [] == list(root.iterdir())  # it has no labels yet

    kubelet.label(text)
    folders.look(LOOK_US)
    writer = wrote(ring_folder, 2)
    directory = RingDirectory(root)
    (reader,) = directory.scan().new

    assert ("detector", 4) == (reader.container, len(reader.read().rows))
    assert reader.labels is not None
    assert ["GPU-1"] == list(reader.labels.reservation.devices)
    assert {} == directory.counts == folders.counts
    writer.close()
    directory.close()


def test_its_records_are_read_to_the_end_when_its_containers_have_ended(
    folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes
) -> None:
    kubelet.label(text)
    writer = wrote(kubelet.volumes(), 1)
    folders.look(0)
    directory = RingDirectory(root)
    directory.scan()
    writer.close()

    kubelet.ended()
    folders.look(LOOK_US)
    (gone,) = directory.scan().gone

    assert 2 == len(gone.read().rows)
    assert [] == list(root.iterdir())
    gone.close()


def test_its_gate_lets_go_when_its_containers_have_ended(
    folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes
) -> None:
    kubelet.label(text)
    ring_folder = kubelet.volumes()
    folders.look(0)
    boxes = Boxes(root)
    (found,) = boxes.look().new
    found.listener.close()

    assert ("detector", "GPU-1") == (found.token, found.terms.device)
    assert (ring_folder / "gate.sock").is_socket()
    kubelet.ended()
    folders.look(LOOK_US)
    assert ["detector"] == boxes.look().gone


def test_a_monitor_that_starts_again_finds_what_is_there_and_removes_what_is_not(
    folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes
) -> None:
    kubelet.label(text)
    kubelet.volumes()
    folders.look(0)
    (root / "gone").symlink_to(kubelet.ring(OTHER))
    (root / "another").mkdir()

    PodFolders(kubelet.pods, root).look(0)

    assert ["another", "detector"] == sorted(path.name for path in root.iterdir())


def test_a_pod_made_again_takes_the_name_over(folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes) -> None:
    kubelet.label(text)
    kubelet.volumes()
    folders.look(0)
    kubelet.label(text, OTHER)
    kubelet.volumes(OTHER)
    kubelet.ended()

    folders.look(LOOK_US)

    assert kubelet.ring(OTHER) == (root / "detector").readlink()


def test_pods_of_others_are_left_alone(folders: PodFolders, kubelet: Kubelet, root: Path) -> None:
    (kubelet.pods / UID / "volumes" / "kubernetes.io~empty-dir" / "cache").mkdir(parents=True)
    kubelet.volumes(OTHER)
    kubelet.label(b"", OTHER)  # of the profile, and asks for nothing of ours

    folders.look(0)

    assert ([], {}) == (list(root.iterdir()), folders.counts)
    assert [] == list(kubelet.ring(OTHER).iterdir())


def test_labels_that_cannot_be_read_are_counted_once(folders: PodFolders, kubelet: Kubelet, root: Path) -> None:
    kubelet.volumes()
    kubelet.label(b'{"container": 7}')

    folders.look(0)
    folders.look(LOOK_US)

    assert ([], {"pod_labels_malformed": 1}) == (list(root.iterdir()), folders.counts)


def test_what_a_container_puts_in_the_place_of_the_labels_is_replaced_and_not_followed(
    folders: PodFolders, kubelet: Kubelet, root: Path, text: bytes, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (kubelet.volumes() / "container.json").symlink_to(precious)
    kubelet.label(text)

    folders.look(0)

    assert "kept" == precious.read_text()
    assert text == (root / "detector" / "container.json").read_bytes()
    assert not (kubelet.ring() / "container.json").is_symlink()


@pytest.mark.parametrize("target", ["/etc", f"/x/../etc/{UID}/{POD_RING}", f"/x/{UID}/volumes/other"])
def test_no_other_link_is_a_container(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)

    assert not is_box(tmp_path / "link")


def test_a_link_to_a_link_is_no_container(kubelet: Kubelet, tmp_path: Path) -> None:
    kubelet.ring().parent.mkdir(parents=True)
    kubelet.ring().symlink_to("/etc")
    (tmp_path / "link").symlink_to(kubelet.ring())

    assert not is_box(tmp_path / "link")


def test_the_kubelets_folder_must_be_there(root: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        PodFolders(tmp_path / "nowhere", root).look(0)


def test_the_volumes_are_those_that_the_policy_makes() -> None:
    policy = str(named("demo", "MutatingAdmissionPolicy", "injection.laxity.dev")["spec"]["mutations"])

    assert f'"{Path(POD_RING).name}"' in policy
    assert f'"{Path(LABELS).parent.name}"' in policy
    assert all(f'"path": "{name}"' in policy for name in (Path(LABELS).name, "namespace", "name"))
