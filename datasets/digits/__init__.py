"""Small benchmark images, cut into silos that are shifted against one another.

Stands on io and silo.
"""
