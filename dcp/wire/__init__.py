"""The pickle inside `.metadata` as inert values, fast and with bounded time and memory.

- `dcp.wire.values`: what the classes of the format become, and the closed table of their names.
- `dcp.wire.machine`: the interpreter, a `dcp.pickles.machine.Machine` for this one format.
- `dcp.wire.grammar`: recognises a repeated item (a chunk, a storage entry) in the bytes just run.
- `dcp.wire.columns`: decodes many such items at once with numpy, as columns.
- `dcp.wire.runs`: lets the machine skip over decoded items, exactly as if it had run them.
- `dcp.wire.reader`: bytes to values; what `dcp.index` calls.
"""
