"""The demo: a cluster, a dozen requests, a noisy neighbour, and an independent look at what came over the bus."""
