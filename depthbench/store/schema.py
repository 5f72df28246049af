"""The tables of the store: names, columns and types. Every other file of the store takes them from here.

Types are DuckDB's: counts and indices BIGINT, measures DOUBLE (NaN and infinity are values like any other), names VARCHAR, times
TIMESTAMP in UTC. Every table but ``run`` and ``attempts`` carries the ``attempt`` that wrote the row; the writer fills it in.
"""

from __future__ import annotations

from collections.abc import Iterable

# Goes up by one with every change of the tables. It is stored in each run row: a reader refuses a newer one, and reads an older one
# with the columns and tables it lacks empty.
SCHEMA_VERSION = 3

STATUSES = ("running", "finished", "failed", "diverged", "interrupted")

# A column name has one meaning and one type, in whichever table it stands.
_TYPES = {
    "BIGINT": """
        attempt schema_version resumed_from_step step tokens layer i j n n_tokens
        n_layer d_model n_head n_kv_head head_dim d_ff vocab_size params_total params_backbone params_extra budget_params
        seq_len batch_tokens tokens_planned seed n_device windows length""",
    "DOUBLE": "value stderr wall_s ratio ratio_requested lr",
    "VARCHAR": """
        run_id suite status arch options recipe size budget corpus corpus_fingerprint tokenizer precision device git_commit version config
        host name site direction metric probe rule note task domain template method""",
    "TIMESTAMP": "created_at updated_at started_at ended_at measured_at",
}
_TYPE_OF = {name: sql_type for sql_type, names in _TYPES.items() for name in names.split()}

# The order matters to the writer: a folder with any row has a run's row, and an attempt is known before the rows that belong to it.
_COLUMNS = {
    "run": """
        run_id suite attempt status created_at updated_at arch options recipe size budget ratio ratio_requested
        n_layer d_model n_head n_kv_head head_dim d_ff vocab_size params_total params_backbone params_extra budget_params
        seq_len batch_tokens tokens_planned lr seed corpus corpus_fingerprint tokenizer precision device n_device
        git_commit version config schema_version""",
    "attempts": "attempt resumed_from_step started_at ended_at host device git_commit",
    "scalars": "attempt step tokens wall_s name value",
    "layer_stats": "attempt step tokens layer site direction metric value",
    "probes": "attempt step tokens probe metric i j value n_tokens rule status note measured_at windows length",
    "evals": "attempt step tokens task domain metric value stderr n template status note",
    "costs": "attempt seq_len metric value device method",
}
TABLES: dict[str, dict[str, str]] = {table: {name: _TYPE_OF[name] for name in names.split()} for table, names in _COLUMNS.items()}

# Tables of measurements that may be repeated, with what a measurement is of. Its rows are added together and share one ``measured_at``;
# nothing is updated in place: a later measurement of the same supersedes all rows of an earlier one, and no query returns those.
MEASURED: dict[str, tuple[str, ...]] = {"probes": ("step", "probe", "rule")}

# How the rows of a sealed table lie: what one chart asks for lies together.
SEALED_ORDER = {
    "attempts": "attempt",
    "run": "updated_at",
    "scalars": "name, step",
    "layer_stats": "metric, site, direction, step, layer",
    "probes": "probe, metric, step, i, j",
    "evals": "task, metric, step",
    "costs": "metric, seq_len",
}


def check_columns(table: str, names: Iterable[str]) -> None:
    """Raise ValueError where ``names`` holds a column that ``table`` lacks, or where there is no such table."""
    if table not in TABLES:
        raise ValueError(f"the store has no table '{table}' (it has {', '.join(TABLES)})")
    extra = [name for name in names if name not in TABLES[table]]
    if extra:
        raise ValueError(f"table '{table}' has no column {', '.join(map(repr, extra))} (it has {', '.join(TABLES[table])})")
