"""The stages of a checkpoint's lifecycle, one a module: each a plain typed function.

`ledger` remembers what was done. `discover` finds steps; `validate`, `load_check`, `export` and `publish`
take one through its life; `alert` tells people. None of these needs Prefect: `prefect_tasks` wraps them.
"""
