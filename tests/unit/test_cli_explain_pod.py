"""How a pod is named on the command line."""

from __future__ import annotations

import pytest

from cli.explain_pod import named
from cli.output import CommandError
from shared.messages import PodsQuery


@pytest.mark.parametrize(
    ("what", "namespace", "query"),
    [
        ("pod/web", None, PodsQuery(name="web")),
        ("pods/web", "shop", PodsQuery(name="web", namespace="shop")),
        ("pod/shop/web", None, PodsQuery(name="web", namespace="shop")),
        ("pod/shop/web", "shop", PodsQuery(name="web", namespace="shop")),
        ("web", None, None),
        ("node-1/0", None, None),
        ("pod/a/b/c", None, None),
    ],
)
def test_a_pod_is_named_as_kubectl_names_it(what: str, namespace: str | None, query: PodsQuery | None) -> None:
    assert query == named(what, namespace)


@pytest.mark.parametrize(("what", "namespace"), [("web", "shop"), ("pod/shop/web", "bank")])
def test_a_namespace_that_fits_nothing_is_an_error(what: str, namespace: str) -> None:
    with pytest.raises(CommandError, match="--namespace: found"):
        named(what, namespace)
