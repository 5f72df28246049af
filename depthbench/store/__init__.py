"""The run store: one folder per run, one writer, many readers, and every line of SQL in the product.

``writer.RunWriter`` records a run, ``reader.Store`` reads many, ``runs`` names and finds them. A run folder holds::

    config.yaml                      the resolved configuration (written by training)
    segments/<table>-<n>.<crc>.parquet   rows of a live run; immutable, each renamed into place whole, its checksum in its name
    segments/<table>-<a>-<b>.<crc>.parquet   a merged segment: its name lists what it contains, the table's segments a to b
    metrics.duckdb                   all rows of a sealed run, and the list of the segments it contains
    heartbeat                        touched while a writer lives
    .lock                            who writes, held by the kernel for as long as the process lives

No two processes ever share an open database: the writer only ever creates files under a temporary name and renames them, readers
only ever open files that nobody changes again.
"""
