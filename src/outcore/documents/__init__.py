"""Documents that are read with a schema: JSON and YAML, schemas by hand, schemas of dataclasses."""
