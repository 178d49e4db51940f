"""CSV silos: a schema, a reader, the four hospitals of Fed-Heart-Disease."""
