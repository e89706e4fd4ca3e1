"""Writing checkpoints out in the formats that other programs read.

`export` (`run`) and `plan_export` (`planning`) are the way in. From index to file:

- `selection`, `renaming`: which keys go out, and under which path.
- `planning`: what it will take, and whether the machine has it (`machine`).
- `budget`: threads and buffers that keep it within its memory.
- `bands`: tensors cut into stretches of the output that fit in memory.
- `pump`: those filled with bytes, ahead and in order, each source chunk's CRC checked.
- `tensor_stream`: tensor after tensor, with a digest of each.
- `nesting`: values at their places, and what flattening lost.
- `state`: a nested state with tensors in it, to a pickle and the storages beside it.
- `torch_export`: one checkpoint laid out as such a state, and streamed.
- `torch_file`, `serialization_id`: the `torch.save` format itself.
- `safetensors_layout`, `safetensors_export`: which tensors stand in which file, and these streamed.
- `destination`, `unchanged`: what is asked of where it goes, and of where it comes from.
- `sink`: what goes out is counted and hashed.
- `certificate`: the digests of a finished file's tensors; `provenance`: which of them are a checkpoint's.
"""

from dcp.exporting.certificate import certify
from dcp.exporting.planning import plan_export
from dcp.exporting.report import ExportPlan, ExportReport
from dcp.exporting.run import export

__all__ = ["ExportPlan", "ExportReport", "certify", "export", "plan_export"]
