"""Split-K workspaces: fp32 partial sums that CTAs of one launch leave for each other, and locks.

Kernels leave every lock zero, so that one workspace serves all launches of a stream, which run one
after the other. A captured graph has its own, since it may be replayed beside any stream.
"""

import torch
from torch import Tensor

_workspaces: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}


def of_stream(index: int, sums: int, locks: int) -> tuple[Tensor, Tensor]:
    """(fp32 sums, int32 locks) for a launch on torch's current stream of a device."""
    stream = torch._C._cuda_getCurrentRawStream(index)  # 3 us less than torch.cuda.current_stream
    graph = _capture(stream) if torch._C._cuda_isCurrentStreamCapturing() else 0
    key = (index, stream, graph)
    found = _workspaces.get(key)
    if found is None or found[0].numel() < sums or found[1].numel() < locks:
        if graph:  # the graph keeps its memory after the capture: earlier graphs' can go
            for old in [k for k in _workspaces if k[0] == index and k[2] not in (0, graph)]:
                del _workspaces[old]
        if found is not None:
            sums, locks = max(sums, found[0].numel()), max(locks, found[1].numel())
        device = torch.device("cuda", index)
        found = _workspaces[key] = (
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(locks, dtype=torch.int32, device=device),
        )
    return found


def _capture(stream: int) -> int:
    """The id of the capture that this stream takes part in; never 0."""
    from cuda.bindings import driver

    answer = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    if int(answer[0]):
        raise RuntimeError(f"a stream under capture: the driver answers {answer[0]!r}")
    return int(answer[2])
