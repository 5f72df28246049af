"""How fast text becomes a corpus: `python benchmarks/data_prepare.py` prints MB of text per second for the embedded corpus, bpe-2048.

Reading, tokenising and writing, as it goes on for a corpus of any length; the whole call, which includes training the BPE; and
the text per second of CPU time, which does not depend on what else the machine is doing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from depthbench.corpora import build, prepare


def main() -> None:
    started = {}
    load = build.load_tokenizer

    def timed_load(*args):
        tokenizer = load(*args)
        started["tokens"] = time.perf_counter()
        return tokenizer

    build.load_tokenizer = timed_load
    with tempfile.TemporaryDirectory() as folder:
        started["cpu"], started["all"] = time.process_time(), time.perf_counter()
        card = prepare("embedded", tokenizer="bpe-2048", block_length=257, out=Path(folder, "corpus"))
        cpu, ended = time.process_time() - started["cpu"], time.perf_counter()
    megabytes = card.bytes / 1e6
    print(f"{card.description}: {megabytes:.1f} MB, {card.tokens_in:,} tokens")
    print(f"text to chunks           {megabytes / (ended - started['tokens']):6.1f} MB/s (aim: 5)")
    print(f"with training the BPE    {megabytes / (ended - started['all']):6.1f} MB/s, {ended - started['all']:.1f} s")
    print(f"with it, per CPU second  {megabytes / cpu:6.1f} MB")


if __name__ == "__main__":
    main()
