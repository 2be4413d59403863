"""The stages of one step, in the order in which `pipeline` calls them."""
