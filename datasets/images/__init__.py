"""Photographs with a manifest or a listing, and the dermoscopic centres."""
