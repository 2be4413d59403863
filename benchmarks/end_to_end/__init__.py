"""The same model on the same samples, trained with padded batches, with other planners' packs, and with evenpack."""
