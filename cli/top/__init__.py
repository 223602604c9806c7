"""``laxity top``: what is heard (seen), how it is drawn (frame), and the command with its keys."""
