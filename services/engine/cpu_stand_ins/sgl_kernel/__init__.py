"""Stand-in for sgl_kernel (SGLang's compiled CUDA kernels), which has no build for PyTorch's CPU wheel."""

from absent_package import stand_in_for

__version__ = "0.0.0"

stand_in_for(__name__)
