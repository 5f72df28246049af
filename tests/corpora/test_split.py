import hashlib

import pytest

from depthbench.corpora.split import SHARE, SHARE_OF_MANY, blocks_for, choose_fraction, hash_of
from depthbench.errors import UserError


def choose(hashes, lengths, **options):
    return choose_fraction(hashes, lengths, **{"block_length": 10, "predictions": 0, "fraction": None, "whole": True} | options)


def held_out(hashes, lengths, fraction):
    return sum(n for h, n in zip(hashes, lengths, strict=True) if h < fraction)


def test_the_hash_is_the_leading_bits_of_the_sha256():
    assert hash_of(b"document") == pytest.approx(int(hashlib.sha256(b"document").hexdigest(), 16) / 2**256, abs=2**-52)
    values = [hash_of(str(i).encode()) for i in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert sum(value < 0.25 for value in values) == pytest.approx(500, abs=80)


@pytest.mark.parametrize(("predictions", "blocks"), [(0, 1), (1, 1), (9, 1), (10, 2), (18, 2), (19, 3)])
def test_blocks_for_predictions(predictions, blocks):
    assert blocks_for(predictions, 10) == blocks


def test_the_fraction_is_the_smallest_that_holds_enough():
    hashes = [hash_of(str(i).encode()) for i in range(100)]
    lengths = [10 + i % 7 for i in range(100)]
    for predictions in (100, 250, 400):
        needed = blocks_for(predictions, 10) * 10
        fraction = choose(hashes, lengths, predictions=predictions)
        assert held_out(hashes, lengths, fraction) >= needed
        last = max(h for h in hashes if h < fraction)
        assert held_out(hashes, lengths, last) < needed


def test_the_usual_share_holds_where_it_is_enough():
    hashes = [i / 1000 for i in range(1000)]
    assert choose(hashes, [10] * 1000, predictions=90) == SHARE
    assert choose(hashes, [10] * 1000, predictions=9, whole=False) == SHARE_OF_MANY
    assert choose(hashes, [10] * 1000, predictions=9 * 100, whole=False) > 0.09


def test_a_given_fraction_stands():
    assert choose([0.1, 0.6, 0.9], [100, 100, 100], fraction=0.37, predictions=9) == 0.37


@pytest.mark.parametrize(
    ("hashes", "lengths", "options", "message"),
    [
        ([0.1, 0.2], [4, 5], {}, "has 9 tokens, fewer than one block of 10"),
        ([0.1, 0.1], [50, 50], {}, "a single document"),
        ([0.1, 0.2], [7, 8], {}, "holding out 10 tokens would take more than half of the corpus's 15"),
        ([0.1, 0.2], [70, 80], {"predictions": 69}, "holding out 80 tokens would take more than half of the corpus's 150"),
    ],
)
def test_a_corpus_that_is_too_short(hashes, lengths, options, message):
    with pytest.raises(UserError, match=message):
        choose(hashes, lengths, **options)
