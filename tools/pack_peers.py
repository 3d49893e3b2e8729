"""Packs the peers of the benchmarks for a machine without a network: one archive of unpacked wheels, for PYTHONPATH.

    python tools/pack_peers.py FOLDER          writes FOLDER/peers.tar.xz (17 MB); FOLDER should be ignored by git

    tar xf FOLDER/peers.tar.xz -C SITE
    PYTHONPATH=SITE/peers PYTHONPATH_TRL=SITE/trl python benchmarks/step.py CASE ... --who ours,trl,unsloth

The machine is expected to have Python 3.12, torch, Triton, transformers, accelerate, pandas and pyarrow already. The
archive has two folders because Unsloth accepts TRL up to 1.15 only: `trl` holds the newest TRL, for the participants of
that name (step.py), and `peers` everything else. Left out: Unsloth's web application, tests, and the libraries of
bitsandbytes for other versions of CUDA.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PYTHON, CUDA = "3.12", "130"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "any")
FOLDERS = {
    "trl": ("trl==1.16.0",),
    "peers": (
        "peft==0.21.2", "liger-kernel==0.8.5", "bitsandbytes==0.50.2", "unsloth==2026.10.9", "unsloth_zoo==2026.10.9",
        "trl==1.15.0", "torchao==0.18.0", "cut-cross-entropy", "datasets==4.3.0", "tyro", "msgspec", "structlog",
        "json5", "nest-asyncio", "docstring-parser", "shtab", "typeguard", "dill", "multiprocess", "pytz", "tzdata",
        "gguf", "cyclopts", "nvidia-cudnn-frontend",
    ),
}  # fmt: skip
LEFT_OUT = ("studio", "unsloth_cli")


def fetch(packages: tuple[str, ...], folder: Path) -> None:
    """Download the wheels of these packages, without those that they require, and unpack them into the folder."""
    with tempfile.TemporaryDirectory() as wheels:
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
        words += ["--python-version", PYTHON, *(word for name in PLATFORMS for word in ("--platform", name))]
        subprocess.run([*words, *packages], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder)], check=True)


def thin_out(folder: Path) -> None:
    """Remove what no benchmark imports."""
    unneeded = [folder / name for name in LEFT_OUT]
    unneeded += [path for path in folder.rglob("tests") if path.is_dir()]
    for path in unneeded:
        shutil.rmtree(path, ignore_errors=True)
    for library in folder.glob("bitsandbytes/libbitsandbytes_*.so"):
        if not library.stem.endswith((f"cuda{CUDA}", "_cpu")):
            library.unlink()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    out = parser.parse_args(words).folder
    out.mkdir(parents=True, exist_ok=True)
    path = out / "peers.tar.xz"
    with tempfile.TemporaryDirectory() as work:
        for name, packages in FOLDERS.items():
            fetch(packages, Path(work, name))
            thin_out(Path(work, name))
        with tarfile.open(path, "w:xz", preset=6) as archive:
            for name in FOLDERS:
                archive.add(Path(work, name), name)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
