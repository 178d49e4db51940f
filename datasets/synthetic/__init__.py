"""Made-up twins of the real data sets: no patient is in them."""
