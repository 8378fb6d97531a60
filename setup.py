"""Packaging of megatron_hybrid. Tool settings live in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (ROOT / "megatron_hybrid" / "version.py").read_text()
).group(1)
ADDRESSES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["addresses"]
# uvicorn uses httptools and uvloop where they are; without them a token of a stream costs twice as
# much.
SERVER = (
    *("fastapi>=0.133", "uvicorn>=0.51", "pydantic>=2.14", "httptools>=0.6"),
    'uvloop>=0.21; platform_system != "Windows"',
)
TRACING = ("opentelemetry-sdk>=1.40", "opentelemetry-exporter-otlp-proto-http>=1.40")
KV_EVENTS = ("pyzmq>=26", "msgpack>=1.0.5")
# What ai-dynamo 1.6.1 and ai-dynamo-runtime 1.6.1 import for a frontend and our workers. These two
# come by `pip install --no-deps`: they ask for a package that is on another index, and for an older
# pydantic than the server, and need neither (docs/guides/many_machines.md).
DYNAMO = (
    *("aiohttp>=3.14.3,<4", "msgspec>=0.19", "prometheus-client>=0.23.1,<1", "pyzmq>=26"),
    *("tqdm>=4", "transformers>=4.56", "typing-extensions>=4.10", "uvloop>=0.21"),
    *("zstandard>=0.23,<1", "packaging>=24"),
)

setup(
    name="megatron_hybrid",
    version=VERSION,
    description="Hybrid language models on megatron-core, with prefix sharing that works for them",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={name.title(): address for name, address in ADDRESSES.items() if address},
    packages=find_packages(include=["megatron_hybrid", "megatron_hybrid.*"]),
    # Said, an editable install is a path, which type checkers follow; else it is a hook.
    package_dir={"": "."},
    package_data={
        "megatron_hybrid": [
            "py.typed",
            "demo_model/*",
            "serving/page/*",
            "serving/page/vendor/*",
            "training/recipes/*.yaml",
            "utils/other_names.toml",
        ]
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.16.1",
        "numpy>=1.26",
        "safetensors>=0.4",
        "tokenizers>=0.20",
        "jinja2>=3.1.6",  # chat templates
        "rich>=13",
        "pyyaml>=6",  # recipes of training
        # megatron-core imports these without declaring them.
        "einops>=0.7",
        "psutil>=5",
        # From 0.18 on, `import megatron.core` itself imports triton.
        'triton>=3; python_version >= "3.12" and platform_system == "Linux"',
    ],
    extras_require={
        # NVIDIA's apex is used when it is installed; PyPI's `apex` is another project: see
        # docs/start/install.md.
        # Kernels; no compiler is needed. Of fla-core parts are called, which may move.
        "gpu": ["triton>=3.6", "fla-core>=0.6,<0.7"],
        "te": ["transformer-engine[pytorch]>=2.0"],  # builds a part of it, with nvcc
        # Parquet files, tensorboard's events, plots of losses.
        "train": ["pyarrow>=15", "tensorboard>=2.15", "matplotlib>=3.8"],
        "serve": [*SERVER, "llguidance>=1.9,<2"],
        "kv-events": [*KV_EVENTS],  # what is cached, for routers
        "dynamo": [*SERVER, *KV_EVENTS, *DYNAMO, "llguidance>=1.9,<2"],  # workers of NVIDIA Dynamo
        "tracing": [*TRACING],  # spans of requests
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "transformers>=5.24",
            "compressed-tensors>=0.20",
            "prometheus_client>=0.20",
            "matplotlib>=3.8",
            "pyarrow>=15",
            "tensorboard>=2.15",
            "jsonschema>=4.20",
            *(*SERVER, *KV_EVENTS, *TRACING, "llguidance>=1.9,<2", "openai>=3", "httpx>=0.28"),
        ],
        "kernels": [
            *("triton>=3.6", "fla-core>=0.6,<0.7"),
            # The dry run of a GPU's tests collects those of models, which read transformers'.
            *("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "transformers>=5.24"),
        ],
        "page": ["playwright>=1.49"],  # tests of the server's page; drives Debian's chromium
        "bench": ["matplotlib>=3.8"],  # plots
        # The site of the docs, which reads the package's source and imports no torch.
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1.0", "ruff>=0.12"],
        "dev": ["ruff>=0.12", "mypy>=2", "pyright[nodejs]>=1.1.400", "uv>=0.9", "matplotlib>=3.8"],
    },
    entry_points={"console_scripts": ["megatron-hybrid = megatron_hybrid.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
