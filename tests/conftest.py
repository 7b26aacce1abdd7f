"""Settings that must be in the environment before the libraries read them."""

import os

# Without this, bf16 matrix products die with SIGILL in oneDNN on some CPUs.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import torch  # noqa: E402

# The Triton kernels run on CPU tensors in Triton's interpreter where there is no GPU. Read when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
