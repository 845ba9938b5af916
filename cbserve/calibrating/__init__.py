"""Constants of the cost model from measurements: of this machine, or of a run of another engine."""
