"""Where devices are read: one module per kind of device; what their values mean for the node is the core's part."""
