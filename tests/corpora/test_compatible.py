import argparse
import shlex
import shutil

import pytest

from depthbench.corpora import check_compatible, read_card
from depthbench.corpora.card import Settings
from depthbench.corpora.compatible import prepare_command
from depthbench.errors import UserError
from depthbench.verbs import data
from tests.corpora.test_tokenizers import word_level


def run_the_command_in(message):
    """Carry out the prepare command between the message's backticks as a shell would; the card of what it made."""
    words = shlex.split(message.split("`")[1])
    assert words[:2] == ["depthbench", "data"]
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    assert data.run(parser.parse_args(words[2:])) == 0


def refusal(card, **run):
    with pytest.raises(UserError) as caught:
        check_compatible(card, **{"vocab_size": 300, "seq_len": 16} | run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_fits_is_accepted(ready):
    for tokenizer in (None, "bpe-300", ready.tokenizer_sha256, str(ready.folder / "tokenizer.json")):
        check_compatible(ready, vocab_size=300, seq_len=16, tokenizer=tokenizer, val_tokens=ready.val.blocks * 16)
    check_compatible(ready, vocab_size=50280, seq_len=16)


def test_another_t(ready, corpora_of_their_own, capsys):
    message = refusal(ready, seq_len=32)
    assert f"corpus {ready.folder} holds blocks of T = 16 predictions, the run asks for T = 32: run `depthbench data prepare" in message
    run_the_command_in(message)
    made = capsys.readouterr().out.split("folder")[1].split()[0]
    check_compatible(read_card(made), vocab_size=300, seq_len=32, tokenizer="bpe-300")
    shutil.rmtree(made)


def test_another_tokenizer(ready, tmp_path, capsys):
    message = refusal(ready, tokenizer="bpe-290")
    assert "was made with the tokenizer bpe-300, the run asks for bpe-290: run `" in message
    run_the_command_in(message)
    made = capsys.readouterr().out.split("folder")[1].split()[0]
    check_compatible(read_card(made), vocab_size=290, seq_len=16, tokenizer="bpe-290")
    shutil.rmtree(made)
    other = str(word_level(tmp_path / "other.json"))
    assert f"the run asks for {other}: run `" in refusal(ready, tokenizer=other)
    assert "use the corpus that the model was trained with" in refusal(ready, tokenizer="0" * 64)


def test_a_vocabulary_that_is_too_small(ready):
    message = refusal(ready, vocab_size=280)
    assert "its tokenizer bpe-300 has 300 tokens, the model's vocabulary only 280: give the model a larger vocabulary" in message
    assert "--tokenizer bpe-280" in message
    assert "--tokenizer bpe-257" in refusal(ready, vocab_size=64)


def test_too_few_held_out_tokens(copy, capsys):
    card = read_card(copy)
    have = card.val.blocks * 16
    message = refusal(card, val_tokens=have + 500)
    assert f"holds out {have:,} predictions, the run validates on {have + 500:,}: run `" in message
    run_the_command_in(message)
    check_compatible(read_card(copy), vocab_size=300, seq_len=16, val_tokens=have + 500)


def test_commands_are_quoted_and_repeat_every_setting():
    settings = Settings("/my toks/t.json", ("/data/a b.jsonl", "/data/*.txt"), "body", "[END]", 0.25, 100, 5000)
    words = shlex.split(prepare_command("text", settings, 64))
    assert words[:4] == ["depthbench", "data", "prepare", "text"]
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    args = parser.parse_args(words[2:])
    assert (args.source, args.tokenizer, args.seq_len) == (["/data/a b.jsonl", "/data/*.txt"], "/my toks/t.json", "64")
    assert (args.field, args.eot, args.val_fraction, args.val_tokens, args.max_tokens) == ("body", "[END]", 0.25, "100", "5000")
    assert prepare_command("embedded", Settings("bpe-512"), 128) == "depthbench data prepare embedded --tokenizer bpe-512 --seq-len 128"
