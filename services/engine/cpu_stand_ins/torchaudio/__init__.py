"""Stand-in for torchaudio (audio models' preprocessing), which has no build for PyTorch's CPU wheel."""

from absent_package import stand_in_for

__version__ = "0.0.0"

stand_in_for(__name__)
