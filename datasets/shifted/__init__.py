"""Small benchmark images, cut into silos that are shifted against one another."""
