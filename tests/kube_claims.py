"""Claims, slices and classes of dynamic resource allocation as the API has them, for tests of what reads them."""

from __future__ import annotations

from typing import Any

DRIVER = "gpu.nvidia.com"
GROUP = "/apis/resource.k8s.io/v1"


def claim(name: str, *, of: str = DRIVER, namespace: str = "shop") -> dict[str, Any]:
    """Asks for one device of the class that is named as the driver."""
    requests = [{"name": "gpu", "exactly": {"deviceClassName": of}}]
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"devices": {"requests": requests}}}


def allocation(*devices: str, pool: str = "n1", driver: str = DRIVER, **more: Any) -> dict[str, Any]:
    """For the status of a claim, as kube-scheduler writes it."""
    results = [{"request": "gpu", "driver": driver, "pool": pool, "device": each, **more} for each in devices]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [pool]}]}
    return {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}


def given(name: str, *devices: str, **more: Any) -> dict[str, Any]:
    return {**claim(name), "status": {"allocation": allocation(*devices, **more)}}


def slice_of(
    node: str, uuids: dict[str, str | None], *, driver: str = DRIVER, generation: int = 1, name: str = ""
) -> dict[str, Any]:
    """Uuids by device; a part that is yet to be made says ``parent:UUID``; None says nothing."""
    spec = {
        "driver": driver,
        "nodeName": node,
        "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
        "devices": [{"name": device, "attributes": _attributes(uuid)} for device, uuid in uuids.items()],
    }
    return {"metadata": {"name": name or f"{node}-{driver}"}, "spec": spec}


def _attributes(uuid: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"type": {"string": "gpu"}}
    if uuid is not None:
        kind, _, parent = uuid.partition("parent:")
        found["parentUUID" if parent else "uuid"] = {"string": parent or kind}
    return found


def device_class(name: str = DRIVER, resource: str | None = None, driver: str = DRIVER) -> dict[str, Any]:
    """``resource``: it stands for this extended resource."""
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]}
    return {"metadata": {"name": name}, "spec": spec | ({"extendedResourceName": resource} if resource else {})}
