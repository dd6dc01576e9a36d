"""The protocol between a prefill and a decode worker: words, tickets and one table. Pure."""

from kvferry.protocol.machine import Machine
from kvferry.protocol.table import Action, Event, Phase, Role
from kvferry.protocol.ticket import Mode, Ticket, open_ticket, read_ticket, seal_ticket

__all__ = [
    "Action",
    "Event",
    "Machine",
    "Mode",
    "Phase",
    "Role",
    "Ticket",
    "open_ticket",
    "read_ticket",
    "seal_ticket",
]
