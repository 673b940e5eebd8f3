"""The HTTP surface: API shapes, identity, limits, errors. Knows turns; turns do not know it."""
