"""The node-list: who is alive, and per deadline class the ordered list of what each device can still promise."""
