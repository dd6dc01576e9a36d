"""All model families; importing this package fills :data:`kvferry.model.registry.FAMILIES`."""

from __future__ import annotations

from kvferry.model.families import compressed, encoder, full, latent, linear, state_space, window

__all__ = ["compressed", "encoder", "full", "latent", "linear", "state_space", "window"]
