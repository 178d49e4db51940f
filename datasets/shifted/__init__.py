"""Small benchmark images, cut into silos that are shifted against one another.

Stands on io, silo and the decoding of image files.
"""
