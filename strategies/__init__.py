"""One Flower Strategy per method: what is sent, to whom, and how replies are combined."""
