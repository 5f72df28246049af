"""The questions asked of the store, as SQL over the views of a ``Snapshot`` (sources.py), where each row stands once.

Every aggregate leaves NaN and infinity out and says how many of how many it took: columns ``n_finite`` and ``n``.
"""

from __future__ import annotations

from depthbench.store.schema import TABLES
from depthbench.store.sources import Snapshot

# One row per run: its row, and what its scalars say by now.
RUNS = """
    SELECT run.*, sums.* EXCLUDE (run_id), attempts.n_attempts FROM run
    LEFT JOIN (
        SELECT run_id, max(step) AS step, max(tokens) AS tokens_done, max(wall_s) AS wall_s,
            arg_max(value, step) FILTER (name = 'train/loss') AS train_loss,
            arg_max(value, step) FILTER (name = 'val/loss') AS val_loss,
            min(value) FILTER (name = 'val/loss' AND isfinite(value)) AS val_loss_best,
            arg_min(step, value) FILTER (name = 'val/loss' AND isfinite(value)) AS val_loss_best_step,
            count(*) FILTER (name = 'val/loss') AS n_val_loss,
            count(*) FILTER (name = 'val/loss' AND isfinite(value)) AS n_val_loss_finite,
            arg_max(value, step) FILTER (name = 'perf/tokens_per_s') AS tokens_per_s,
            count(*) AS n_scalars
        FROM scalars GROUP BY run_id
    ) AS sums USING (run_id)
    LEFT JOIN (SELECT run_id, count(*) AS n_attempts FROM attempts GROUP BY run_id) AS attempts USING (run_id)"""
RUNS_COLUMNS = {
    **TABLES["run"],
    **dict.fromkeys(("step", "tokens_done"), "BIGINT"),
    **dict.fromkeys(("wall_s", "train_loss", "val_loss", "val_loss_best"), "DOUBLE"),
    **dict.fromkeys(("val_loss_best_step", "n_val_loss", "n_val_loss_finite"), "BIGINT"),
    "tokens_per_s": "DOUBLE",
    **dict.fromkeys(("n_scalars", "n_attempts"), "BIGINT"),
}

SCALAR_NAMES = """
    SELECT name, count(DISTINCT run_id) AS n_runs, count(*) AS n, count(*) FILTER (isfinite(value)) AS n_finite
    FROM scalars GROUP BY name ORDER BY name"""

LAYER_STAT_KEYS = """
    SELECT metric, site, direction, count(*) AS n, count(*) FILTER (isfinite(value)) AS n_finite,
        count(DISTINCT step) AS n_steps, max(layer) + 1 AS n_layer
    FROM layer_stats GROUP BY ALL ORDER BY ALL"""

LAYER_STEPS = "SELECT step, max(tokens) AS tokens FROM layer_stats GROUP BY step ORDER BY step"

# Points in the order of their steps are dealt into at most $buckets runs of neighbours, as equal in number as can be. A bucket keeps
# its extremes, so that a spike of one step is still there; a bucket of one point is that point, NaN or not.
_REDUCED = """
    CASE WHEN count(*) = 1 THEN first(value) ELSE avg(value) FILTER (isfinite(value)) END AS value,
    min(value) FILTER (isfinite(value)) AS value_min, max(value) FILTER (isfinite(value)) AS value_max,
    count(*) AS n, count(*) FILTER (isfinite(value)) AS n_finite"""

SCALARS = f"""
    SELECT run_id, name, max(step) AS step, max(tokens) AS tokens, max(wall_s) AS wall_s, {_REDUCED}
    FROM (
        SELECT *, row_number() OVER (curve ORDER BY step) - 1 AS place, count(*) OVER curve AS total
        FROM scalars WHERE list_contains($names, name) WINDOW curve AS (PARTITION BY run_id, name)
    )
    GROUP BY run_id, name, place * least($buckets, total) // total ORDER BY run_id, name, step"""

LAYER_STATS = f"""
    SELECT max(step) AS step, max(tokens) AS tokens, layer, {_REDUCED}
    FROM (
        SELECT *, max(place) OVER () + 1 AS total FROM (
            SELECT *, dense_rank() OVER (ORDER BY step) - 1 AS place
            FROM layer_stats WHERE metric = $metric AND site = $site AND direction = $direction
        )
    )
    GROUP BY layer, place * least($buckets, total) // total ORDER BY step, layer"""

PROBES = f"""
    SELECT run_id, {", ".join(TABLES["probes"])} FROM probes WHERE $probes IS NULL OR list_contains($probes, probe)
    ORDER BY run_id, step, probe, rule, metric, i, j"""


def latest_run_row(snapshot: Snapshot) -> dict | None:
    """The run's row as Python values (None for null), of a snapshot of one run; None where it has none yet."""
    rows = snapshot.execute(f"SELECT {', '.join(TABLES['run'])} FROM run").fetchall()
    return dict(zip(TABLES["run"], rows[0], strict=True)) if rows else None


def listed_runs(snapshot: Snapshot) -> list[dict]:
    """The rows of ``RUNS`` with a ``problem``; a run whose every row of table run is lost is there as unreadable."""
    rows = {row["run_id"]: row for row in run_summaries(snapshot)}
    for listing in snapshot.listings:
        if problem := snapshot.problem(listing):
            row = rows.setdefault(listing.run_id, {"run_id": listing.run_id, "status": "unreadable"})
            row["problem"] = problem
    return list(rows.values())


def run_summaries(snapshot: Snapshot) -> list[dict]:
    """The rows of ``RUNS`` as Python values."""
    rows = snapshot.execute(f"SELECT {', '.join(RUNS_COLUMNS)} FROM ({RUNS})", "scalars").fetchall()
    return [dict(zip(RUNS_COLUMNS, row, strict=True)) for row in rows]
