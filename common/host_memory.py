"""Memory that this process may still take: the machine's, or less where a cgroup (a container's, a
batch job's) limits it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def available_memory() -> int:
    """Bytes; file cache that the kernel would give back counts as free."""
    import psutil

    own = Path("/proc/self/cgroup").read_text()
    return min(
        psutil.virtual_memory().available, *left_in_cgroups(own, Path("/sys/fs/cgroup")), 2**63
    )


def left_in_cgroups(own: str, root: Path) -> Iterator[int]:
    """What each cgroup with a limit leaves, from the process's own one upwards.

    Args:
        own: /proc/self/cgroup. Inside a container its path may be the host's, of which only the
            root is mounted.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cached = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, cached = root / "memory", "total_"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(base):
                break
            with contextlib.suppress(FileNotFoundError):
                most = (group / limit).read_text().strip()
                if most != "max":
                    stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
                    cache = sum(int(stat[f"{cached}{x}_file"]) for x in ("active", "inactive"))
                    yield max(0, int(most) - int((group / used).read_text()) + cache)
