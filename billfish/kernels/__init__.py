"""From CUDA C++ text to something callable (NVRTC). Nothing here yet: the first CUDA op of w4a16
brings it."""
