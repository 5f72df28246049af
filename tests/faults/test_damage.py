"""Bytes that change on the disk: named, never read as other rows, never deleted, and the rest of the record stays readable."""

import os
from pathlib import Path

import pytest

from depthbench.errors import UserError
from depthbench.store import damage, segments
from depthbench.store.folder import SEALED, SEGMENTS, Segment
from depthbench.store.reader import Store, read_run
from depthbench.store.seal import seal_run
from depthbench.store.writer import RunWriter


def rows(steps):
    return [{"step": step, "name": "x", "value": float(step)} for step in steps]


def record(folder, flushes=3, **attempt):
    """A live run of ten rows a flush, let go of."""
    writer = RunWriter(folder, {"arch": "pre_ln"}, flush_every_s=3600, **attempt)
    for flush in range(flushes):
        writer.add("scalars", rows(range(10 * flush, 10 * flush + 10)))
        writer.drain()
    writer.close()


def segment(folder, table, number=0) -> Path:
    return sorted((folder / SEGMENTS).glob(f"{table}-*"))[number]


def flip(path, position):
    """One bit, in place, as a bad disk does: neither size nor time of change tell of it. Returns the bytes that were there."""
    whole, stat = path.read_bytes(), path.stat()
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(bytes([whole[position] ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return whole


def steps(folder):
    return Store(folder.parent).rows("scalars", [folder.name])["step"].tolist()


def problem(folder):
    runs = Store(folder.parent).runs().set_index("run_id")
    assert "\n" not in (runs.loc[folder.name, "problem"] or "")
    return runs.loc[folder.name, "problem"]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "heartbeat"}


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch):
    """As in a process that has read nothing yet."""
    monkeypatch.setattr(damage, "_verdicts", {})


# ---- a segment


HURT = {
    "one bit of the last byte": lambda path: flip(path, path.stat().st_size - 1),
    "one bit of the rows": lambda path: flip(path, 100),
    "cut short": lambda path: os.truncate(path, 300),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize(
    ("hurt", "has_checksum"), [*((hurt, True) for hurt in HURT), ("one bit of the last byte", False), ("empty", False)]
)
def test_a_damaged_segment_is_left_out_and_named(tmp_path, monkeypatch, hurt, has_checksum):
    hurt = HURT[hurt]
    for name in ("r", "good"):
        record(tmp_path / name)
    path = segment(tmp_path / "r", "scalars", 1)
    if not has_checksum:  # as older versions named them
        path = path.rename(path.with_name(path.name.split(".")[0] + ".parquet"))
    assert len(steps(tmp_path / "r")) == 30
    hurt(path)
    monkeypatch.setattr(damage, "_verdicts", {})
    assert steps(tmp_path / "r") == [*range(10), *range(20, 30)] and steps(tmp_path / "good") == list(range(30))
    runs = Store(tmp_path).runs().set_index("run_id")
    assert runs["n_scalars"].to_dict() == {"r": 20, "good": 30} and set(runs["status"]) == {"running"}
    assert f"run r is read without segments/{path.name}, which is damaged" in problem(tmp_path / "r") and problem(tmp_path / "good") is None
    assert read_run(tmp_path / "r")["arch"] == "pre_ln"


def test_a_store_that_has_read_the_run_sees_the_damage_and_the_mending(tmp_path):
    record(tmp_path / "r")
    store, path = Store(tmp_path), segment(tmp_path / "r", "scalars")
    assert store.runs()["problem"].tolist() == [None]
    whole, version = path.read_bytes(), store.version()
    path.write_bytes(whole[:400])
    assert path.name in store.runs()["problem"][0] and store.version() != version
    path.write_bytes(whole)
    assert store.runs()[["problem", "n_scalars"]].values.tolist() == [[None, 30]]


def test_a_segment_is_checked_once(tmp_path, monkeypatch):
    record(tmp_path / "r")
    checked = []
    monkeypatch.setattr(damage, "checksum", lambda path: checked.append(path) or Segment.parse(Path(path).name).crc)
    for _ in range(3):
        assert len(steps(tmp_path / "r")) == 30
    assert sorted(checked) == sorted(str(path) for path in (tmp_path / "r" / SEGMENTS).iterdir())


@pytest.mark.parametrize("before_the_writer", [True, False])
def test_a_writer_merges_and_seals_around_a_damaged_segment(tmp_path, monkeypatch, before_the_writer):
    """Its bytes stay, its absence is told all the while, and a whole copy in its place brings every row back, once."""
    monkeypatch.setattr(segments, "MAX_LIVE", 6)
    record(tmp_path / "r", flushes=3)
    assert len(steps(tmp_path / "r")) == 30  # every segment was found whole
    path = segment(tmp_path / "r", "scalars", 1)
    whole = flip(path, 700) if before_the_writer else None
    with RunWriter(tmp_path / "r", {"arch": "pre_ln"}, attempt=2, resumed_from_step=29, flush_every_s=3600) as writer:
        whole = whole or flip(path, 700)
        for flush in range(3, 20):
            writer.add("scalars", rows(range(10 * flush, 10 * flush + 10)))
            writer.drain()
            if flush == 12:
                monkeypatch.setattr(damage, "_verdicts", {})
                assert path.name in problem(tmp_path / "r")
                assert any(Segment.parse(name).merged for name in os.listdir(tmp_path / "r" / SEGMENTS))
    assert os.listdir(tmp_path / "r" / SEGMENTS) == [path.name] and (tmp_path / "r" / SEALED).exists()
    assert path.name in problem(tmp_path / "r")
    assert steps(tmp_path / "r") == [*range(10), *range(20, 200)]
    assert path.name in seal_run(tmp_path / "r") and path.exists()
    path.write_bytes(whole)
    assert steps(tmp_path / "r") == list(range(200)) and problem(tmp_path / "r") is None
    assert seal_run(tmp_path / "r") is None
    assert not path.exists() and steps(tmp_path / "r") == list(range(200))


def test_a_damaged_segment_may_be_deleted_beside_the_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "MAX_LIVE", 6)
    with RunWriter(tmp_path / "r", {"arch": "pre_ln"}, flush_every_s=3600) as writer:
        for flush in range(8):
            writer.add("scalars", rows([flush]))
            writer.drain()
            if flush == 1:
                segment(tmp_path / "r", "scalars", 1).unlink()
    assert steps(tmp_path / "r") == [0, *range(2, 8)] and problem(tmp_path / "r") is None


def test_what_a_damaged_merged_segment_replaces_is_read_while_it_is_there(tmp_path, monkeypatch):
    """Killed between writing the merged one and removing its parts."""
    record(tmp_path / "r")
    parts = {path: path.read_bytes() for path in (tmp_path / "r" / SEGMENTS).glob("scalars-*")}
    monkeypatch.setattr(segments, "MAX_LIVE", 3)
    record(tmp_path / "r", flushes=1, attempt=2)
    merged = segment(tmp_path / "r", "scalars")
    assert Segment.parse(merged.name).merged
    for path, content in parts.items():
        path.write_bytes(content)
    monkeypatch.setattr(damage, "_verdicts", {})
    flip(merged, 700)
    assert len(Store(tmp_path).rows("attempts", ["r"])) == 2 and merged.name in problem(tmp_path / "r")
    assert all(path.exists() for path in parts)


@pytest.mark.parametrize("end", [seal_run, lambda folder: record(folder, flushes=1, attempt=2)])
def test_a_damaged_segment_whose_rows_are_elsewhere_is_no_problem(tmp_path, monkeypatch, end):
    """A part that a kill left beside the merged or the sealed file that contains it."""
    record(tmp_path / "r")
    path = segment(tmp_path / "r", "scalars", 1)
    whole = path.read_bytes()
    monkeypatch.setattr(segments, "MAX_LIVE", 3)
    end(tmp_path / "r")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole[:400])
    assert problem(tmp_path / "r") is None
    assert seal_run(tmp_path / "r") is None and not path.exists()


def test_sealing_takes_no_earlier_word_for_a_segment_being_whole(tmp_path):
    """It removes what it read: damage since the segment was first checked, which no time of change tells of, is looked for again."""
    record(tmp_path / "r")
    assert len(steps(tmp_path / "r")) == 30
    path = segment(tmp_path / "r", "scalars", 1)
    whole = flip(path, 100)
    assert path.name in seal_run(tmp_path / "r")
    path.write_bytes(whole)
    assert steps(tmp_path / "r") == list(range(30))


def test_a_run_whose_row_is_damaged_is_listed_and_gives_its_other_rows(tmp_path):
    record(tmp_path / "r")
    path = segment(tmp_path / "r", "run")
    whole = flip(path, 700)
    (run,) = Store(tmp_path).runs().to_dict("records")
    assert (run["run_id"], run["status"]) == ("r", "unreadable") and path.name in run["problem"]
    assert len(steps(tmp_path / "r")) == 30
    before = contents(tmp_path / "r")
    for action in (read_run, RunWriter, seal_run):
        with pytest.raises(UserError, match=f"{path.name}.*is damaged"):
            action(tmp_path / "r")
    assert contents(tmp_path / "r").keys() >= before.keys()
    path.write_bytes(whole)
    seal_run(tmp_path / "r")
    assert problem(tmp_path / "r") is None and len(steps(tmp_path / "r")) == 30


@pytest.mark.parametrize("which", [0, 1])
def test_superseded_rows_stay_so_though_it_is_lost_what_superseded_them(tmp_path, which):
    """The attempts' rows say which rows stand. Without one of them nothing is read rather than too much."""
    record(tmp_path / "r")
    record(tmp_path / "r", flushes=1, attempt=2)
    path = segment(tmp_path / "r", "attempts", which)
    whole = flip(path, 300)
    before = contents(tmp_path / "r")
    for action in (steps, read_run, seal_run, RunWriter):
        with pytest.raises(UserError, match=f"run r cannot be .*{path.name}"):
            action(tmp_path / "r")
    assert path.name in problem(tmp_path / "r")
    assert contents(tmp_path / "r") == before
    path.write_bytes(whole)
    assert steps(tmp_path / "r") == list(range(10))


def test_of_an_only_attempt_all_rows_stand_though_its_own_is_damaged(tmp_path):
    record(tmp_path / "r")
    path = segment(tmp_path / "r", "attempts")
    flip(path, 300)
    assert steps(tmp_path / "r") == list(range(30)) and path.name in problem(tmp_path / "r")


# ---- the sealed file


@pytest.fixture
def sealed(tmp_path):
    for name in ("r", "good"):
        record(tmp_path / name)
        seal_run(tmp_path / name)
    return tmp_path / "r"


def test_no_flipped_bit_of_a_sealed_file_gives_other_rows(sealed):
    """Anywhere in it: an answer is as before, or says which run and file; reading everything always meets the damage."""
    path, store = sealed / SEALED, Store(sealed.parent)
    before = {table: store.rows(table, ["r"]) for table in ("run", "attempts", "scalars")}
    size = path.stat().st_size
    for position in [5, 4096 + 9, 8192 + 5, *range(12_288 + 5, size, size // 12)]:
        whole = flip(path, position)
        refused = 0
        for table, expected in before.items():
            try:
                assert store.rows(table, ["r"]).equals(expected)
            except UserError as error:
                refused += 1
                assert str(error).startswith("run r cannot be read: ") and SEALED in str(error) and "\n" not in str(error)
        assert refused or position >= 12_288, position
        if refused == len(before):
            assert set(store.rows("scalars", ["r", "good"])["run_id"]) == {"good"}
        path.write_bytes(whole)
    assert store.rows("scalars", ["r", "good"])["run_id"].nunique() == 2


def test_a_damaged_sealed_file_is_listed_with_its_problem(sealed):
    flip(sealed / SEALED, 5000)
    os.utime(sealed / SEALED)
    runs = Store(sealed.parent).runs().set_index("run_id")
    assert runs["status"].to_dict() == {"r": "unreadable", "good": "stale"}
    assert SEALED in problem(sealed) and problem(sealed.parent / "good") is None


def test_a_later_writer_refuses_a_damaged_sealed_file(sealed):
    flip(sealed / SEALED, 5000)
    before = contents(sealed)
    for action in (RunWriter, seal_run):
        with pytest.raises(UserError) as refused:
            action(sealed)
        assert str(refused.value).startswith(f"run r cannot be read: {SEALED}: ") and "\n" not in str(refused.value)
    assert contents(sealed) == before


def test_sealing_again_takes_nothing_away_where_old_rows_are_damaged(sealed):
    """Only reading every row meets the damage: the file stays, the new rows stay beside it, and a whole copy mends it."""
    path = sealed / SEALED
    blocks = range(12_288 + 5, path.stat().st_size, 16_384)
    position = next(block for block in reversed(blocks) if is_met(steps, sealed, block) and not is_met(read_run, sealed, block))
    writer = RunWriter(sealed, flush_every_s=3600)
    writer.add("costs", [{"seq_len": 8, "value": 1.0}])
    writer.drain()
    before, whole = contents(sealed), flip(path, position)
    before[path.relative_to(sealed)] = path.read_bytes()
    for action in (writer.seal, lambda: seal_run(sealed)):
        with pytest.raises(UserError) as refused:
            action()
        assert str(refused.value).startswith(f"run r cannot be read: {SEALED}: ") and "\n" not in str(refused.value)
    assert contents(sealed) == before
    path.write_bytes(whole)
    seal_run(sealed)
    assert steps(sealed) == list(range(30)) and len(Store(sealed.parent).rows("costs", ["r"])) == 1


def is_met(action, folder, position):
    whole = flip(folder / SEALED, position)
    try:
        action(folder)
    except UserError:
        return True
    finally:
        (folder / SEALED).write_bytes(whole)
    return False
