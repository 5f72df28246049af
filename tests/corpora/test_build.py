import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader
from tokenizers import Tokenizer

from depthbench.corpora import build, chunks, prepare, read_card
from depthbench.corpora.card import SPLITS
from depthbench.errors import UserError
from tests.corpora.conftest import BLOCK, TOKENIZER, made_up_documents, write_jsonl


def make(out, source, **options):
    options = {"tokenizer": TOKENIZER, "block_length": BLOCK, "val_fraction": 0.2, "progress": False} | options
    return prepare("text", out=out, sources=[str(source)], **options)


def split_by_hand(card, documents):
    """{split: (documents, ids of all of them joined)}, by the rules and nothing of the product's but its tokenizer file."""
    tokenizer = Tokenizer.from_file(str(card.folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    by_hand = {"train": ([], []), "val": ([], [])}
    for text in documents:
        number = int(hashlib.sha256(text.encode()).hexdigest()[:13], 16) / 16**13
        members, ids = by_hand["val" if number < card.val_fraction else "train"]
        members.append(text)
        ids += [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("<|endoftext|>")]
    return by_hand


def read_back(card, split):
    return list(StreamingDataset(str(card.folder / split), item_loader=TokensLoader(block_size=card.block_length)))


def test_litdata_reads_the_blocks_that_the_rules_give(ready, documents):
    assert len(ready.train.chunks) > 5
    for name, (members, ids) in split_by_hand(ready, documents).items():
        split, blocks = ready.split(name), read_back(ready, name)
        whole = len(ids) // BLOCK
        assert [block.tolist() for block in blocks] == [ids[i * BLOCK : (i + 1) * BLOCK] for i in range(whole)]
        assert {block.dtype for block in blocks} == {np.dtype(np.uint16)}
        assert (split.documents, split.bytes) == (len(members), sum(len(text.encode()) for text in members))
        assert (split.tokens_in, split.tokens_used, split.tokens_dropped) == (len(ids), whole * BLOCK, len(ids) % BLOCK)


def test_the_card_adds_up(ready, documents):
    assert ready.documents == len(documents)
    assert ready.bytes == sum(len(text.encode()) for text in documents)
    assert ready.tokens_in == ready.tokens_used + ready.tokens_dropped
    assert ready.tokens_used == sum(ready.blocks.values()) * BLOCK
    assert (ready.block_length, ready.seq_len, ready.vocab_size) == (BLOCK, BLOCK - 1, 300)
    assert ready.crosses_documents
    assert ready.tokenizer_sha256 == hashlib.sha256((ready.folder / "tokenizer.json").read_bytes()).hexdigest()
    for name in SPLITS:
        for chunk in ready.split(name).chunks:
            content = (ready.folder / chunk.file).read_bytes()
            assert (chunk.bytes, chunk.sha256) == (len(content), hashlib.sha256(content).hexdigest())
            assert 0 < chunk.blocks * BLOCK <= 1000
    written = json.loads((ready.folder / "card.json").read_text())
    assert written["blocks"] == ready.blocks
    assert written["tokens_in"] == ready.tokens_in
    assert read_card(ready.folder) == ready
    assert sorted(path.name for path in ready.folder.iterdir()) == ["card.json", "tokenizer.json", "train", "val"]


def test_entropies_are_those_of_the_formulas(ready):
    counts = Counter(int(i) for block in read_back(ready, "train") for i in block)
    total = sum(counts.values())
    assert ready.unigram_entropy == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()), rel=1e-12)
    targets = [int(i) for block in read_back(ready, "val") for i in block[1:]]
    loss = -sum(math.log((counts[i] + 1) / (total + ready.vocab_size)) for i in targets) / len(targets)
    assert ready.val_unigram_loss == pytest.approx(loss, rel=1e-12)


def test_the_fingerprint_follows_the_data_and_nothing_else(ready, jsonl, documents, tmp_path):
    same = {"chunk_tokens": 1000}
    assert {make(tmp_path / f"{n}", jsonl, workers=n, **same).fingerprint for n in (1, 3)} == {ready.fingerprint}
    changed = write_jsonl(tmp_path / "changed.jsonl", [*documents[:150], documents[150] + "more", *documents[151:]])
    others = [
        make(tmp_path / "text", changed, **same),
        make(tmp_path / "block", jsonl, block_length=BLOCK + 1, **same),
        make(tmp_path / "bpe", jsonl, tokenizer="bpe-301", **same),
        make(tmp_path / "split", jsonl, **same | {"val_fraction": 0.3}),
    ]
    assert len({ready.fingerprint, *(card.fingerprint for card in others)}) == 5


def test_identical_documents_lie_in_the_same_split(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", made_up_documents(40) * 3)
    card = make(tmp_path / "out", source)
    assert card.train.documents % 3 == card.val.documents % 3 == 0
    assert card.train.documents + card.val.documents == 120


def test_enough_is_held_out_for_the_predictions_asked(tmp_path, jsonl):
    card = make(tmp_path / "out", jsonl, val_fraction=None, val_tokens=1000)
    assert 1000 <= card.val.blocks * (BLOCK - 1) < 2000
    few = make(tmp_path / "few", jsonl, val_fraction=None)
    assert few.val_fraction == 0.05


def test_the_fraction_may_be_chosen_on_the_beginning(tmp_path, jsonl, documents, monkeypatch):
    monkeypatch.setattr(build, "PROBE", 3000)
    card = make(tmp_path / "out", jsonl, val_fraction=None, val_tokens=500)
    by_hand = split_by_hand(card, documents)
    assert [card.split(name).tokens_in for name in SPLITS] == [len(by_hand[name][1]) for name in SPLITS]
    assert card.val.blocks * (BLOCK - 1) >= 500


def test_max_tokens_ends_with_the_document_that_reaches_it(tmp_path, jsonl, documents):
    card = make(tmp_path / "out", jsonl, max_tokens=5000)
    lengths = [len(split_by_hand(card, [text])[name][1]) for text in documents for name in SPLITS]
    reached = np.cumsum(lengths)
    assert card.tokens_in == reached[np.searchsorted(reached, 5000)]


def test_large_vocabularies_are_stored_in_32_bits(tmp_path, jsonl):
    from tests.corpora.test_tokenizers import word_level

    path = word_level(tmp_path / "t.json", words=[f"w{i}" for i in range(2**16)])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"w65535 w{i} w{i + 1}"}) + "\n" for i in range(60)))
    card = make(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=str(path), block_length=4)
    assert [block.tolist() for block in read_back(card, "train")][0][1:] != []
    blocks = np.stack(read_back(card, "train"))
    assert blocks.dtype == np.int32
    assert (blocks[:, 0] == 65537).all()
    assert (blocks[:, 3] == 1).all()


def test_text_that_spells_the_end_of_text_token_does_not_end_a_document(tmp_path):
    documents = [f"{text}<|endoftext|>again" for text in made_up_documents(30)]
    card = make(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", documents), block_length=2)
    ends = sum((np.stack(read_back(card, name)) == card.eot_id).sum() for name in SPLITS)
    assert len(documents) - 2 <= ends <= len(documents)  # each split may drop its last token


def test_it_is_written_the_same_in_any_training_process(tmp_path, jsonl, ready, monkeypatch):
    for name, value in (("WORLD_SIZE", "4"), ("GLOBAL_RANK", "3"), ("RANK", "3")):
        monkeypatch.setenv(name, value)
    card = make(tmp_path / "out", jsonl, chunk_tokens=1000)
    assert (card.fingerprint, card.train.chunks) == (ready.fingerprint, ready.train.chunks)


def test_the_same_call_again_changes_nothing(tmp_path, jsonl):
    card = make(tmp_path / "out", jsonl)
    before = {path: path.stat().st_mtime_ns for path in card.folder.rglob("*")}
    assert asdict(make(tmp_path / "out", jsonl)) == asdict(card)
    assert {path: path.stat().st_mtime_ns for path in card.folder.rglob("*")} == before


def test_another_call_needs_force(tmp_path, jsonl):
    card = make(tmp_path / "out", jsonl)
    with pytest.raises(UserError, match="holds a corpus made otherwise .T = 16, tokenizer bpe-300, 1 file.: add --force"):
        make(tmp_path / "out", jsonl, block_length=9)
    assert read_card(tmp_path / "out") == card
    assert make(tmp_path / "out", jsonl, block_length=9, force=True).block_length == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_a_damaged_corpus_is_made_again(tmp_path, jsonl):
    card = make(tmp_path / "out", jsonl)
    (card.folder / card.train.chunks[0].file).unlink()
    assert make(tmp_path / "out", jsonl).fingerprint == card.fingerprint
    assert (card.folder / card.train.chunks[0].file).is_file()


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_corpus_is_left_alone(tmp_path, jsonl, force):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="precious exists and is not a corpus: choose another place with --out"):
        make(tmp_path / "precious", jsonl, force=force)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_as_good_as_none(tmp_path, jsonl):
    (tmp_path / "out").mkdir()
    assert make(tmp_path / "out", jsonl).blocks["train"] > 0


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "the corpus is empty: no document of 1 file holds text"),
        (["", ""], {}, "the corpus is empty"),
        (["hello", "world"], {"block_length": 200}, r"the corpus has 1\d tokens, fewer than one block of 200"),
        (["hello " * 99] * 5, {"block_length": 9}, "the corpus is a single document"),
        (["hello " * 9] * 5 + ["world"], {"block_length": 257}, "would take more than half of the corpus's"),
        (["a b c d e f g h"] + ["x"] * 50, {"block_length": 8, "val_fraction": 1e-9}, "the val split holds 0 documents"),
        (["a b c d e f g h", "x y z"] * 9, {"block_length": 8, "val_fraction": 1 - 1e-9}, "the train split holds 0 documents"),
        (["a b c"], {"val_fraction": 1.5}, "--val-fraction is 1.5: it must lie between 0 and 1"),
        (["a b c"], {"val_fraction": math.nan}, "--val-fraction is nan"),
        (["a b c"], {"block_length": 1}, "--seq-len is 0: it must be at least 1"),
        (["a b c"], {"workers": 0}, "--workers is 0"),
        (["a b c"], {"max_tokens": 0}, "--max-tokens is 0"),
    ],
)
def test_what_makes_no_corpus_is_refused_and_leaves_nothing(tmp_path, documents, options, message):
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    with pytest.raises(UserError, match=message) as caught:
        make(tmp_path / "out", source, **{"tokenizer": "bpe-257"} | options)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"a.jsonl", ".out.lock"}


def test_a_place_that_cannot_be_written(tmp_path, jsonl):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/out .*: choose another place with --out"):
        make(tmp_path / "file" / "out", jsonl)


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, jsonl, monkeypatch):
    def full(self, raw_data, filename, compress=None):
        if self._chunk_index == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, raw_data, filename, compress)

    write = chunks.BinaryWriter.write_chunk_to_file
    monkeypatch.setattr(chunks.BinaryWriter, "write_chunk_to_file", full)
    with pytest.raises(UserError, match="the disk is full: cannot write .*out: free some space"):
        make(tmp_path / "out", jsonl, chunk_tokens=500)
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


def test_ctrl_c_leaves_nothing(tmp_path, jsonl, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(build.SplitWriter, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", jsonl)
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


CHILD = """
import os, sys
from depthbench.corpora import build, prepare
check = build._check_splits
def halt(*args):
    print("written", flush=True)
    sys.stdin.readline()
    check(*args)
build._check_splits = halt
prepare("text", tokenizer="bpe-300", block_length=17, out=sys.argv[1], sources=[sys.argv[2]], val_fraction=0.2, progress=False)
os.wait() if os.fork() else os._exit(0)  # as a loader's workers are started
"""


def start(out, source):
    """A process that prepares a corpus; with all chunks written it prints a line and waits for one."""
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out), str(source)], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )


def test_a_kill_leaves_nothing_that_looks_whole_and_the_next_call_cleans_up(tmp_path, jsonl):
    out = tmp_path / "out"
    child = start(out, jsonl)
    assert child.stdout.readline() == "written\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not out.exists()
    assert list((tmp_path / ".out.partial").rglob("chunk-*.bin"))
    with pytest.raises(UserError, match="out does not exist"):
        read_card(out)
    card = make(out, jsonl)
    assert read_card(out) == card
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_two_processes_at_once_make_one_corpus(tmp_path, jsonl):
    out = tmp_path / "out"
    first = start(out, jsonl)
    assert first.stdout.readline() == "written\n"
    second = start(out, jsonl)
    assert second.stderr.readline() == f"another process is preparing {out}: waiting for it\n"
    results = [process.communicate("\n", timeout=60) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), results
    assert results[0][1] == ""  # not even the tokenizers' warning to a process that forks
    assert results[1] == ("", "")  # it wrote nothing: it found the first one's
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]
    assert make(out, jsonl) == read_card(out)


def test_progress_goes_to_standard_error(tmp_path, jsonl, capsys):
    make(tmp_path / "out", jsonl, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "MB/s" in shown.err
    assert "100%" in shown.err
