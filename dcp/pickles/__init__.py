"""The pickle language as inert values: read, judged and written without importing or calling anything.

- `dcp.pickles.nodes`: what a pickle asks for (`Global`, `Reduce`, ...) as plain data.
- `dcp.pickles.reader`: bytes to values and nodes, bounded against hostile input.
- `dcp.pickles.graph`: walking such values without recursion.
- `dcp.pickles.tensors`: torch's way of pickling tensors, recognised in nodes.
- `dcp.pickles.scan`: which globals a pickle asks for, and whether they are harmless.
- `dcp.pickles.tables`: the lists that judgement rests on.
- `dcp.pickles.writer`: values and nodes back to the bytes that CPython's own pickler would write.
"""
