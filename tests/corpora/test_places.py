import platform
import subprocess
import sys
from pathlib import Path

import pytest

from depthbench.corpora import corpora_root, ensure, read_card, verify
from depthbench.corpora.places import find_corpus, prepared, usual_folder
from depthbench.errors import UserError
from tests.corpora.test_tokenizers import word_level


def test_the_root(monkeypatch, tmp_path):
    monkeypatch.setenv("DEPTHBENCH_DATA", str(tmp_path))
    assert corpora_root() == tmp_path
    monkeypatch.delenv("DEPTHBENCH_DATA")
    assert corpora_root() == Path.home() / ".cache" / "depthbench" / "corpora"


def test_names_tell_apart_what_differs(tmp_path):
    def name(corpus, tokenizer="bpe-512", seq_len=128, **options):
        folder = usual_folder(corpus, tokenizer=tokenizer, seq_len=seq_len, root=tmp_path, **options)
        assert folder.parent == tmp_path
        return folder.name

    version = platform.python_version()
    assert name("embedded") == f"embedded-py{version}-bpe-512-T128"
    assert name("embedded", val_tokens=65_536) == f"embedded-py{version}-bpe-512-T128-V65536"
    assert name("fineweb-edu", "olmo", 2048, val_tokens=65_536) == "fineweb-edu-olmo-T2048"
    first, second = (str(word_level(tmp_path / f"{n}" / "tok.json")) for n in ("a", "b") if (tmp_path / n).mkdir() is None)
    assert name("text", first) == name("text", second)
    word_level(Path(second), words=("other",))
    assert name("text", first) != name("text", second)
    assert name("text", first).startswith("text-tok-")


def test_the_embedded_corpus_is_prepared_once(tmp_path):
    """The whole of it, as the first `depthbench fit` does: nano's tokenizer and held-out tokens."""
    folder = ensure("embedded", tokenizer="bpe-2048", seq_len=256, root=tmp_path, progress=False)
    assert folder == usual_folder("embedded", tokenizer="bpe-2048", seq_len=256, root=tmp_path)
    card = verify(folder)
    assert card.vocab_size == 2048
    assert card.val.blocks >= 512
    assert card.train.blocks > 10 * card.val.blocks
    assert card.tokens_dropped < 2 * 257
    assert 5 < card.unigram_entropy < 7.7
    assert card.val_unigram_loss == pytest.approx(card.unigram_entropy, abs=0.4)
    made = (folder / "card.json").stat().st_mtime_ns
    assert ensure("embedded", tokenizer="bpe-2048", seq_len=256, root=tmp_path, progress=False) == folder
    assert (folder / "card.json").stat().st_mtime_ns == made


def test_a_corpus_that_needs_the_users_decision_is_not_prepared(tmp_path):
    with pytest.raises(UserError, match=r"the text corpus is not prepared .*: run `depthbench data prepare text --source FILE --tok"):
        ensure("text", tokenizer="bpe-512", seq_len=128)
    with pytest.raises(UserError) as caught:
        ensure("fineweb-edu", tokenizer="olmo", seq_len=2048, val_tokens=4_194_304)
    command = "depthbench data prepare fineweb-edu --tokenizer olmo --seq-len 2048 --val-tokens 4194304"
    assert str(caught.value).endswith(f"run `{command}`")


def test_a_path_a_name_and_a_url(ready, monkeypatch):
    def found(corpus):
        return ensure(corpus, tokenizer="whatever", seq_len=1)

    assert found(ready.folder) == found(str(ready.folder)) == ready.folder
    monkeypatch.setenv("DEPTHBENCH_DATA", str(ready.folder.parent))
    assert found("ready") == ready.folder
    assert found("s3://bucket/corpus/") == "s3://bucket/corpus"
    assert prepared() == [ready.folder]
    assert read_card(find_corpus("ready")) == ready


def test_what_is_no_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for corpus, message in {
        "embeded": "unknown corpus 'embeded': did you mean 'embedded'",
        "folder": r"folder is not a prepared corpus \(it has no card.json\)",
        "some/where": "there is no corpus at some/where: make one with `depthbench data prepare text --source FILE --out some/where`",
    }.items():
        with pytest.raises(UserError, match=message):
            ensure(corpus, tokenizer="bpe-512", seq_len=128)


def test_cards_are_read_without_torch():
    code = "import sys, depthbench.corpora as c; c.read_card, c.ensure, c.check_compatible, c.verify; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert result.stdout == "False\n"
