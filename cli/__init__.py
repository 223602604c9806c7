"""The top layer: the ``laxity`` command, the embedded cluster, the demo and the generated documents."""
