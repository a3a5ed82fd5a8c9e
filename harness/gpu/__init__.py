"""Running on a GPU host that has no network: pack what it needs (bundle.py), run there and keep the figures (campaign.py)."""
