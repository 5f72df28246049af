"""How long a newcomer waits for the first answer: whole processes, wall time, best and median.

python benchmarks/startup.py [--times 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

TARGET_S = 0.7
COMMANDS = (["--help"], ["shapes"], ["shapes", "--size", "1600m", "--json"], ["data", "--help"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args()
    for command in COMMANDS:
        seconds = []
        for _ in range(args.times):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "depthbench", *command], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds)
        name = "depthbench " + " ".join(command)
        print(f"{name:<40} median {median:.3f} s, best {min(seconds):.3f} s, {median / TARGET_S:.2f} of the {TARGET_S} s allowed")


if __name__ == "__main__":
    main()
