"""Progress of probes: a bar with the time left at a terminal, a line per probe elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from depthbench.probes.base import Progress

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed} < {remaining}]"


@contextmanager
def shown(title: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """Shows how far what is called ``title`` is, on standard error or ``stream``; yields what is to be told the fraction done."""
    stream = stream or sys.stderr
    if stream.isatty():
        with tqdm(total=1.0, desc=title, bar_format=FORMAT, file=stream, dynamic_ncols=True) as bar:
            yield lambda done: bar.update(done - bar.n)
        return
    began = time.perf_counter()
    yield lambda done: None
    print(f"{title}: {time.perf_counter() - began:.1f} s", file=stream, flush=True)
