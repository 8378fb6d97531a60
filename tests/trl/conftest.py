"""Builders of tiny models, from the tests of architectures."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "functional" / "huggingface"))
