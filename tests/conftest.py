"""Settings that must be in the environment before the libraries read them."""

import os

# Without this, bf16 matrix products die with SIGILL in oneDNN on some CPUs.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import torch  # noqa: E402

# The Triton kernels run on CPU tensors in Triton's interpreter where there is no GPU. Read when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that take longest come first, so that at the end no process is left with one of them.
LONGEST = (
    "train/test_loop", "test_demo", "fused/test_deferred", "train/test_recipes", "compiled/test_model",
    "kernels/gpu/test_launch", "bench/test_training", "compiled/test_lowerings", "codecs/test_promises",
    "kernels/gpu/test_dual", "fused/test_layers", "kernels/gpu/test_norm_forward", "train/test_distributed",
    "kernels/gpu/test_norm_backward", "bench/test_maxbatch",
)  # fmt: skip


def pytest_collection_modifyitems(items: list) -> None:
    names = [f"tests/{name}.py" for name in LONGEST]
    items.sort(key=lambda item: next((i for i, name in enumerate(names) if item.nodeid.startswith(name)), len(names)))
