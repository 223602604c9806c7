"""The pure part of the placer: no loop, no clock, no chance, no log."""
