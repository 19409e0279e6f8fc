"""From CUDA C++ text to something callable; knows no scheme, no model and no tensor layout.

    device.py   what the GPU is: the only file that asks it
    jit.py      NVRTC: one source and one C++ name -> a cubin, its registers, its spills
    cache.py    cubins on disk, which are code: who may write there matters
    launch.py   Kernel -> launched on torch's current stream
    probe.cuh   the smallest kernel, for doctor and tests
    include/    billfish/*.cuh, what kernels share

Importing it touches neither a GPU nor the cuda packages: those are imported by the first call.
"""
