"""The dataset on disk and behind SQL: batches, sidecars, views, statistics, erasure, compaction."""
