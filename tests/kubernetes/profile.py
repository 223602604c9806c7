"""The configuration of a kube-scheduler that asks a bridge: one profile, every pod of it, every node."""

from __future__ import annotations

from tests.kubernetes.api import Json


def profile(extender: str, http_timeout: str = "5s") -> Json:
    """As k8s/ has it; ``extender`` is where the bridge listens."""
    ignored = {"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "NodeResourcesFitArgs"}
    ignored |= {"ignoredResourceGroups": ["laxity.dev"]}  # type: ignore[dict-item]
    return {
        "percentageOfNodesToScore": 100,
        "profiles": [
            {
                "schedulerName": "laxity",
                "pluginConfig": [{"name": "NodeResourcesFit", "args": ignored}],
            }
        ],
        "extenders": [
            {
                "urlPrefix": extender,
                "filterVerb": "filter",
                "bindVerb": "bind",
                "nodeCacheCapable": True,
                "ignorable": False,
                "httpTimeout": http_timeout,
            }
        ],
    }
