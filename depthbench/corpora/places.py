"""Where corpora lie, and `ensure`: the folder of a corpus by name, prepared where that needs no decision of the user's."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from depthbench.corpora.card import CARD, Settings
from depthbench.corpora.compatible import prepare_command
from depthbench.corpora.location import located
from depthbench.corpora.sources import CORPORA
from depthbench.errors import UserError, unknown

VAL_TOKENS = 131_072  # held-out predictions of the embedded corpus unless more or fewer are asked


def corpora_root() -> Path:
    """$DEPTHBENCH_DATA, or ~/.cache/depthbench/corpora."""
    return Path(os.environ.get("DEPTHBENCH_DATA") or "~/.cache/depthbench/corpora").expanduser()


def usual_folder(corpus: str, *, tokenizer: str, seq_len: int, val_tokens: int = VAL_TOKENS, root: Path | None = None) -> Path:
    """Where a corpus lies unless told otherwise, e.g. <root>/embedded-py3.12.1-bpe-2048-T256.

    The embedded corpus's name holds the Python version, whose source it is, and the number of held-out predictions where that is
    not the usual one: whatever makes another corpus of it.
    """
    name = [corpus]
    if corpus == "embedded":
        name.append(f"py{platform.python_version()}")
    path = Path(tokenizer)
    is_file = path.is_file()
    name.append(f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}" if is_file else tokenizer.replace(os.sep, "-"))
    name.append(f"T{seq_len}")
    if corpus == "embedded" and val_tokens != VAL_TOKENS:
        name.append(f"V{val_tokens}")
    return (root or corpora_root()) / "-".join(name)


def ensure(
    corpus: str | Path,
    *,
    tokenizer: str,
    seq_len: int,
    root: Path | None = None,
    val_tokens: int = VAL_TOKENS,
    progress: bool = True,
) -> Path | str:
    """The folder of a corpus: a corpus folder by its path or URL (used as it stands), or "embedded", "text", "fineweb-edu" in their usual
    place under ``root`` (default ``corpora_root()``).

    The embedded corpus is prepared where missing; several processes may ask at once. UserError with the prepare command where
    another one is missing. Whether it fits the run is for ``check_compatible`` to say.
    """
    if str(corpus) not in CORPORA:
        return find_corpus(corpus, root)
    corpus = str(corpus)
    folder = usual_folder(corpus, tokenizer=tokenizer, seq_len=seq_len, val_tokens=val_tokens, root=root)
    if (folder / CARD).is_file():
        return folder
    if corpus != "embedded":
        command = prepare_command(corpus, Settings(tokenizer, val_tokens=val_tokens), seq_len, out=folder if root else None)
        raise UserError(f"the {corpus} corpus is not prepared (looked in {folder}): run `{command}`")
    from depthbench.corpora.build import prepare

    prepare(corpus, tokenizer=tokenizer, block_length=seq_len + 1, out=folder, val_tokens=val_tokens, progress=progress)
    return folder


def prepared(root: Path | None = None) -> list[Path]:
    """The corpus folders under ``root``, by name."""
    root = root or corpora_root()
    return sorted(card.parent for card in root.glob(f"*/{CARD}") if not card.parent.name.startswith("."))


def find_corpus(corpus: Path | str, root: Path | None = None) -> Path | str:
    """The corpus folder of a path, a URL (as it stands), or the name of one under ``root``. UserError where there is none."""
    path = located(corpus)
    if isinstance(path, str):
        return path
    root = root or corpora_root()
    for folder in (path, root / path):
        if (folder / CARD).is_file():
            return folder
    if path.is_dir():
        raise UserError(f"{path} is not a prepared corpus (it has no {CARD}): make one with `depthbench data prepare`")
    if len(path.parts) > 1:
        raise UserError(f"there is no corpus at {path}: make one with `depthbench data prepare text --source FILE --out {path}`")
    raise unknown("corpus", str(path), [*CORPORA, *(folder.name for folder in prepared(root))])
