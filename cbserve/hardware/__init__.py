"""Numbers of models and devices from public sources, for arithmetic; nothing here runs anything."""
