"""A neighbour that declared nothing: keeps one processor core busy, all of it, until it is killed."""

import os
import sys

if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    while True:
        pass
