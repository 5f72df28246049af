"""The windows that probes look at: which, how many, and always the same."""

import pytest
import torch

from depthbench.errors import UserError
from depthbench.probes.windows import windows


def blocks(count, length):
    """Held-out blocks of ``length`` + 1 tokens, each token another."""
    return torch.arange(count * (length + 1)).view(count, length + 1)


def test_windows_are_distinct_pieces_of_text_and_the_same_each_time():
    held_out = blocks(300, 64)
    tokens = windows(held_out)
    assert tokens.shape == (128, 65) and tokens[:, 0].unique().numel() == 128
    assert (tokens.diff(dim=1) == 1).all()
    assert torch.equal(tokens, windows(held_out)) and torch.equal(tokens[:16], windows(held_out, 16))
    assert not torch.equal(tokens, windows(held_out, seed=1))


def test_windows_have_at_most_512_tokens_and_a_long_block_holds_several():
    tokens = windows(blocks(3, 1100))
    assert tokens.shape == (6, 513)
    assert sorted(tokens[:, 0].tolist()) == [0, 512, 1101, 1613, 2202, 2714]


def test_where_there_are_fewer_all_are_taken():
    assert sorted(windows(blocks(5, 8), length=4)[:, 0].tolist()) == [0, 4, 9, 13, 18, 22, 27, 31, 36, 40]


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    windows(blocks(5, 8))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("asked", [{"count": 0}, {"count": -1}, {"length": 9}, {"length": 0}])
def test_what_cannot_be_sampled_is_refused(asked):
    with pytest.raises(UserError):
        windows(blocks(5, 8), **asked)
