"""The drivers that make placements run: one module each behind the protocol of ``base``; decisions live in the core."""
