"""The samples' former place."""

from mesh_samples import COSTS, advert, model, peer_id

__all__ = ["COSTS", "advert", "model", "peer_id"]
