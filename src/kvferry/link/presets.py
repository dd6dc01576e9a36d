"""Brochure rates of links: labelled priors, never a measurement.

What an engine gets from a link is often half of its brochure rate, or a twentieth over a wrong
path; only ``kvferry probe`` says. A plan made from a preset is marked unmeasured.
Rates are per direction, of one GPU's link or one port, or of a whole node for the EFA presets.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import InputError

__all__ = ["PRESETS", "LinkPreset", "link_preset"]


class LinkPreset(msgspec.Struct, frozen=True):
    """A link by its data sheet.

    Args:
        name: as typed on the command line.
        bytes_per_second: one direction, bytes (data sheets count network links in bits).
        what: what the rate is of.
        source: where the rate is published.
        is_measured: always False; it is here so that whatever is printed carries it along.
    """

    name: str
    bytes_per_second: float
    what: str
    source: str
    is_measured: bool = False


_GB = 1e9
_ALL = (
    LinkPreset("nvlink3", 300 * _GB, "A100 SXM, one GPU", "NVIDIA A100 data sheet (600 GB/s both ways)"),
    LinkPreset("nvlink4", 450 * _GB, "H100 SXM, one GPU", "NVIDIA H100 data sheet (900 GB/s both ways)"),
    LinkPreset("nvlink5", 900 * _GB, "B200, one GPU", "NVIDIA Blackwell data sheet (1.8 TB/s both ways)"),
    LinkPreset("pcie4", 32 * _GB, "x16 slot", "PCI-SIG, PCIe 4.0: 16 GT/s x 16 lanes, before encoding"),
    LinkPreset("pcie5", 64 * _GB, "x16 slot", "PCI-SIG, PCIe 5.0: 32 GT/s x 16 lanes, before encoding"),
    LinkPreset("ib-hdr200", 25 * _GB, "one port, 200 Gb/s", "NVIDIA ConnectX-6 data sheet"),
    LinkPreset("ib-ndr400", 50 * _GB, "one port, 400 Gb/s", "NVIDIA ConnectX-7 data sheet"),
    LinkPreset("ib-xdr800", 100 * _GB, "one port, 800 Gb/s", "NVIDIA ConnectX-8 data sheet"),
    LinkPreset("roce100", 12.5 * _GB, "one port, 100 Gb/s", "IEEE 802.3, 100 GbE"),
    LinkPreset("roce200", 25 * _GB, "one port, 200 Gb/s", "IEEE 802.3, 200 GbE"),
    LinkPreset("roce400", 50 * _GB, "one port, 400 Gb/s", "IEEE 802.3, 400 GbE"),
    LinkPreset("efa-p5", 400 * _GB, "node, 32 x 100 Gb/s", "AWS EC2 P5 page (3,200 Gb/s)"),
    LinkPreset("efa-p5en", 400 * _GB, "node, 16 x 200 Gb/s", "AWS EC2 P5en page (3,200 Gb/s)"),
    LinkPreset("eth25", 3.125 * _GB, "one port, 25 Gb/s", "IEEE 802.3, 25 GbE"),
    LinkPreset("eth100", 12.5 * _GB, "one port, 100 Gb/s", "IEEE 802.3, 100 GbE"),
)
PRESETS: dict[str, LinkPreset] = {preset.name: preset for preset in _ALL}


def link_preset(name: str) -> LinkPreset:
    """The preset of that name. Raises InputError that lists the known ones."""
    preset = PRESETS.get(name)
    if preset is None:
        raise InputError(f"link: {name!r} is not a preset; known: {', '.join(PRESETS)}")
    return preset
