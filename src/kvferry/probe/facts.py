"""What a node says of itself: software, kernel, memory, network; read from /proc and /sys, nothing is run."""

from __future__ import annotations

import os
import platform
import resource
import socket
from importlib import metadata
from pathlib import Path

from kvferry.errors import KVFerryError
from kvferry.probe.words import TransportFact
from kvferry.transport.memory import HUGE_NBYTES, create_shared
from kvferry.transport.registry import known_schemes, transport_for

__all__ = ["host_facts", "host_id", "read_text", "software", "transport_facts"]

_LIBRARIES = (
    *("numpy", "msgspec", "xxhash", "cryptography", "nixl", "nixl-cu12", "nixl-cu13"),
    *("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
)
_CPU_FLAGS = ("aes", "vaes", "pclmulqdq", "vpclmulqdq", "avx2", "avx512f", "asimd", "pmull")


def software() -> dict[str, str]:
    """Name to version of what carries the bytes; libraries that are not there are left out."""
    found = {"kvferry": metadata.version("kvferry"), "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host_facts(address: str = "") -> dict[str, str]:
    """Name to value; what cannot be read is left out. ``address``: ``tcp://IP:PORT`` of the interface."""
    facts = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "cpu_features": " ".join(cpu_features()),
        "memory_bytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "thp_shmem": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "thp": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages": _huge_pages(),
        "memory_available_bytes": _available(),
        "process_vm_readv": _reads_processes(),
        "cubic": _has_cubic(),
        "tcp_rmem": " ".join(read_text("/proc/sys/net/ipv4/tcp_rmem").split()),
        "tcp_wmem": " ".join(read_text("/proc/sys/net/ipv4/tcp_wmem").split()),
        "rdma_devices": _names("/sys/class/infiniband"),
        "rdma_access": _rdma_access(),
        "interfaces": " ".join(name for _, name in socket.if_nameindex())[:1024],
        "ucx_tls": os.environ.get("UCX_TLS", "")[:256],
        "ucx_net_devices": os.environ.get("UCX_NET_DEVICES", "")[:256],
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "congestion_control": read_text("/proc/sys/net/ipv4/tcp_congestion_control"),
        **_interface(address),
    }
    return {name: value for name, value in facts.items() if value}


def host_id() -> str:
    """Equal for all processes of one running kernel, containers included; "" where it cannot be read."""
    return read_text("/proc/sys/kernel/random/boot_id")


def transport_facts() -> tuple[TransportFact, ...]:
    """Every transport that is installed here, and why it does not work."""
    found = []
    for scheme in known_schemes():
        try:
            why = transport_for(scheme).unavailable()
        except KVFerryError as error:
            why = str(error)
        found.append(TransportFact(scheme, (why or "")[:1024]))
    return tuple(found)


def cpu_features() -> list[str]:
    """Of the features that ciphers and digests use, those that are here."""
    for line in read_text("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            here = set(value.split())
            return [flag for flag in _CPU_FLAGS if flag in here]
    return []


def read_text(path: str) -> str:
    """What a file of /proc or /sys says, stripped; "" where it is not there or not ours to read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    for line in read_text("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def _chosen(path: str) -> str:
    """``always [madvise] never`` -> ``madvise``."""
    text = read_text(path)
    return text.partition("[")[2].partition("]")[0]


def _names(folder: str) -> str:
    try:
        return " ".join(sorted(os.listdir(folder)))[:1024]
    except OSError:
        return ""


def _rdma_access() -> str:
    """Whether this process may open the RDMA devices; "" where there is none."""
    if not _names("/sys/class/infiniband"):
        return ""
    nodes = [path for path in Path("/dev/infiniband").glob("uverbs*") if os.access(path, os.R_OK | os.W_OK)]
    return "yes" if nodes else "no"


def _huge_pages() -> str:
    """Whether a small pool in shared memory gets huge pages: made, looked at, and given back."""
    try:
        memory = create_shared(2 * HUGE_NBYTES)
    except KVFerryError:
        return ""
    try:
        for line in read_text("/proc/self/smaps_rollup").splitlines():
            if line.startswith("ShmemPmdMapped:"):
                return "no" if line.split()[1] == "0" else "yes"
    finally:
        memory.close()
    return ""


def _available() -> str:
    """Bytes that this process may still take: of the machine, or of its control group where that is less."""
    lines = read_text("/proc/meminfo").splitlines()
    found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit, used = read_text("/sys/fs/cgroup/memory.max"), read_text("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return str(min(found)) if found else ""


def _reads_processes() -> str:
    """Whether a process may read another that is not its child: what the cma path of shm needs."""
    if os.geteuid() == 0 or read_text("/proc/sys/kernel/yama/ptrace_scope") in ("", "0"):
        return "yes"
    return "no"


def _has_cubic() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            return "no"
    return "yes"


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _interface(address: str) -> dict[str, str]:
    """The interface that has the address: its name, MTU and speed."""
    host = address.partition("://")[2].rpartition(":")[0].strip("[]")
    name = interface_of(host) if host else ""
    if not name:
        return {}
    base = f"/sys/class/net/{name}"
    found = {"interface": name, "mtu": read_text(f"{base}/mtu")}
    speed = read_text(f"{base}/speed")
    if speed.isdigit() and int(speed) > 0:
        found["speed_mbit"] = speed
    return found


def interface_of(ip: str) -> str:
    """The network interface that has this IPv4 address; "" where none has, or it is IPv6."""
    try:
        wanted = socket.inet_aton(ip)
    except OSError:
        return ""
    import fcntl  # noqa: PLC0415 - only here

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
            except OSError:
                continue  # an interface without an IPv4 address
            if reply[20:24] == wanted:
                return name
    return ""


_SIOCGIFADDR = 0x8915
