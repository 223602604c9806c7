"""kube-bridge: between Kubernetes and the bus; it translates, and keeps nothing of its own."""
