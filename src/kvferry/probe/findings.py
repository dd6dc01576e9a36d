"""Facts of a node -> what is not as fast transfers want it, each with its fix. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

__all__ = ["Finding", "compare_nodes", "findings_of"]

_FEWEST_FILES = 4096
_LEAST_BUFFER = 4 << 20
_JUMBO_MTU, _FAST_MBIT = 9000, 25_000
_LEAST_MEMORY = 2 << 30
_MOONCAKE = "mooncake-transfer-engine"
_LIBRARIES = {"nixl-cu12", "nixl-cu13", "nixl", _MOONCAKE, f"{_MOONCAKE}-non-cuda", f"{_MOONCAKE}-cuda13"}


class Finding(msgspec.Struct, frozen=True):
    """Something that costs speed, or that a path needs: what is so, what it means, and what to do."""

    about: str
    problem: str
    fix: str


def findings_of(facts: Mapping[str, str]) -> list[Finding]:
    """Problems of one node. A fact that could not be read is no problem."""
    parts = (_memory, _processor, _limits, _network, _devices, _processes)
    return [finding for part in parts for finding in part(facts)]


def _memory(facts: Mapping[str, str]) -> Iterator[Finding]:
    if facts.get("huge_pages") == "no":
        yield Finding(
            "hugepages",
            "a pool in shared memory gets small pages here: copies in large blocks are slower",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or run Linux 6.1 or newer",
        )
    available = _number(facts, "memory_available_bytes")
    if available is not None and available < _LEAST_MEMORY:
        yield Finding(
            "memory",
            f"{available / 2**30:.1f} GiB are available here: a probe's pool takes 2.5 times the payload",
            "free memory, raise the container's limit, or probe a smaller payload",
        )


def _processor(facts: Mapping[str, str]) -> Iterator[Finding]:
    features = facts.get("cpu_features", "").split()
    machine = facts.get("machine", "")
    if facts.get("cpu") and "aes" not in features and machine in ("x86_64", "aarch64"):
        yield Finding(
            "cpu",
            "no AES instructions are visible: encrypted transfers run at a tenth of their speed",
            "in a virtual machine pass the host's CPU through (cpu mode host-passthrough)",
        )
    if facts.get("cpus") == "1":
        yield Finding(
            "cpu",
            "this process may use one processor: the engine and its transfer process take turns",
            "allow it two or more (cpuset, taskset, the container's limit)",
        )


def _limits(facts: Mapping[str, str]) -> Iterator[Finding]:
    files = _number(facts, "open_files")
    if files is not None and files < _FEWEST_FILES:
        yield Finding(
            "ulimits",
            f"{files} open files are allowed: each peer takes a few",
            "ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit",
        )
    if facts.get("rdma_devices") and facts.get("locked_memory") != "unlimited":
        yield Finding(
            "ulimits",
            f"{facts.get('locked_memory')} bytes may be locked, but RDMA devices need a pool to be",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit",
        )


def _network(facts: Mapping[str, str]) -> Iterator[Finding]:
    if facts.get("cubic") == "no":
        yield Finding(
            "tcp",
            f"congestion control cubic cannot be set ({facts.get('congestion_control')} stays): inside a "
            "cluster bbr costs up to half of the speed",
            "modprobe tcp_cubic; sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic'",
        )
    for name in ("tcp_rmem", "tcp_wmem"):
        most = _number({"most": facts.get(name, "").rpartition(" ")[2]}, "most")
        if most is not None and most < _LEAST_BUFFER:
            yield Finding(
                "tcp",
                f"net.ipv4.{name} ends at {most} bytes: one stream cannot fill a fast link",
                f"sysctl net.ipv4.{name}='4096 131072 33554432'",
            )
    mtu, speed = _number(facts, "mtu"), _number(facts, "speed_mbit")
    if mtu is not None and speed is not None and speed >= _FAST_MBIT and mtu < _JUMBO_MTU:
        yield Finding(
            "mtu",
            f"{facts.get('interface')} has {speed / 1000:g} Gb/s and an MTU of {mtu}: many packets",
            f"ip link set {facts.get('interface')} mtu 9000, where every switch on the way allows it",
        )


def _devices(facts: Mapping[str, str]) -> Iterator[Finding]:
    """What NIXL and Mooncake are told to use, and is not there: UCX then finds no way, or takes another."""
    allowed = {word.strip() for word in facts.get("ucx_tls", "").split(",") if word.strip()}
    if allowed and not allowed & _UCX_WITHOUT_RDMA and not facts.get("rdma_devices"):
        yield Finding(
            "devices",
            f"UCX_TLS={facts['ucx_tls']} wants an RDMA device, and there is none in /sys/class/infiniband: "
            "NIXL cannot reach any peer",
            "load the driver, give the container the device (/dev/infiniband, or the device plugin's "
            "resource), or let UCX_TLS name tcp too",
        )
    known = {*facts.get("interfaces", "").split(), *facts.get("rdma_devices", "").split(), "all"}
    named = [word.strip() for word in facts.get("ucx_net_devices", "").split(",") if word.strip()]
    lacking = [word for word in named if word.partition(":")[0] not in known]
    if lacking and facts.get("interfaces"):
        yield Finding(
            "devices",
            f"UCX_NET_DEVICES names {', '.join(lacking)}, which this node does not have",
            f"name one of {' '.join(sorted(known - {'all'}))}, or unset it",
        )
    if facts.get("rdma_access") == "no":
        yield Finding(
            "devices",
            f"{facts.get('rdma_devices')} is there, but this process may not open /dev/infiniband/uverbs*",
            "give the container the device, or the user the group that owns it",
        )


#: What UCX_TLS may name that needs no RDMA device and still reaches another host, or this one.
_UCX_WITHOUT_RDMA = {"tcp", "shm", "sm", "mm", "posix", "sysv", "cma", "knem", "xpmem", "self", "all"}


def _processes(facts: Mapping[str, str]) -> Iterator[Finding]:
    if facts.get("process_vm_readv") == "no":
        yield Finding(
            "permissions",
            "a process may not read another's memory: shm cannot read pools that an engine allocated itself",
            "make pools with Pool.allocate (mapped, needs no permission), or allow it: SYS_PTRACE in the "
            "container, sysctl kernel.yama.ptrace_scope=0",
        )


def compare_nodes(
    here: Mapping[str, str],
    there: Mapping[str, str],
    software_here: Mapping[str, str],
    software_there: Mapping[str, str],
) -> list[Finding]:
    """What does not fit between two nodes."""
    found = []
    mine, theirs = software_here.get("kvferry"), software_there.get("kvferry")
    if mine != theirs:
        found.append(
            Finding(
                "versions", f"kvferry {mine} here, {theirs} at the peer", "run the same kvferry on all nodes"
            )
        )
    found.extend(
        Finding(
            "versions",
            f"{name} {software_here[name]} here, {software_there[name]} at the peer: what one says of its "
            "memory the other may not read",
            f"pip install {name}=={software_here[name]} on both",
        )
        for name in sorted(_LIBRARIES & software_here.keys() & software_there.keys())
        if software_here[name] != software_there[name]
    )
    if "mtu" in here and "mtu" in there and here["mtu"] != there["mtu"]:
        found.append(
            Finding(
                "mtu",
                f"the MTU is {here['mtu']} here and {there['mtu']} at the peer: large packets may vanish",
                "set the same on both interfaces, and on the switches between",
            )
        )
    return found


def _number(facts: Mapping[str, str], name: str) -> int | None:
    text = facts.get(name, "").strip()
    return int(text) if text.isdigit() else None
