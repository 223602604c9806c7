"""The monitor, one per node: reads devices, containers and task rings, and says what it saw; it places nothing."""
