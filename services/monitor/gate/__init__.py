"""The gate of a node, a process beside its monitor: one task at a time on a device, earliest deadline first."""
