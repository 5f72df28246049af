"""`depthbench data`: prepare, verify and describe corpora."""

from __future__ import annotations

import argparse
from pathlib import Path

from depthbench.errors import UserError
from depthbench.quantities import whole_number
from depthbench.verbs._text import size

PREPARE = """\
examples:
  depthbench data prepare embedded
  depthbench data prepare text --source notes/*.md book.txt.gz --tokenizer bpe-512 --seq-len 128
  depthbench data prepare text --source crawl.jsonl.zst --field content --out corpora/crawl
  depthbench data prepare fineweb-edu --size 400m --max-tokens 9B
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments: one of three actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{prepare,verify,info}")

    prepare = actions.add_parser("prepare", help="make a corpus", epilog=PREPARE, formatter_class=argparse.RawDescriptionHelpFormatter)
    prepare.add_argument("corpus", choices=["embedded", "text", "fineweb-edu"], help="embedded: the running Python's own source")
    prepare.add_argument("--size", metavar="NAME", help="take tokenizer, T and held-out tokens from a size (default: nano)")
    prepare.add_argument("--tokenizer", metavar="NAME", help="bpe-N (trained on the corpus), olmo, or the path of a tokenizer.json")
    prepare.add_argument("--eot", metavar="TOKEN", help="the end-of-text token of a tokenizer.json that has an unusual one")
    prepare.add_argument("--seq-len", metavar="T", help="predictions per block; a block holds T + 1 tokens")
    prepare.add_argument(
        "--source", nargs="+", action="extend", metavar="PATH", help="files, folders, globs or URLs (.txt .md .jsonl .parquet, .gz .zst)"
    )
    prepare.add_argument(
        "--field", "--column", default="text", metavar="NAME", help="field of .jsonl or column of .parquet with the text (default: text)"
    )
    prepare.add_argument("--val-tokens", metavar="N", help="hold out at least N predictions")
    prepare.add_argument("--val-fraction", type=float, metavar="X", help="hold out this share of the documents, in place of --val-tokens")
    prepare.add_argument("--max-tokens", metavar="N", help="stop after the document that reaches N tokens")
    prepare.add_argument("--workers", type=int, metavar="N", help="threads that tokenise (default: one per core)")
    prepare.add_argument("--out", type=Path, metavar="DIR", help="corpus folder (default: one by name under $DEPTHBENCH_DATA)")
    prepare.add_argument("--force", action="store_true", help="replace a corpus that was made otherwise")

    verify = actions.add_parser("verify", help="check every byte of a corpus against its checksums")
    verify.add_argument("corpus", help="a corpus folder, or the name of one under $DEPTHBENCH_DATA")

    info = actions.add_parser("info", help="what a corpus holds; without a name, which corpora there are")
    info.add_argument("corpus", nargs="?", help="a corpus folder, or the name of one under $DEPTHBENCH_DATA")


def run(args: argparse.Namespace) -> int:
    """Carry out one action; 0, or a UserError for what the user can mend."""
    return {"prepare": _prepare, "verify": _verify, "info": _info}[args.action](args)


def _prepare(args: argparse.Namespace) -> int:
    from depthbench.corpora import prepare
    from depthbench.corpora.places import usual_folder
    from depthbench.corpora.tokenizers import check_name
    from depthbench.shapes import size_named

    chosen = size_named(args.size or "nano")
    tokenizer = args.tokenizer or chosen.tokenizer
    check_name(tokenizer)
    seq_len = _count(args.seq_len, "--seq-len", chosen.seq_len)
    sized = args.val_fraction is None and (args.size or args.corpus == "embedded")
    val_tokens = _count(args.val_tokens, "--val-tokens", chosen.val_tokens if sized else 0)
    out = args.out or usual_folder(args.corpus, tokenizer=tokenizer, seq_len=seq_len, val_tokens=val_tokens)
    card = prepare(
        args.corpus,
        tokenizer=tokenizer,
        block_length=seq_len + 1,
        out=out,
        sources=args.source or (),
        field=args.field,
        eot=args.eot,
        val_fraction=args.val_fraction,
        val_tokens=val_tokens,
        max_tokens=_count(args.max_tokens, "--max-tokens", None),
        workers=args.workers,
        force=args.force,
    )
    print(describe(card))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from depthbench.corpora import verify
    from depthbench.corpora.places import find_corpus

    card = verify(find_corpus(args.corpus))
    files = len(card.train.chunks) + len(card.val.chunks)
    print(f"{card.folder}: {files} chunks, {card.tokens_used:,} tokens, every byte as it was written")
    return 0


def _info(args: argparse.Namespace) -> int:
    from depthbench.corpora import read_card
    from depthbench.corpora.places import corpora_root, find_corpus, prepared

    if args.corpus:
        print(describe(read_card(find_corpus(args.corpus))))
        return 0
    folders = prepared()
    if not folders:
        print(f"no corpora under {corpora_root()}; `depthbench data prepare embedded` makes one")
    for folder in folders:
        try:
            card = read_card(folder)
            print(f"{folder.name}: {card.description}; {card.tokens_used:,} tokens of {card.tokenizer}, T = {card.seq_len}")
        except UserError as error:
            print(f"{folder.name}: {error}")
    return 0


def describe(card) -> str:
    """A card as a few lines of text."""
    crossing = "the loss crosses documents" if card.crosses_documents else "the loss stays within documents"
    lines = [
        f"corpus       {card.corpus}: {card.description}",
        f"folder       {card.folder}",
        f"tokenizer    {card.tokenizer}, {card.vocab_size:,} tokens, sha256 {card.tokenizer_sha256[:16]}",
        f"blocks       {card.block_length:,} tokens (T = {card.seq_len:,}), stride {card.block_length:,}; {crossing}",
        f"             {'documents':>11}{'text':>12}{'tokens in':>16}{'used':>16}{'dropped':>9}{'blocks':>12}{'chunks':>8}",
    ]
    for name in ("train", "val"):
        split = card.split(name)
        counts = f"{split.documents:>11,}{size(split.bytes):>12}{split.tokens_in:>16,}{split.tokens_used:>16,}"
        lines.append(f"  {name:<11}{counts}{split.tokens_dropped:>9,}{split.blocks:>12,}{len(split.chunks):>8,}")
    lines += [
        f"unigram      {card.unigram_entropy:.4f} nats per token; the held-out predictions cost {card.val_unigram_loss:.4f} under it",
        f"fingerprint  {card.fingerprint}",
        f"made         {card.created_at} with " + ", ".join(f"{name} {number}" for name, number in card.versions.items()),
    ]
    return "\n".join(lines)


def _count(text: str | None, option: str, default: int | None) -> int | None:
    return default if text is None else whole_number(text, option)
