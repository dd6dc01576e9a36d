"""Brochure rates of links, with what others measured on such links: labelled priors, never a measurement.

What an engine gets from a link is often half of its brochure rate, or a twentieth over a wrong
path; only ``kvferry probe`` says. A plan made from a preset is marked unmeasured.
Rates are per direction, of one GPU's link or one port, or of a whole node for the EFA presets.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import InputError, did_you_mean
from kvferry.link.profile import ANY_NODE, ConditionFit, LinkFile, LinkProfile
from kvferry.link.records import LinkFit
from kvferry.link.words import Mode

__all__ = ["PRESETS", "LinkPreset", "PublishedFigure", "link_preset", "preset_links"]


class PublishedFigure(msgspec.Struct, frozen=True):
    """A rate that somebody measured on such a link and published; of their machines, not of yours.

    Args:
        bytes_per_second: one direction.
        what: of what, and how it was measured.
        source: the public thread, page or paper.
    """

    bytes_per_second: float
    what: str
    source: str


class LinkPreset(msgspec.Struct, frozen=True):
    """A link by its data sheet.

    Args:
        name: as typed on the command line.
        bytes_per_second: one direction, bytes (data sheets count network links in bits).
        what: what the rate is of.
        source: where the rate is published.
        is_measured: always False; it is here so that whatever is printed carries it along.
        published: what others measured on such links.
    """

    name: str
    bytes_per_second: float
    what: str
    source: str
    is_measured: bool = False
    published: tuple[PublishedFigure, ...] = ()


_GB = 1e9


def _published(*rows: tuple[float, str, str]) -> tuple[PublishedFigure, ...]:
    return tuple(PublishedFigure(rate * _GB, what, source) for rate, what, source in rows)


_EFA = "Mooncake, docs/source/design/transfer-engine/efa_transport.md"
_ALL = (
    LinkPreset(
        "nvlink3",
        300 * _GB,
        "A100 SXM, one GPU",
        "NVIDIA A100 data sheet (600 GB/s both ways)",
        published=_published((230, "peer copies by SM, 128 B payload", "NVIDIA/nccl-tests#149")),
    ),
    LinkPreset(
        "nvlink4",
        450 * _GB,
        "H100 SXM, one GPU",
        "NVIDIA H100 data sheet (900 GB/s both ways)",
        published=_published(
            (371, "H100 SXM, peer-to-peer write", "NVIDIA/nccl#1264"),
            (36, "the same with peer-to-peer off, through the host", "NVIDIA/nccl#1264"),
            (337, "H20", "deepseek-ai/DeepEP#16"),
            (49, "vLLM push through NIXL, one node", "vllm-project/vllm#52607"),
            (0.5, "vLLM pull through NIXL, one node", "vllm-project/vllm#52607"),
        ),
    ),
    LinkPreset(
        "nvlink5",
        900 * _GB,
        "B200, one GPU",
        "NVIDIA Blackwell data sheet (1.8 TB/s both ways)",
        published=_published((847, "GB200 NVL72, all-reduce bus rate at 8 GiB", "coreweave/nccl-tests#43")),
    ),
    LinkPreset(
        "pcie4",
        32 * _GB,
        "x16 slot",
        "PCI-SIG, PCIe 4.0: 16 GT/s x 16 lanes, before encoding",
        published=_published((19.9, "L4, peer-to-peer", "NVIDIA/cuda-samples#284")),
    ),
    LinkPreset(
        "pcie5",
        64 * _GB,
        "x16 slot",
        "PCI-SIG, PCIe 5.0: 32 GT/s x 16 lanes, before encoding",
        published=_published((55.6, "host to device", "NVIDIA nvbandwidth blog")),
    ),
    LinkPreset(
        "ib-hdr200",
        25 * _GB,
        "one port, 200 Gb/s",
        "NVIDIA ConnectX-6 data sheet",
        published=_published(
            (23, "one port, host memory", "openucx/ucx#8851"),
            (11, "GPU memory across sockets", "linux-rdma/perftest#241"),
        ),
    ),
    LinkPreset(
        "ib-ndr400",
        50 * _GB,
        "one port, 400 Gb/s",
        "NVIDIA ConnectX-7 data sheet",
        published=_published(
            (47, "ConnectX-7, host memory", "kvcache-ai/Mooncake#1459"),
            (15, "ConnectX-7, GPU memory over a bad path", "kvcache-ai/Mooncake#1459"),
        ),
    ),
    LinkPreset("ib-xdr800", 100 * _GB, "one port, 800 Gb/s", "NVIDIA ConnectX-8 data sheet"),
    LinkPreset(
        "roce100",
        12.5 * _GB,
        "one port, 100 Gb/s",
        "IEEE 802.3, 100 GbE",
        published=_published((12.2, "host memory, 64 MiB", "LMCache/LMCache#4161")),
    ),
    LinkPreset(
        "roce200",
        25 * _GB,
        "one port, 200 Gb/s",
        "IEEE 802.3, 200 GbE",
        published=_published(
            (21.8, "one of four ports of a node, 87 GB/s in all", "Mooncake, FAST'25, 5.4.1"),
        ),
    ),
    LinkPreset(
        "roce400",
        50 * _GB,
        "one port, 400 Gb/s",
        "IEEE 802.3, 400 GbE",
        published=_published(
            (42.6, "AMD AINIC, NIXL, 16 MiB", "ai-dynamo/nixl#1647"),
            (
                41,
                "one of four ports of a node, 164 GB/s in all, SGLang",
                "Mooncake, sglang-benchmark-results-v1.md",
            ),
            (23.8, "one of eight ports of a node, 190 GB/s in all", "Mooncake, FAST'25, 5.4.1"),
        ),
    ),
    LinkPreset(
        "efa-p5",
        400 * _GB,
        "node, 32 x 100 Gb/s",
        "AWS EC2 P5 page (3,200 Gb/s)",
        published=_published((389, "GPU memory, write", _EFA), (64, "host memory", _EFA)),
    ),
    LinkPreset(
        "efa-p5en",
        400 * _GB,
        "node, 16 x 200 Gb/s",
        "AWS EC2 P5en page (3,200 Gb/s)",
        published=_published(
            (365, "GPU memory, write", _EFA), (304, "GPU memory, read", _EFA), (213, "host memory", _EFA)
        ),
    ),
    LinkPreset("eth25", 3.125 * _GB, "one port, 25 Gb/s", "IEEE 802.3, 25 GbE"),
    LinkPreset(
        "eth100",
        12.5 * _GB,
        "one port, 100 Gb/s",
        "IEEE 802.3, 100 GbE",
        published=_published(
            (10.6, "TCP, 20 streams", "cloud-bulldozer/k8s-netperf#102"),
            (7.7, "TCP, iperf3 in one process", "esnet/iperf#1664"),
        ),
    ),
)
PRESETS: dict[str, LinkPreset] = {preset.name: preset for preset in _ALL}


def link_preset(name: str) -> LinkPreset:
    """The preset of that name. Raises InputError that lists the known ones."""
    preset = PRESETS.get(name)
    if preset is None:
        hint = did_you_mean(name, PRESETS)
        raise InputError(f"link: {name!r} is not a preset; known: {', '.join(PRESETS)}{hint}")
    return preset


def preset_links(name: str) -> LinkFile:
    """The preset as a link file: one unmeasured pair, between any two nodes, with a rate and no costs."""
    preset = link_preset(name)
    fit = LinkFit(a_seconds=None, o_seconds=None, bytes_per_second=preset.bytes_per_second)
    pair = LinkProfile(
        from_node=ANY_NODE,
        to_node=ANY_NODE,
        transport=preset.name,
        link_class=preset.name,
        line_rate=preset.bytes_per_second,
        measured=preset.is_measured,
        fits=(ConditionFit(mode=Mode.PULL, fit=fit),),
        note=f"{preset.what}; {preset.source}",
    )
    return LinkFile(pairs=(pair,))
