"""Cost of samples: the model, its fit to measured micro-batches, and its change during a run."""
