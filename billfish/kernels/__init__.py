"""From source text to a callable kernel; knows no scheme, no model and no tensor layout.

    device.py     properties of the GPU: the only file that queries it
    jit.py        NVRTC: one source and one C++ name -> a cubin, its registers, its spills
    cache.py      cubins on disk, in a directory that nobody else can write to
    launch.py     Kernel -> launched on torch's current stream
    workspace.py  split-K workspaces; tensor_map.py: TMA descriptors
    probe.cuh     the smallest kernel, for doctor and tests
    include/      billfish/*.cuh, what kernels share
    cpu.py        the CPU's instruction set and threads; llvm, halves, feedback: its kernels

Importing it touches neither a GPU nor the cuda packages: the first call imports them.
"""
