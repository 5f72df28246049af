import os

from depthbench.store import folder as store_folder
from depthbench.store.folder import HEARTBEAT, SEGMENTS, Listing, Segment, list_run, run_folders, version_of


def listing(folder, *names):
    return Listing(folder, tuple(Segment.parse(name) for name in names), None)


def test_a_segment_is_its_name():
    checked = (Segment("run", 1, 1, "0a1b2c3d"), Segment("run", 1, 9, "ffffffff"))
    for segment in (Segment("scalars", 7, 7), Segment("layer_stats", 3, 1_234_567), *checked):
        assert Segment.parse(segment.name) == segment
    for stranger in (".scalars-000001.parquet.tmp", "scalars.parquet", "scalars-000001.parquet.bak", "scalars-1.parquet"):
        assert Segment.parse(stranger) is None


def test_a_merged_segment_hides_what_it_contains(tmp_path):
    found = listing(
        tmp_path,
        *("scalars-000001.parquet", "scalars-000004.parquet", "scalars-000001-000004.parquet", "scalars-000005.parquet"),
        *("scalars-000001-000009.parquet", "scalars-000012.parquet", "layer_stats-000003.parquet"),
    )
    assert [segment.name for segment in found.live("scalars")] == ["scalars-000001-000009.parquet", "scalars-000012.parquet"]
    assert [segment.name for segment in found.live("layer_stats")] == ["layer_stats-000003.parquet"]


def test_the_sealed_file_hides_what_it_contains(tmp_path):
    found = listing(tmp_path, "scalars-000001.parquet", "scalars-000002.parquet")
    assert [segment.first for segment in found.live("scalars", {"scalars-000001.parquet"})] == [2]


def test_a_listing_torn_by_a_merge_is_taken_again(tmp_path, monkeypatch):
    """The merged file was not there yet when the reading passed its place, and what it replaces was gone when it came there."""
    after = ["scalars-000001-000002.parquet"]
    answers = [[], after, after]
    monkeypatch.setattr(store_folder.os, "listdir", lambda _: answers.pop(0))
    assert list_run(tmp_path).segments == (Segment("scalars", 1, 2),)


def test_version_follows_the_rows_and_the_silence(tmp_path):
    (tmp_path / SEGMENTS).mkdir()
    versions = [version_of(list_run(tmp_path))]

    def changes():
        versions.append(version_of(list_run(tmp_path)))
        return versions[-1] != versions[-2]

    assert not changes()
    (tmp_path / HEARTBEAT).touch()
    assert changes()
    (tmp_path / SEGMENTS / "scalars-000001.parquet").touch()
    assert changes()
    os.utime(tmp_path / SEGMENTS, (1, 1))  # as where the run was begun afresh: the same names, another folder
    assert changes()
    os.utime(tmp_path / HEARTBEAT, (1, 1))
    assert changes()
    (tmp_path / "metrics.duckdb").touch()
    assert changes()
    assert not changes()


def test_only_folders_with_rows_are_runs(tmp_path):
    for name in ("empty/segments", "half/segments", "live/segments", ".aside/segments", "sealed"):
        (tmp_path / name).mkdir(parents=True)
    for path in ("half/segments/.run-000001.parquet.tmp", "live/segments/run-000001.parquet", ".aside/segments/run-000001.parquet"):
        (tmp_path / path).touch()
    (tmp_path / "sealed/metrics.duckdb").touch()
    (tmp_path / "file").touch()
    assert [folder.name for folder in run_folders(tmp_path)] == ["live", "sealed"]
    assert run_folders(tmp_path / "nowhere") == run_folders(tmp_path / "file") == []
