"""Writing checkpoints out in the formats that other programs read.

- `dcp.export.state`: a nested state with tensors in it, to a pickle and the storages beside it.
- `dcp.export.torch_file`: that pickle and the storages' bytes, streamed into a `torch.save` file.
- `dcp.export.serialization_id`: the identifier that torch computes for such a file.
"""
