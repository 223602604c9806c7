"""The services, one package each; they meet only on the bus and never import each other."""
