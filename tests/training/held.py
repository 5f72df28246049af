"""A dataset that hangs where it is told to; apart, so that a loader process imports nothing else."""

import time

from depthbench.corpora import BlockDataset


class Held(BlockDataset):
    """Blocks of which ``block`` does not come before the file ``released`` exists."""

    block, released = None, None

    def __getitem__(self, index):
        while index == self.block and not self.released.exists():
            time.sleep(0.02)
        return super().__getitem__(index)
