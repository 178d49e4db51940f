"""Files at rest: complete or absent, sealed by a checksum, read within bounds."""
