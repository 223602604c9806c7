"""The simulator: traces, the placer's own decisions in virtual time over them, and what came of it."""

REQUESTS_FILE, NODES_FILE = "requests.jsonl", "nodes.jsonl"
"""What `laxity ledger export` writes and the simulator reads: a RequestRecord, a NodeFacts a line (messages.md)."""
