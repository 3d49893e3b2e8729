"""Measured bytes: what this process holds, what the machine and the device still have.

Read from the kernel (/proc, cgroup files; ps and vm_stat on macOS) instead of through psutil: four numbers do not
justify a dependency, and psutil does not look at cgroup limits, which are what kills a process in a container.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from graftune.errors import GraftuneError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of one device. `peak` is this process's own, by torch's allocator where it has one."""

    free: int
    total: int
    peak: int


def resident_bytes() -> int:
    """Resident set of this process, mapped files included."""
    if sys.platform == "darwin":
        return int(_output("ps", "-o", "rss=", "-p", str(os.getpid()))) * 1024
    pages = int((PROC / "self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def own_bytes() -> int:
    """The part of the resident set that no file backs, pinned memory included. Where the kernel does not report it: the
    whole resident set; on macOS its peak."""
    if sys.platform == "darwin":
        return peak_resident_bytes()
    try:
        return sum(_kib_field(PROC / "self/status", name) for name in ("RssAnon", "RssShmem"))
    except OSError:  # gVisor
        return resident_bytes()


def peak_resident_bytes() -> int:
    """Largest resident set so far. VmHWM rather than ru_maxrss on Linux: the latter survives exec from the parent."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _kib_field(PROC / "self/status", "VmHWM")


def available_bytes() -> int:
    """Bytes this process may still take without swapping: the kernel's estimate, or the cgroup's rest if smaller."""
    if sys.platform == "darwin":
        return _macos_available()
    machine = _kib_field(PROC / "meminfo", "MemAvailable")
    return max(0, min([machine, *(limit - used for limit, used in _cgroup_limits())]))


def free_bytes(device: torch.device | str) -> int:
    """Bytes this process may still take on the device: free in the driver, or held by torch and unused."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return device_bytes(device).free


def forget_earlier_runs() -> None:
    """Free the memory of earlier runs of this process. Their objects refer to each other in cycles (a graph does), and
    would be counted as used until Python's collector runs."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget_peak() -> None:
    """Reset `peak_resident_bytes`, where the kernel allows it, and the peaks of torch's allocator, so that the work
    that follows is measured alone."""
    with suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def total_bytes() -> int:
    """Memory of the machine, or the cgroup's limit if smaller."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine if sys.platform == "darwin" else min([machine, *(limit for limit, _ in _cgroup_limits())])


def device_bytes(device: torch.device | str) -> DeviceBytes:
    device = torch.device(device)
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        return DeviceBytes(free, total, module.max_memory_allocated(device))
    if device.type == "mps":  # shared with the CPU; torch keeps no peak of its own there
        used, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        return DeviceBytes(max(0, total - used), total, used)
    return DeviceBytes(available_bytes(), total_bytes(), peak_resident_bytes())


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Three figures are enough to compare and few enough to read."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """'24GiB' -> 25769803776. A plain number is bytes; GB are powers of ten, GiB of two."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise GraftuneError(f"{text!r} is not an amount of memory", fix="write it as 24GiB, 80GB or in bytes")
    power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _kib_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, use that cannot be reclaimed) of every cgroup above us, both versions; none where there is no limit."""
    membership = PROC / "self/cgroup"
    if not membership.exists():
        return []
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, used_name, prefix = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit_name, used_name = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in [inner, *inner.parents]:
            if (folder / limit_name).exists() and (limit := (folder / limit_name).read_text().strip()) != "max":
                used = int((folder / used_name).read_text()) - _file_pages(folder / "memory.stat", prefix)
                found.append((int(limit), used))
            if folder == root:
                break
    return found


def _file_pages(path: Path, prefix: str) -> int:
    """Bytes of cached files, which count as used until the kernel drops them, as it does before it refuses memory. A
    base that was read twice is among the active ones."""
    rows = (line.split() for line in path.read_text().splitlines())
    return sum(int(value) for key, value in rows if key in (f"{prefix}inactive_file", f"{prefix}active_file"))


def _macos_available() -> int:
    rows = _output("vm_stat").splitlines()
    page = int(rows[0].split("page size of ")[1].split()[0])
    pages = {name: int(value.strip(" .")) for name, _, value in (row.partition(":") for row in rows[1:]) if value}
    return page * sum(pages.get(f"Pages {kind}", 0) for kind in ("free", "inactive", "speculative", "purgeable"))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
