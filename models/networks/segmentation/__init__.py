"""Networks that label pixels, on the backbones of FedEFM's paper: encoders, decoders, losses."""
