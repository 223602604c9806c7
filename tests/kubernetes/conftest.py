"""What only tests of Kubernetes share."""

from tests.kubernetes.installed import installed

__all__ = ["installed"]
